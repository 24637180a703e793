"""The one object that both halves of a connector share, found by the replica and its start.

The worker half opens it once the engine's KV memory is known; the scheduler half, made later in the same process, looks it up.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.directory.control import ControlPageReader
from xinference.model.llm.vllm.xavier.directory.geometry import plan_segment
from xinference.model.llm.vllm.xavier.directory.names import control_path, segment_path
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.errors import ConfigRefused
from xinference.model.llm.vllm.xavier.policy.admission import Doorkeeper
from xinference.model.llm.vllm.xavier.policy.placement import PlacementBook
from xinference.model.llm.vllm.xavier.policy.rates import MeasuredRates
from xinference.model.llm.vllm.xavier.store.tier import CpuTier
from xinference.model.llm.vllm.xavier.transfer.blocks import EngineBlocks
from xinference.model.llm.vllm.xavier.transfer.copier import Copier
from xinference.model.llm.vllm.xavier.transfer.epoch import ModelEpoch
from xinference.model.llm.vllm.xavier.transfer.mover import Mover
from xinference.model.llm.vllm.xavier.transfer.peers import Peers
from xinference.model.llm.vllm.xavier.transfer.state import TransferState

logger = logging.getLogger(__name__)

# How long a shutdown waits for saves that are under way; what is left is given back.
DRAIN_SECONDS = 5.0


@dataclass(slots=True)
class Engine:
    """One engine's share in the cache.

    Args:
        config: the replica's settings.
        tokens_per_block: tokens in an engine block.
        state: what the threads share.
        copier: the helper thread.
        clock: CLOCK_MONOTONIC in seconds.
    """

    config: XavierConfig
    tokens_per_block: int
    state: TransferState
    copier: Copier
    clock: Callable[[], float]
    closed: bool = False

    @classmethod
    def open(
        cls, config: XavierConfig, namespace: str, mover: Mover, tokens_per_block: int, clock: Callable[[], float] = time.monotonic
    ) -> "Engine":
        """Open the segment and everything over it. The copier is not started.

        Args:
            namespace: the namespace's 16 hex digits.
            mover: copies blocks; says how many there are and how large.
            clock: CLOCK_MONOTONIC in seconds; by hand in tests.

        Raises:
            ControlPageRefused: the launcher has made no control page.
            BudgetTooSmall: the budget cannot hold one block.
            SegmentRefused, SharedMemoryFull, PlatformRefused: the segment cannot be made.
        """
        control = ControlPageReader.open(control_path(config.shm_dir, config.worker_id, config.replica_uid))
        control.poll()
        epoch = control.state.epoch
        geometry = plan_segment(config.cpu_cache_bytes, mover.block_bytes, request_records=config.request_ring_records)
        path = segment_path(config.shm_dir, config.worker_id, config.replica_uid, namespace)
        segment = SegmentWriter.open(path, geometry, incarnation=config.incarnation, epoch=epoch)
        lock = threading.Lock()
        tier = CpuTier(segment, PlacementBook(geometry.num_places), Doorkeeper(geometry.num_places))

        def count(name: str, amount: int = 1) -> None:
            with lock:
                segment.counters.add(name, amount)

        peers = Peers(config, namespace, mover, count)
        peers.want(control.state.peers)
        state = TransferState(
            lock=lock,
            segment=segment,
            tier=tier,
            mover=mover,
            slab=mover.open_slab(segment.slab_view(), geometry.place_bytes),
            blocks=EngineBlocks(mover.num_blocks),
            epoch=ModelEpoch(segment, tier, epoch),
            peers=peers,
            control=control,
            rates=MeasuredRates(),
        )
        logger.info("segment %s: %s places of %s bytes, %s adopted", path, geometry.num_places, geometry.place_bytes, tier.used_blocks)
        return cls(config, tokens_per_block, state, Copier(config, state, clock), clock)

    def close(self) -> None:
        """Drain, stop the copier, let the segment go for a successor to adopt. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        if not self.copier.close(DRAIN_SECONDS):
            logger.warning("a copy did not end in time: the segment stays locked until this process ends")
            return
        with self.state.lock:
            self.state.closed = True
            self.state.segment.close()


class EngineRegistry:
    """Engines of this process by replica and start; one registry serves both halves of every connector."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, int], Engine] = {}

    def add(self, engine: Engine) -> None:
        """Make ``engine`` known.

        Raises:
            ConfigRefused: this start of the replica has an engine already.
        """
        key = (engine.config.replica_uid, engine.config.incarnation)
        if key in self._engines:
            raise ConfigRefused(f"replica {key[0]} has two engines of one incarnation")
        self._engines[key] = engine

    def get(self, config: XavierConfig) -> Engine | None:
        """The engine of this start of the replica, if its worker half ran in this process."""
        return self._engines.get((config.replica_uid, config.incarnation))

    def close(self, config: XavierConfig) -> None:
        """Close this start's engine and forget it; nothing if there is none."""
        engine = self._engines.pop((config.replica_uid, config.incarnation), None)
        if engine is not None:
            engine.close()


ENGINES = EngineRegistry()

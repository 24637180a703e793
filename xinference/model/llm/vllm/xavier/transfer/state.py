"""What the threads of one engine share. Whoever changes any of it holds ``lock``, unless said otherwise beside the field."""

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

from xinference.model.llm.vllm.xavier.directory.control import ControlPageReader
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.errors import BookImbalance
from xinference.model.llm.vllm.xavier.policy.rates import MeasuredRates
from xinference.model.llm.vllm.xavier.store.tier import CpuTier
from xinference.model.llm.vllm.xavier.transfer.blocks import EngineBlocks
from xinference.model.llm.vllm.xavier.transfer.epoch import ModelEpoch
from xinference.model.llm.vllm.xavier.transfer.jobs import UNPINNED, LoadJob
from xinference.model.llm.vllm.xavier.transfer.mover import Mover
from xinference.model.llm.vllm.xavier.transfer.peers import Peers

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TransferState:
    """One engine's shared state.

    Args:
        lock: orders the step thread and the copier thread; held for microseconds, never while bytes are copied.
        segment, tier: the own segment and the CPU tier in it.
        mover, slab: how blocks are copied, and the own slab as the mover sees it.
        blocks: generations of the engine's blocks; written by the step thread only.
        epoch: the clear epoch.
        peers: the other replicas' segments; changed by the copier thread only.
        control: the control page; read by the copier thread only.
        rates: measured speeds.
        open_loads: loads that still hold places or engine blocks, by request.
        corrupted: our own books were found to contradict each other; nothing is served, saved or published any more.
        closed: the segment was let go.
        hook_copy_ns: nanoseconds that hooks spent on copies so far; of the step thread alone.
        open_saves: blocks on their way into places, by the epoch in which they were named.
    """

    lock: threading.Lock
    segment: SegmentWriter
    tier: CpuTier
    mover: Mover
    slab: Any
    blocks: EngineBlocks
    epoch: ModelEpoch
    peers: Peers
    control: ControlPageReader
    rates: MeasuredRates
    open_loads: dict[str, LoadJob] = field(default_factory=dict)
    open_saves: dict[int, int] = field(default_factory=dict)
    hook_copy_ns: int = 0
    corrupted: bool = False
    closed: bool = False
    reported: set[tuple[str, type[BaseException]]] = field(default_factory=set)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter. The lock is held. Once the segment is closed there is nothing to count in."""
        if not self.closed:
            self.segment.counters.add(name, amount)

    def report(self, where: str, error: BaseException) -> None:
        """An error was caught: logged with its traceback once per place and kind, and counted. The lock is not held."""
        if (where, type(error)) not in self.reported:
            self.reported.add((where, type(error)))
            logger.error("%s failed; further failures of this kind are only counted", where, exc_info=error)
        if isinstance(error, BookImbalance) and not self.corrupted:
            self.corrupted = True
            logger.critical("the books of the shared cache contradict each other: this replica goes on without it")
            self._withdraw_all()
        with self.lock:
            self.count("hook_errors")

    def open_save(self, epoch: int, num_blocks: int) -> None:
        """Note blocks that were reserved, or (negative) settled, in this epoch. The lock is held."""
        left = self.open_saves.get(epoch, 0) + num_blocks
        if left:
            self.open_saves[epoch] = left
        else:
            self.open_saves.pop(epoch, None)

    def oldest_open_epoch(self) -> int:
        """The lowest epoch of anything that still holds a place. The lock is held."""
        return min((self.epoch.current, *self.open_saves, *(job.epoch for job in self.open_loads.values())))

    def _withdraw_all(self) -> None:
        """Let no peer read what corrupt books vouch for."""
        with self.lock:
            for place in range(self.segment.geometry.num_places):
                if self.segment.published(place):
                    self.segment.invalidate(place)

    def note_batch(self, num_blocks: int, seconds: float) -> None:
        """A batch of a load ended with this many good blocks. The lock is not held."""
        num_bytes = num_blocks * self.mover.block_bytes
        with self.lock:
            self.count("load_batches")
            self.count("load_ns", int(seconds * 1e9))
            if num_blocks:
                self.rates.observe_copy(num_bytes, seconds)

    def end_load(self, job: LoadJob, started: float, ended: float) -> None:
        """Write a load's outcome and let its places go, once. The lock is not held."""
        with self.lock:
            if job.done:
                return
            self.tier.unpin([piece.place for piece in job.pieces if piece.place != UNPINNED])
            if job.epoch != self.epoch.current and not job.cancelled:
                job.failed_blocks.update(piece.block for piece in job.pieces)
            job.started, job.ended = started, ended
            job.done = True

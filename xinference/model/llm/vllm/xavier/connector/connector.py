"""The class that vLLM loads, for every version from 0.21 to 0.33. Only this module and ``views`` know vLLM.

vLLM makes it twice in one process: first the worker half, when KV memory is sized, then the scheduler half. It also imports the module in
API servers and while reading a configuration, so importing it starts nothing. Hooks that a version does not know are ordinary methods
that nobody calls, and none calls ``super()`` for a hook that 0.21 lacks.
"""

import atexit
import logging
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.connector.adapters import AdapterDigests
from xinference.model.llm.vllm.xavier.connector.engine import ENGINES, Engine
from xinference.model.llm.vllm.xavier.connector.facts import EngineFacts, refuse_unproven
from xinference.model.llm.vllm.xavier.connector.guard import Guard
from xinference.model.llm.vllm.xavier.connector.identity import hash_root, namespace_of
from xinference.model.llm.vllm.xavier.connector.metadata import EMPTY, StepMeta
from xinference.model.llm.vllm.xavier.connector.scheduler import XavierScheduler
from xinference.model.llm.vllm.xavier.connector.views import PoolCache, engine_facts, request_status, request_view, step_view
from xinference.model.llm.vllm.xavier.connector.worker import XavierWorker
from xinference.model.llm.vllm.xavier.errors import ConfigRefused
from xinference.model.llm.vllm.xavier.transfer.cpu import CpuMover
from xinference.model.llm.vllm.xavier.transfer.cuda import CudaLane
from xinference.model.llm.vllm.xavier.transfer.staged import StagedMover

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:  # before 0.30, where get_finished is asked instead
    KVConnectorTransferResults = None  # type: ignore[assignment, misc]
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32
    CacheHitSource = None  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# Our metadata is a plain dataclass, so that the scheduler half needs no vLLM.
KVConnectorMetadata.register(StepMeta)


class XavierConnector(KVConnectorBase_V1, SupportsHMA):
    """Shares the KV cache of this engine with its peers on the host.

    Raises:
        ConfigRefused: the settings are not ours, or sharing is not proven for this engine.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig", **kwargs: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = XavierConfig.from_wire(dict(transfer.kv_connector_extra_config if transfer is not None else {}))
        self._facts = engine_facts(vllm_config, kv_cache_config)
        refuse_unproven(self._facts)
        self._adapters = AdapterDigests()
        self._meta: StepMeta = EMPTY
        self._half: XavierScheduler  # of the scheduler half
        self._worker: XavierWorker | None = None  # of the worker half, from the registration of KV memory on
        self._guard: Guard
        if role is KVConnectorRole.SCHEDULER:
            engine = ENGINES.get(self._config)
            if engine is None:
                raise ConfigRefused("the worker half of this engine is not in this process: only the uni executor is supported")
            in_flight = 2 if vllm_config.scheduler_config.async_scheduling else 1
            self._half = XavierScheduler(engine, steps_in_flight=in_flight)
            self._guard = Guard(engine.state)

    # ---- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """KV memory is there: open the segment and start the helper thread.

        Args:
            kv_caches: layer name -> tensor on the CPU or a CUDA device, of any layout with a block dimension first or second.
        """
        facts = self._facts
        mover = _mover({name: kv_caches[name] for group in facts.groups for name in group.layer_names}, facts.num_blocks)
        if mover.block_bytes != facts.block_bytes:
            raise ConfigRefused(
                f"the KV tensors hold {mover.block_bytes} bytes a block, the engine's configuration says {facts.block_bytes}"
            )
        namespace = _namespace(facts, self._config, mover)
        engine = Engine.open(self._config, namespace, mover, facts.hash_block_size)
        ENGINES.add(engine)
        # An engine inside its caller's process may be collected without a shutdown.
        atexit.register(ENGINES.close, self._config)
        self._worker = XavierWorker(engine)
        self._guard = Guard(engine.state)
        engine.copier.start()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step's metadata, until it is cleared."""
        super().bind_connector_metadata(connector_metadata)
        self._meta = connector_metadata if isinstance(connector_metadata, StepMeta) else EMPTY

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        super().clear_connector_metadata()
        self._meta = EMPTY

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Synchronous loads are made here, asynchronous ones handed to the helper thread."""
        meta, worker = self._meta, self._worker
        if meta is not EMPTY and worker is not None:
            self._guard.run("start_load_kv", lambda: worker.start_loads(meta), lambda: worker.fail_loads(meta))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before the forward pass; layer hooks do not run under full CUDA graphs."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole after the step."""

    def wait_for_save(self) -> None:
        """The step's blocks are written: hand its saves to the helper thread. 0.21 does not call it on steps without a forward pass."""
        meta, worker = self._meta, self._worker
        if meta is not EMPTY and worker is not None:
            self._guard.run("wait_for_save", lambda: worker.after_forward(meta), lambda: None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose asynchronous load has ended, each exactly once. Nothing is ever sent."""
        self.wait_for_save()
        if self._worker is None:
            return None, None
        self._guard.flush()
        if not self._worker.waits:
            return None, None
        finished: set[str] = self._guard.run("get_finished", self._worker.take_finished, set)
        return None, finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same as one object, from 0.30 on. A failed load is reported by its blocks."""
        _, finished = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=finished or set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Engine blocks that a load should have filled and did not."""
        return self._worker.take_invalid() if self._worker is not None else set()

    # ---- scheduler half

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """The engine's own prefix cache, to be reset after a clear."""
        self._half.local_cache = PoolCache(gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """The same, from 0.30 on."""
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def on_new_request(self, request: "Request") -> None:
        """A request entered the queue (from 0.22 on)."""
        self._guard.run("on_new_request", lambda: self._half.arrived(request_view(request, self._adapters), time.monotonic()), lambda: None)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the engine's own hit, and whether they are loaded beside the steps. Asked at every scheduling attempt."""
        return self._guard.run(
            "get_num_new_matched_tokens",
            lambda: self._half.matched_tokens(request_view(request, self._adapters), num_computed_tokens, time.monotonic()),
            lambda: (0, False),
        )

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The commit point of an offer."""
        block_ids = blocks.get_block_ids()[0]
        self._guard.run(
            "update_state_after_alloc",
            lambda: self._half.allocated(request_view(request, self._adapters), block_ids, num_external_tokens, time.monotonic()),
            lambda: self._half.allocation_failed(request.request_id, block_ids, num_external_tokens, time.monotonic()),
        )

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """The step's copies; the shared ``EMPTY`` when there are none."""
        meta = self._guard.run(
            "build_connector_meta",
            lambda: self._half.build(step_view(scheduler_output, self._half.wake_at), time.monotonic()),
            self._half.rescue,
        )
        self._guard.flush()
        return cast(KVConnectorMetadata, meta)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """A step's outcome, before the engine applies it."""
        finished, invalid = connector_output.finished_recving or (), connector_output.invalid_block_ids or ()
        self._guard.run("update_connector_output", lambda: self._half.output(finished, invalid, time.monotonic()), lambda: None)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Its blocks are never held: a save of them under way is validated by their generation."""
        self._guard.run(
            "request_finished",
            lambda: self._half.finished(
                request.request_id, request_status(request), time.monotonic(), request_view(request, self._adapters)
            ),
            lambda: None,
        )
        return False, None

    def request_finished_all_groups(self, request: "Request", block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The same, from engines with the hybrid memory allocator on."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool | None:
        """Refused: a clear is model-wide and comes from the server. The engine's own cache may be reset without us."""
        logger.warning("the shared cache is cleared through the server, for all replicas at once; this request is refused")
        return False

    def take_events(self) -> Iterable[Any]:
        """No events."""
        return ()

    # ---- both

    def shutdown(self) -> None:
        """Drain and let the segment go for a successor. The other half may have done it already."""
        ENGINES.close(self._config)

    # ---- what newer versions ask

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """CPU engines: each layer as its back end lays it out (until 0.28)."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss, nothing else (from 0.27)."""
        return False

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Hybrid models are refused (from 0.28)."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Any layout: blocks are moved whole."""
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No layer hooks are used."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """KV memory must stay where it was registered (from 0.33)."""
        return False

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """The one group there is (from 0.32)."""
        return (0,)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[Any, int]:
        """Slabs are host memory, whosever they are (from 0.32)."""
        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    def register_finished_partial_tail(self, request: "Request", block_ids: Any, partial_tail_offloads: Any) -> bool:
        """Partial blocks are not kept (from 0.30)."""
        return False

    def has_pending_block_frees(self) -> bool:
        """No transfer holds blocks that a preemption could wait for (from 0.30)."""
        return False

    def has_pending_push_work(self) -> bool:
        """Saves do not need the engine to step (from 0.24)."""
        return False

    def finish_forward(self) -> None:
        """Nothing waits for the reads of a step (from 0.30)."""

    def reset_capture_state(self) -> None:
        """Nothing is captured (from 0.30)."""

    def unregister_kv_caches(self) -> None:
        """Sleep mode is not supported (from 0.33)."""

    def restore_kv_caches(self) -> None:
        """Sleep mode is not supported (from 0.33)."""

    def get_mem_pool_context(self) -> Any:
        """The engine's own memory (from 0.31)."""
        return None

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Peers meet through the control page."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Peers meet through the control page (from 0.23)."""


def _mover(kv_caches: dict[str, torch.Tensor], num_blocks: int) -> CpuMover | StagedMover:
    """The mover for the device that KV memory is on."""
    device = next((tensor.device for tensor in kv_caches.values()), torch.device("cpu"))
    return CpuMover(kv_caches, num_blocks) if device.type == "cpu" else StagedMover(kv_caches, num_blocks, CudaLane(device))


def _namespace(facts: EngineFacts, config: XavierConfig, mover: CpuMover | StagedMover) -> str:
    """The namespace's short name; a warning if no other process can be in it."""
    root, common = hash_root(facts, os.environ.get("PYTHONHASHSEED"), os.urandom(16))
    if not common:
        logger.warning("vLLM %s draws its hash chains' root at random without PYTHONHASHSEED: this replica shares nothing", facts.version)
    return namespace_of(facts, config, mover.layout, root).short()

"""vLLM's real scheduler, both halves of the real connector, and a scripted worker in place of a model.

The worker writes into each token's slot of the KV tensors a digest of all tokens up to it, and compares every slot before it computes,
so whatever the scheduler and the connector do together that puts wrong bytes under a request is noticed. With ``depth`` 2 a step is
dispatched before the outcome of the one before it is reported, as with asynchronous scheduling.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256 as hash_function
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.connector.connector import XavierConnector
from xinference.model.llm.vllm.xavier.connector.engine import ENGINES, Engine
from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.names import control_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES

BLOCK = 32
LAYERS = ("layer.0", "layer.1")
HEAD_DIM = 8
SLOT_BYTES = 2 * HEAD_DIM * 2


class WrongBytes(BaseException):
    """A request was about to be computed on bytes that are not its own."""


@dataclass
class Row:
    """One request as the worker knows it."""

    tokens: list[int]
    salt: str
    blocks: list[int] = field(default_factory=list)

    def token(self, position: int) -> int:
        """The token at a position; sampled ones follow from those before them."""
        while len(self.tokens) <= position:
            self.tokens.append(self.slot(len(self.tokens) - 1)[0])
        return self.tokens[position]

    def slot(self, position: int) -> bytes:
        """What the KV of this position must be."""
        self.token(position)
        return sha256(f"{self.salt}{self.tokens[: position + 1]}".encode()).digest()[:SLOT_BYTES]


def engine_config(model: Path, config: XavierConfig, num_blocks: int, budget: int) -> VllmConfig:
    """What vLLM makes of the launcher's arguments."""
    arguments = EngineArgs(
        model=str(model),
        dtype="bfloat16",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=1024,
        max_num_batched_tokens=budget,
        max_num_seqs=16,
        num_gpu_blocks_override=num_blocks,
        distributed_executor_backend="uni",
        kv_transfer_config={
            "kv_connector": "XavierConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "xinference.model.llm.vllm.xavier.connector.connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": config.to_wire(),
        },
    )
    made = arguments.create_engine_config()
    made.cache_config.num_gpu_blocks = num_blocks
    return made


def kv_tensors(page_bytes: int, num_blocks: int) -> list[KVCacheTensor]:
    """One buffer for all layers; before 0.29 one for each."""
    if "shared_by" in {field.name for field in fields(KVCacheTensor)}:
        return [KVCacheTensor(size=page_bytes * num_blocks, shared_by=[name]) for name in LAYERS]
    size = page_bytes * num_blocks
    return [KVCacheTensor(size=size * len(LAYERS), layers=list(LAYERS), layer_stride=size, block_stride=page_bytes)]


class Replica:
    """One engine without a model.

    Args:
        directory: stands for /dev/shm.
        uid: the replica.
        model: directory of any model; its configuration is read.
        num_blocks: engine blocks.
        depth: steps in flight.
        budget: tokens a step.
    """

    def __init__(
        self, directory: Path, uid: str, model: Path, *, num_blocks: int = 64, depth: int = 1, budget: int = 128, **settings: Any
    ) -> None:
        self.config = XavierConfig("w", uid, 1, str(directory), 2 << 20, "model", **settings)
        self.entry = PeerEntry("w", uid, 1)
        self.page = ControlPageWriter.create(control_path(str(directory), "w", uid), ControlState(epoch=1))
        self.vllm_config = engine_config(model, self.config, num_blocks, budget)
        self.vllm_config.scheduler_config.async_scheduling = depth > 1
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HEAD_DIM, dtype=torch.bfloat16)
        size = spec.page_size_bytes
        self.kv_config = KVCacheConfig(num_blocks, kv_tensors(size, num_blocks), [KVCacheGroupSpec(list(LAYERS), spec)])
        memory = torch.zeros(len(LAYERS), num_blocks, 1, BLOCK, 2 * HEAD_DIM, dtype=torch.bfloat16)
        self.slots = memory.view(torch.uint8).view(len(LAYERS), num_blocks, BLOCK, SLOT_BYTES).numpy()
        self.worker = XavierConnector(self.vllm_config, KVConnectorRole.WORKER, self.kv_config)
        self.worker.register_kv_caches({name: memory[index] for index, name in enumerate(LAYERS)})
        init_none_hash(hash_function)
        kind = AsyncScheduler if depth > 1 else Scheduler
        self.scheduler = kind(
            vllm_config=self.vllm_config,
            kv_cache_config=self.kv_config,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.depth = depth
        self.hasher = get_request_block_hasher(BLOCK, hash_function)
        self.rows: dict[str, Row] = {}
        self.in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.text: dict[str, list[int]] = {}
        self.copying = True

    @property
    def engine(self) -> Engine:
        """What both halves share."""
        engine = ENGINES.get(self.config)
        assert engine is not None
        return engine

    def close(self) -> None:
        """End both halves."""
        self.scheduler.shutdown()
        self.worker.shutdown()

    # ---- what a test does

    def know(self, *others: "Replica", epoch: int = 1) -> None:
        """The control page names these peers, and is read."""
        self.page.write(ControlState(epoch=epoch, peers=tuple(other.entry for other in others)))
        self.engine.copier.poll()

    def add(self, request_id: str, tokens: Sequence[int], max_tokens: int = 1, salt: str | None = None, **sampling: Any) -> Request:
        """A request arrives."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **sampling)
        params.extra_args = {"kv_transfer_params": {"xavier": {"v": 1, "request": _hex(request_id)}}}
        request = Request(request_id, list(tokens), params, None, cache_salt=salt, block_hasher=self.hasher)
        self.rows[request_id] = Row(list(tokens), salt or "")
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client left."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def ask(self, request_id: str, tokens: Sequence[int], max_tokens: int = 1, **kinds: Any) -> list[int]:
        """A request from arrival to end."""
        self.add(request_id, tokens, max_tokens, **kinds)
        self.run()
        return self.text[request_id]

    def run(self, max_steps: int = 400) -> None:
        """Steps until the scheduler has nothing left."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"still there after {max_steps} steps: {[(r.request_id, r.status) for r in self.scheduler.requests.values()]}")

    def step(self) -> None:
        """One turn of the engine's loop."""
        if len(self.in_flight) < self.depth and self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.in_flight.append((output, self._execute(output)))
            if output.total_num_scheduled_tokens and len(self.in_flight) < self.depth:
                return
        if self.in_flight:
            output, result = self.in_flight.popleft()
            self._take(self.scheduler.update_from_output(output, result))

    def counter(self, name: str) -> int:
        """One counter of the segment."""
        return self.engine.state.segment.counters.value(name)

    def sources(self, request_id: str) -> dict[str, int]:
        """Where the tokens of a request came from; its record must add up."""
        reader = SegmentReader.open(self.engine.state.segment.path, expected_incarnation=None)
        (entry,) = reader.find_request(bytes.fromhex(_hex(request_id)))
        assert sum(entry.sources) == entry.prompt_tokens
        return {source: tokens for source, tokens in zip(SOURCES, entry.sources, strict=True) if tokens}

    def check(self) -> None:
        """Books balance, and nothing is held by an idle engine."""
        self.engine.state.tier.check()
        if not self.scheduler.requests:
            pool = self.scheduler.kv_cache_manager.block_pool
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
            assert self.engine.state.open_loads == {}
        assert self.counter("hook_errors") == 0

    # ---- the worker

    def _execute(self, output: Any) -> ModelRunnerOutput:
        """What vLLM's model runner does, in its order (0.32, v1/worker/kv_connector_model_runner_mixin.py)."""
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id].blocks = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self.rows[request_id].blocks = list(blocks[0])
            elif blocks is not None:
                self.rows[request_id].blocks.extend(blocks[0])
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        loads_first = getattr(output, "has_sync_kv_loads", True)  # before 0.29 loads always come first
        if loads_first:
            self.worker.start_load_kv(None)  # type: ignore[arg-type]
        bad = set(self.worker._worker._invalid)  # a model would compute on them; what it computes is thrown away
        sampled = [self._forward(request_id, starts[request_id], num, bad) for request_id, num in output.num_scheduled_tokens.items()]
        if not loads_first:
            self.worker.start_load_kv(None)  # type: ignore[arg-type]
        self.worker.wait_for_save()
        if self.copying:
            self.engine.copier.run_pending()
        sending, finished = self.worker.get_finished(output.finished_req_ids)
        invalid = self.worker.get_block_ids_with_load_errors()
        self.worker.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        transfers = KVConnectorOutput(sending, finished, invalid_block_ids=invalid)
        return ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, sampled, kv_connector_output=transfers)

    def _forward(self, request_id: str, start: int, num_tokens: int, bad: set[int]) -> list[int]:
        row = self.rows[request_id]
        if not bad.intersection(row.blocks):
            for position in range(start):
                if self._at(row, position)[0].tobytes() != row.slot(position):
                    raise WrongBytes(f"{request_id} at {position}")
        for position in range(start, start + num_tokens):
            self._at(row, position)[:] = list(row.slot(position))
        known = self.scheduler.requests[request_id].num_prompt_tokens
        end = start + num_tokens
        return [row.token(end)] if end >= max(known, len(row.tokens)) else []

    def _at(self, row: Row, position: int) -> Any:
        return self.slots[:, row.blocks[position // BLOCK], position % BLOCK]

    def _take(self, outputs: Any) -> None:
        for group in outputs.values():
            for output in group.outputs:
                self.text.setdefault(output.request_id, []).extend(output.new_token_ids)


def _hex(request_id: str) -> str:
    return sha256(request_id.encode()).hexdigest()[:32]

"""vLLM's real scheduler, both halves of the real connector, and a scripted worker in place of a model.

A test says when a step is dispatched, when its outcome is reported, and when the helper thread does how much of its work. With ``depth`` 2
a step is dispatched before the outcome of the one before it is reported, as with asynchronous scheduling. Every token that the scheduler
delivers is compared with what an engine without a cache would have answered.
"""

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
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
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES, RequestEntry
from xinference.model.llm.vllm.xavier.test.vllm_worker import BLOCK, SLOT_BYTES, ScriptedMover, ScriptedWorker, true_text

LAYERS = ("layer.0", "layer.1")
HEAD_DIM = SLOT_BYTES // 4


class WrongBytes(BaseException):
    """A request was computed on bytes that are not its own, and nobody has said that they are invalid."""


class WrongToken(BaseException):
    """A token was delivered that an engine without a cache would not have given."""


@lru_cache(maxsize=4)
def base_config(model: Path) -> VllmConfig:
    """What vLLM makes of the launcher's arguments, without what differs between replicas; for each model it may start a process."""
    arguments = EngineArgs(
        model=str(model),
        dtype="bfloat16",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=1024,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        distributed_executor_backend="uni",
        kv_transfer_config={
            "kv_connector": "XavierConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "xinference.model.llm.vllm.xavier.connector.connector",
            "kv_load_failure_policy": "recompute",
        },
    )
    return arguments.create_engine_config()


def engine_config(model: Path, config: XavierConfig, num_blocks: int, budget: int, depth: int) -> VllmConfig:
    """One engine's configuration."""
    made = copy.copy(base_config(model))
    made.cache_config = copy.copy(made.cache_config)
    made.cache_config.num_gpu_blocks = made.cache_config.num_gpu_blocks_override = num_blocks
    made.kv_transfer_config = copy.copy(made.kv_transfer_config)
    made.kv_transfer_config.kv_connector_extra_config = config.to_wire()
    made.scheduler_config = copy.copy(made.scheduler_config)
    made.scheduler_config.async_scheduling = depth > 1
    made.scheduler_config.max_num_batched_tokens = made.scheduler_config.max_num_scheduled_tokens = budget
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
        incarnation: of this start.
        page: the control page of an earlier start, to be used again.
        settings: of the connector.
    """

    def __init__(
        self,
        directory: Path,
        uid: str,
        model: Path,
        *,
        num_blocks: int = 64,
        depth: int = 1,
        budget: int = 128,
        incarnation: int = 1,
        page: ControlPageWriter | None = None,
        **settings: Any,
    ) -> None:
        settings = {"cpu_cache_bytes": 2 << 20, **settings}
        self.config = XavierConfig("w", uid, incarnation, str(directory), model_identity="model", **settings)
        self.entry = PeerEntry("w", uid, incarnation)
        self.page = page or ControlPageWriter.create(control_path(str(directory), "w", uid), ControlState(epoch=1))
        self.vllm_config = engine_config(model, self.config, num_blocks, budget, depth)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HEAD_DIM, dtype=torch.bfloat16)
        tensors = kv_tensors(spec.page_size_bytes, num_blocks)
        self.kv_config = KVCacheConfig(num_blocks, tensors, [KVCacheGroupSpec(list(LAYERS), spec)])
        memory = torch.zeros(len(LAYERS), num_blocks, 1, BLOCK, 2 * HEAD_DIM, dtype=torch.bfloat16)
        self.worker = ScriptedWorker(memory.view(torch.uint8).view(len(LAYERS), num_blocks, BLOCK, SLOT_BYTES).numpy())
        self.connector = XavierConnector(self.vllm_config, KVConnectorRole.WORKER, self.kv_config)
        self.connector.register_kv_caches({name: memory[index] for index, name in enumerate(LAYERS)})
        self.mover = self.engine.state.mover = ScriptedMover(self.engine.state.mover)
        self._errors_before = self.counter("hook_errors")
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
        self.in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.requests: dict[str, Request] = {}
        self.text: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        # By request, the first token of its prompt that was computed and not found, as of its first output.
        self.first_computed: dict[str, int] = {}
        # Whether the helper thread has done all its work at the end of every step.
        self.copying = True
        # Whether a request that is computed on wrong bytes is an error at once, and not only when it delivers a token.
        self.strict = True

    @property
    def engine(self) -> Engine:
        """What both halves share."""
        engine = ENGINES.get(self.config)
        assert engine is not None
        return engine

    def close(self) -> None:
        """End both halves."""
        self.scheduler.shutdown()
        self.connector.shutdown()

    def kill(self) -> None:
        """As SIGKILL leaves it: nothing is drained or said, the lock falls. No other call may follow."""
        engine = self.engine
        ENGINES._engines.pop((self.config.replica_uid, self.config.incarnation))
        engine.state.closed = True
        engine.state.segment._lock.release()

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
        self.expected[request_id] = true_text(tokens, salt or "", max_tokens)
        self.requests[request_id] = request
        self.worker.add(request_id, tokens, salt or "")
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
            output = self.dispatch()
            if output.total_num_scheduled_tokens and len(self.in_flight) < self.depth:
                return
        self.outcome()

    def status(self, request_id: str) -> str:
        """What the scheduler says of a request; empty once it has forgotten it."""
        request = self.scheduler.requests.get(request_id)
        return "" if request is None else request.status.name

    def counter(self, name: str) -> int:
        """One counter of the segment."""
        return self.engine.state.segment.counters.value(name)

    @property
    def num_errors(self) -> int:
        """Errors caught since this start."""
        return self.counter("hook_errors") - self._errors_before

    def record(self, request_id: str) -> RequestEntry:
        """The record of a request; it must add up."""
        reader = SegmentReader.open(self.engine.state.segment.path, expected_incarnation=None)
        (entry,) = reader.find_request(bytes.fromhex(_hex(request_id)))
        assert sum(entry.sources) == entry.prompt_tokens
        return entry

    def sources(self, request_id: str) -> dict[str, int]:
        """Where the tokens of a request came from."""
        return {source: tokens for source, tokens in zip(SOURCES, self.record(request_id).sources, strict=True) if tokens}

    def computed_of(self, request_id: str) -> int:
        """Prompt tokens that were computed, as the record says."""
        return self.record(request_id).sources[SOURCES.index("computed")]

    def stops_of(self, request_id: str) -> list[int]:
        """Tokens that end a request."""
        params = self.requests[request_id].sampling_params
        return list(params.stop_token_ids or ()) if params is not None else []

    def check(self) -> None:
        """Books balance, and nothing is held by an idle engine."""
        state = self.engine.state
        state.tier.check()
        if not self.scheduler.requests and not self.in_flight:
            pool = self.scheduler.kv_cache_manager.block_pool
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
            assert state.open_loads == {}
        assert self.num_errors == self.mover.num_failed

    # ---- the engine's loop in two halves

    def dispatch(self) -> Any:
        """Schedule a step and have the worker compute it; what was scheduled."""
        output = self.scheduler.schedule()
        self.in_flight.append((output, self._execute(output)))
        return output

    def outcome(self) -> None:
        """Report the oldest step that is in flight, if there is one."""
        if self.in_flight:
            output, result = self.in_flight.popleft()
            for group in self.scheduler.update_from_output(output, result).values():
                for one in group.outputs:
                    self._deliver(one.request_id, one.new_token_ids)

    def _deliver(self, request_id: str, tokens: Sequence[int]) -> None:
        text = self.text.setdefault(request_id, [])
        text.extend(tokens)
        self.first_computed.setdefault(request_id, self.worker.rows[request_id].first_computed)
        if text != self.expected[request_id][: len(text)]:
            raise WrongToken(f"{request_id}: {text} instead of {self.expected[request_id]}")

    def _execute(self, output: Any) -> ModelRunnerOutput:
        """What vLLM's model runner does, in its order (0.32, v1/worker/kv_connector_model_runner_mixin.py)."""
        starts = self.worker.starts(output)
        self.connector.bind_connector_metadata(output.kv_connector_metadata)
        loads_first = getattr(output, "has_sync_kv_loads", True)  # before 0.29 loads always come first
        if loads_first:
            self.connector.start_load_kv(None)  # type: ignore[arg-type]
        before = len(self.worker.wrong)
        tokens = self.worker.forward(starts, output.num_scheduled_tokens)
        sampled = [self._sampled(name, starts[name] + num, tokens[name]) for name, num in output.num_scheduled_tokens.items()]
        if not loads_first:
            self.connector.start_load_kv(None)  # type: ignore[arg-type]
        self.connector.wait_for_save()
        if self.copying:
            self.engine.copier.run_pending()
        sending, finished = self.connector.get_finished(output.finished_req_ids)
        invalid = self.connector.get_block_ids_with_load_errors()
        self.connector.clear_connector_metadata()
        for request_id, start in self.worker.wrong[before:] if self.strict else ():
            if not invalid.intersection(self.worker.rows[request_id].blocks):
                raise WrongBytes(f"{request_id} before {start}")
        ids = list(output.num_scheduled_tokens)
        transfers = KVConnectorOutput(sending, finished, invalid_block_ids=invalid)
        return ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, sampled, kv_connector_output=transfers)

    def _sampled(self, request_id: str, stop: int, token: int) -> list[int]:
        """The token, if the step computed all that the scheduler knows of the request."""
        if stop < self.scheduler.requests[request_id].num_tokens:
            return []
        self.worker.rows[request_id].slots.put(stop, token)
        return [token]


def _hex(request_id: str) -> str:
    return sha256(request_id.encode()).hexdigest()[:32]

"""The fake's connector: drives both halves of the shared cache with the calls that vLLM makes, over the fake's plain bytes."""

import hashlib
import json
from collections.abc import Iterable

from xinference.model.llm.fake.blocks import BlockPool
from xinference.model.llm.fake.config import FakeConfig
from xinference.model.llm.fake.network import SLOT_BYTES
from xinference.model.llm.fake.request import Sequence as Request
from xinference.model.llm.fake.sharing import Step
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.connector.engine import Engine
from xinference.model.llm.vllm.xavier.connector.metadata import EMPTY, RequestView, Scheduled, StepMeta, StepView
from xinference.model.llm.vllm.xavier.connector.scheduler import XavierScheduler
from xinference.model.llm.vllm.xavier.connector.worker import XavierWorker
from xinference.model.llm.vllm.xavier.transfer.bytes import BytesMover

_STATUS = {"stop": "finished", "length": "finished", "abort": "aborted", "error": "failed"}


class LocalCache:
    """The fake's own prefix cache, as the connector resets it after a clear."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def idle(self) -> bool:
        return self._pool.num_free == self._pool.num_blocks

    def reset(self) -> bool:
        return self._pool.reset()

    def forget(self, blocks: Iterable[int]) -> None:
        """Give these blocks to no other request."""
        for block_id in blocks:
            self._pool.forget(block_id)


def namespace_of(config: FakeConfig, model_identity: str) -> str:
    """Where the fake's blocks mean the same: 16 hex digits over all that decides their bytes and their hashes."""
    facts = ["fake", SLOT_BYTES, config.block_size, config.hash_seed, model_identity]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class SharedCache:
    """Both halves over one engine's pool.

    Args:
        config: the fake's; its ``xavier`` is set.
        pool: the engine's KV memory.

    Raises:
        XavierError: the settings are wrong, there is no control page, or the segment cannot be made.
    """

    def __init__(self, config: FakeConfig, pool: BlockPool) -> None:
        xavier = XavierConfig.from_wire(config.xavier or {})
        mover = BytesMover(pool.memory, pool.block_bytes)
        self._engine = Engine.open(xavier, namespace_of(config, xavier.model_identity), mover, pool.block_size)
        self._scheduler = XavierScheduler(self._engine, LocalCache(pool))
        self._worker = XavierWorker(self._engine)
        self._meta: StepMeta = EMPTY
        self._engine.copier.start()

    def arrived(self, request: Request, now: float) -> None:
        self._scheduler.arrived(_view(request), now)

    def matched_tokens(self, request: Request, num_computed: int, now: float) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(_view(request), num_computed, now)

    def allocated(self, request: Request, num_external: int, now: float) -> None:
        self._scheduler.allocated(_view(request), request.block_ids, num_external, now)

    def build(self, step: Step, now: float) -> None:
        scheduled = [Scheduled(request.request_id, after, new) for request, after, new in step.scheduled]
        self._meta = self._scheduler.build(StepView(scheduled, step.preempted, step.finished, step.num_tokens), now)

    def before_forward(self) -> None:
        self._worker.start_loads(self._meta)

    def after_forward(self) -> tuple[set[str], set[int]]:
        self._worker.after_forward(self._meta)
        return self._worker.take_finished(), self._worker.take_invalid()

    def output(self, finished_loads: set[str], invalid_blocks: set[int], now: float) -> None:
        self._scheduler.output(finished_loads, invalid_blocks, now)

    def finished(self, request: Request, status: str, now: float) -> None:
        self._scheduler.finished(request.request_id, _STATUS[status], now, _view(request))

    def close(self) -> None:
        self._engine.close()


def _view(request: Request) -> RequestView:
    return RequestView(
        request_id=request.request_id,
        num_tokens=len(request.tokens),
        num_prompt_tokens=request.num_prompt_tokens,
        block_hashes=request.block_hashes,
        xavier_request=request.xavier_request,
        skip_reading=request.sampling.prompt_logprobs,
    )

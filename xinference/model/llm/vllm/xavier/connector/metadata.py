"""What crosses between the engine and the scheduler half, and from there to the worker half. Plain values; nothing of vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xinference.model.llm.vllm.xavier.transfer.jobs import LoadJob, SaveJob


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as the scheduler half sees it.

    Args:
        request_id: the engine's id.
        num_tokens: prompt and output tokens known so far.
        num_prompt_tokens: tokens of the prompt.
        block_hashes: the engine's chained hashes of full blocks; the engine's own list, which grows while the request decodes.
        xavier_request: 16 bytes of identity that the route drew, or None for a request that did not come through it.
        adapter: digest of the request's adapter, or empty.
        skip_reading: the request must not be given cached blocks (prompt logprobs and the like).
    """

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    block_hashes: Sequence[bytes]
    xavier_request: bytes | None = None
    adapter: bytes = b""
    skip_reading: bool = False


class Scheduled(NamedTuple):
    """One request of a step: tokens computed once the step has run, and blocks.

    ``new_block_ids`` are those that a running request was given since it was last scheduled; for a request scheduled for the first time
    since ``allocated`` they are None or its whole table.
    """

    request_id: str
    num_computed_after: int
    new_block_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class StepView:
    """One step as it is about to be dispatched. A running request that neither got blocks nor reached its ``wake_at`` may be left out."""

    scheduled: Sequence[Scheduled]
    preempted: Sequence[str] = ()
    finished: Sequence[str] = ()
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepMeta:
    """What the worker half has to do in one step."""

    sync_loads: Sequence[LoadJob] = ()
    async_loads: Sequence[LoadJob] = ()
    saves: SaveJob | None = None


# Returned by every step with nothing to do: the worker half tests for identity and returns.
EMPTY = StepMeta()

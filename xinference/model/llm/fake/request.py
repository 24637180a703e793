"""One sequence that the fake engine generates, and what comes out of it."""

import asyncio
import enum
from dataclasses import dataclass, field

from xinference.model.llm.fake.network import Candidate


class Status(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"  # blocks from elsewhere are on their way
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class Sampling:
    """How a sequence is generated.

    ``forced`` tokens are taken one by one instead of the model's choice (structured output, tool calls); the text ends with them.
    """

    max_tokens: int
    ignore_eos: bool = False
    choice: int = 0
    num_candidates: int = 1
    forced: tuple[int, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class Output:
    """News of a sequence: a token, or its end, or both. ``cached_tokens`` is known with the first."""

    token: int | None
    candidates: tuple[Candidate, ...]
    finish_reason: str | None  # stop, length, abort, error
    stop_token: int | None = None
    cached_tokens: int = 0


@dataclass(eq=False)
class Sequence:
    """State of a sequence inside the engine. Only the engine's loop changes it."""

    request_id: str
    tokens: list[int]  # prompt, then output
    num_prompt_tokens: int
    sampling: Sampling
    salt: str
    xavier_request: bytes | None
    status: Status = Status.WAITING
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int | None = None  # fixed at the first admission
    loaded: bool = False  # an asynchronous load has ended; what it brought counts as computed
    external_failed: bool = False
    outputs: asyncio.Queue[Output] = field(default_factory=asyncio.Queue)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

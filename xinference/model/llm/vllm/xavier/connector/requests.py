"""What the scheduler half remembers about one request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

from xinference.model.llm.vllm.xavier.block.key import BlockKey, block_key
from xinference.model.llm.vllm.xavier.connector.metadata import RequestView
from xinference.model.llm.vllm.xavier.directory.requests import REQUEST_ID_BYTES
from xinference.model.llm.vllm.xavier.transfer.jobs import LoadJob


class Phase(StrEnum):
    """Where a request stands.

    waiting ──allocated, nothing or a synchronous load──> running ──preempted──> waiting
       └─────allocated, asynchronous load──> loading ──promoted──> running
                                                └──asked again (all of the load failed)──> waiting
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


class Tail(StrEnum):
    """Where the block before the next one to be saved is kept: decides whether, and under which parent, the chain may go on."""

    OWN = "own"
    ELSEWHERE = "elsewhere"
    DROPPED = "dropped"


class KeyChain(Sequence[BlockKey]):
    """The keys of a request's blocks, made when asked for: a lookup reads few of them, and a copy of all would be kept for nothing."""

    __slots__ = ("_adapter", "_hashes")

    def __init__(self, hashes: Sequence[bytes], adapter: bytes) -> None:
        self._hashes = hashes
        self._adapter = adapter

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, index: int) -> BlockKey:  # type: ignore[override]  # slices are never asked for
        return block_key(self._hashes[index], 0, self._adapter)

    def part(self, start: int, stop: int) -> list[BlockKey]:
        """The keys of blocks [start, stop)."""
        return [self[index] for index in range(start, stop)]

    def parent(self, index: int) -> BlockKey | None:
        """The key of the block before ``index``; None for the first."""
        return self[index - 1] if index else None


class Hit(NamedTuple):
    """Blocks [start, stop) of a request found in one place. ``peer`` is a replica's uid, or OWN_SLAB."""

    source: str
    peer: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What ``matched_tokens`` answered last: blocks [start, stop), and how they would be loaded."""

    step: int
    start: int
    stop: int
    asynchronous: bool
    hits: tuple[Hit, ...]
    expected_seconds: float = 0.0


@dataclass(slots=True)
class RequestState:
    """One request between its arrival and its end. Token counts are of the engine's numbering; blocks are indices into the chain."""

    request_id: str
    identity: bytes
    num_prompt_tokens: int
    chain: KeyChain
    skip_reading: bool
    phase: Phase = Phase.WAITING
    # The engine's blocks of this request, in chain order, as far as they have been handed out.
    block_ids: list[int] = field(default_factory=list)
    # Allocated since the last step: blocks named with its next step are its whole table, not an addition.
    admitted: bool = False
    # Answer of the engine's own lookup at the latest question.
    asked_local_tokens: int = 0
    offer: Offer | None = None
    load: LoadJob | None = None
    # A load of this request failed once: it is offered nothing external again.
    barred: bool = False
    waiting: bool = False
    # Why the latest question got nothing although something was found: a counter's name, counted at admission.
    refusal: str = ""
    # Blocks [0, examined) have been saved, found stored, or given up; ``tail`` says what became of the last of them.
    examined: int = 0
    tail: Tail = Tail.OWN
    # Blocks [stored_start, stored_stop) were found stored at admission, the last of them in ``stored_tail``.
    stored_start: int = 0
    stored_stop: int = 0
    stored_tail: Tail = Tail.OWN
    computed_tokens: int = 0
    # Set at a preemption that followed a completed prefill: what is computed below it is computed again.
    high_water_tokens: int = 0
    # Of the latest admission that counts.
    local_tokens: int = 0
    pre_clear_tokens: int = 0
    external_tokens: dict[str, int] = field(default_factory=dict)
    # The step whose dispatch completes the prefill; 0 while none has.
    completing_step: int = 0
    completed: bool = False
    recomputed_tokens: int = 0
    # Saves of this request are not to be made any more: it may have computed on a failed load.
    tainted: bool = False
    slot: int | None = None
    queued_at: float = 0.0
    scheduled_at: float = 0.0
    load_started_at: float = 0.0
    loaded_at: float = 0.0
    first_token_at: float = 0.0

    @classmethod
    def of(cls, view: RequestView, now: float) -> "RequestState":
        """A new request, first seen ``now``."""
        identity = view.xavier_request or blake2b(view.request_id.encode(), digest_size=REQUEST_ID_BYTES).digest()
        chain = KeyChain(view.block_hashes, view.adapter)
        return cls(view.request_id, identity, view.num_prompt_tokens, chain, view.skip_reading, queued_at=now)

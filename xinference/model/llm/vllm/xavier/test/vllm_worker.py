"""A scripted worker in place of a model: what it computes depends on every byte it reads, so wrong bytes become wrong tokens.

Each token's slot in the KV tensors holds a digest that is chained over all tokens up to it. The worker reads the slots before those it
computes. Are they what they must be, it writes the next ones; are they not, it writes digests of what it read, and samples tokens from
those, as a model would. ``true_text`` is what an engine without any cache gives.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy

BLOCK = 32
SLOT_BYTES = 32
MAX_TOKENS = 1024


def next_token(slot: bytes) -> int:
    """What is sampled behind the token of this slot."""
    return int.from_bytes(slot[:2], "little")


class Slots:
    """A request's tokens and what the KV of each must be."""

    def __init__(self, tokens: Iterable[int], salt: str) -> None:
        self.tokens = list(tokens)
        self._root = blake2b(salt.encode(), digest_size=SLOT_BYTES).digest()
        self._known = 0
        self._bytes = np.zeros((MAX_TOKENS, SLOT_BYTES), dtype=np.uint8)

    def put(self, position: int, token: int) -> None:
        """The token at this position, whatever was there and behind it."""
        if self.tokens[position : position + 1] != [token]:
            del self.tokens[position:]
            self._known = min(self._known, position)
            self.tokens.append(token)

    def until(self, stop: int) -> np.ndarray:
        """Slots of tokens [0, stop)."""
        last = self._bytes[self._known - 1].tobytes() if self._known else self._root
        for position in range(self._known, stop):
            last = blake2b(last + self.tokens[position].to_bytes(4, "little"), digest_size=SLOT_BYTES).digest()
            self._bytes[position] = np.frombuffer(last, dtype=np.uint8)
        self._known = max(self._known, stop)
        return self._bytes[:stop]


def true_text(tokens: Sequence[int], salt: str, num_tokens: int) -> list[int]:
    """What an engine without any cache answers to this prompt."""
    slots = Slots(tokens, salt)
    for position in range(len(tokens), len(tokens) + num_tokens):
        slots.tokens.append(next_token(slots.until(position)[-1].tobytes()))
    return slots.tokens[len(tokens) :]


@dataclass
class Row:
    """One request as the worker knows it.

    Args:
        slots: its tokens, sampled ones too, right or wrong.
        blocks: its engine blocks.
        first_computed: the first token that was computed since the request was last given its blocks.
    """

    slots: Slots
    blocks: list[int] = field(default_factory=list)
    first_computed: int = MAX_TOKENS


class ScriptedWorker:
    """Computes steps over KV tensors.

    Args:
        memory: bytes of shape (layers, blocks, BLOCK, SLOT_BYTES).
    """

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.rows: dict[str, Row] = {}
        # (request, first token) of what was computed on wrong bytes.
        self.wrong: list[tuple[str, int]] = []

    def add(self, request_id: str, tokens: Sequence[int], salt: str) -> None:
        """A request that may be scheduled from now on."""
        self.rows[request_id] = Row(Slots(tokens, salt))

    def starts(self, output: Any) -> dict[str, int]:
        """Take over a step's blocks, as a model runner does; the first token that each of its requests computes."""
        starts = {}
        for new in output.scheduled_new_reqs:
            self._replace(new.req_id, new.block_ids[0])
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, blocks, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                self._replace(request_id, blocks[0])
            elif blocks is not None:
                self.rows[request_id].blocks.extend(blocks[0])
            starts[request_id] = start
        return starts

    def forward(self, starts: dict[str, int], num_tokens: dict[str, int]) -> dict[str, int]:
        """Compute a step; the token sampled behind the last one of each request.

        What one request of a step writes another may read in the same step, as in a model's layers: heads of a prefix come first.
        """
        sampled = {}
        for request_id in sorted(num_tokens, key=lambda name: starts[name]):
            start, stop = starts[request_id], starts[request_id] + num_tokens[request_id]
            row = self.rows[request_id]
            row.first_computed = min(row.first_computed, start)
            computed = self._compute(request_id, row, start, stop)
            for position in range(start, stop):
                self.memory[:, row.blocks[position // BLOCK], position % BLOCK] = computed[position - start]
            sampled[request_id] = next_token(computed[-1].tobytes())
        return sampled

    def _compute(self, request_id: str, row: Row, start: int, stop: int) -> np.ndarray:
        read = self.memory[:, row.blocks[: -(-start // BLOCK)]].reshape(len(self.memory), -1, SLOT_BYTES)[:, :start]
        if bool((read == row.slots.until(start)).all()):
            return row.slots.until(stop)[start:]
        self.wrong.append((request_id, start))
        seed = read.tobytes()
        wrong = [blake2b(seed + position.to_bytes(4, "little"), digest_size=SLOT_BYTES).digest() for position in range(start, stop)]
        return np.frombuffer(b"".join(wrong), dtype=np.uint8).reshape(-1, SLOT_BYTES)

    def _replace(self, request_id: str, blocks: Sequence[int]) -> None:
        row = self.rows[request_id]
        row.blocks = list(blocks)
        row.first_computed = MAX_TOKENS


class ScriptedMover:
    """A mover that does what a test says: stands still for others in the middle of a copy, or fails half way.

    Args:
        mover: what copies.

    ``load_fails`` and ``save_fails`` say of the next copies, in order, whether they fail; later ones do not. ``during_load`` and
    ``during_save`` are called once, in the middle of the next copy, when half of its blocks are in place.
    """

    def __init__(self, mover: Any) -> None:
        self._mover = mover
        self.load_fails: deque[bool] = deque()
        self.save_fails: deque[bool] = deque()
        self.during_load: Callable[[], None] | None = None
        self.during_save: Callable[[], None] | None = None
        self.num_failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def load(self, slab: Any, copies: Sequence[BlockCopy]) -> None:
        """Place -> engine block."""
        if copies:
            meanwhile, self.during_load = self.during_load, None
            self._copy(partial(self._mover.load, slab), copies, meanwhile, bool(self.load_fails) and self.load_fails.popleft())

    def save(self, slab: Any, copies: Sequence[BlockCopy]) -> None:
        """Engine block -> place."""
        if copies:
            meanwhile, self.during_save = self.during_save, None
            self._copy(partial(self._mover.save, slab), copies, meanwhile, bool(self.save_fails) and self.save_fails.popleft())

    def _copy(
        self, copy: Callable[[Sequence[BlockCopy]], None], copies: Sequence[BlockCopy], meanwhile: Callable[[], None] | None, fails: bool
    ) -> None:
        half = len(copies) // 2
        copy(copies[:half])
        if meanwhile is not None:
            meanwhile()
        if fails:
            self.num_failed += 1
            raise MemoryError("a copy failed on purpose")
        copy(copies[half:])

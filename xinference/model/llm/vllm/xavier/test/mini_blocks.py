"""The memory of an engine in small: blocks with one slot a token, who uses them, and the engine's own prefix cache.

A slot holds a digest of all tokens up to its own, and the epoch of the step that wrote it: so wrong bytes and old bytes both show.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from xinference.model.llm.vllm.xavier.transfer.bytes import BytesMover, BytesSlab
from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy, refuse_outside

BLOCK = 4  # tokens
SLOT_BYTES = 16
DIGEST_BYTES = 14  # of a slot; the rest is the epoch
BLOCK_BYTES = BLOCK * SLOT_BYTES


class Untrue(AssertionError):
    """Something that must be so is not. Raised, not asserted: under -O an assert vanishes."""


def require(holds: bool, what: str) -> None:
    """Raise Untrue with ``what`` unless it holds."""
    if not holds:
        raise Untrue(what)


class WrongBytes(BaseException):
    """An engine was about to compute on bytes that are not its request's. No Exception: nothing may catch it."""


def digests_of(raw: bytes) -> bytes:
    """What the slots of a block say about its tokens."""
    return b"".join(raw[start : start + DIGEST_BYTES] for start in range(0, BLOCK_BYTES, SLOT_BYTES))


def oldest_epoch(raw: bytes) -> int:
    """The epoch of the oldest write to a block."""
    return min(int.from_bytes(raw[end - 2 : end], "little") for end in range(SLOT_BYTES, BLOCK_BYTES + 1, SLOT_BYTES))


class GatedMover(BytesMover):
    """A mover that stops in the middle of a copy and lets a test do whatever may happen meanwhile."""

    def __init__(self, memory: bytearray, block_bytes: int) -> None:
        super().__init__(memory, block_bytes)
        self.during: Callable[[], None] = lambda: None
        self.faulty = False  # a copy failed, as whoever made it fail says

    def save(self, slab: BytesSlab, copies: Sequence[BlockCopy]) -> None:
        """The first half of the batch, half a block, a pause, all the rest."""
        refuse_outside(copies, self.num_blocks, slab.num_places)
        half = len(copies) // 2
        super().save(slab, copies[:half])
        for block, place in copies[half : half + 1]:
            start = block * self.block_bytes
            part = self._memory[start : start + self.block_bytes // 2]
            slab.view[place * slab.place_bytes : place * slab.place_bytes + len(part)] = part
        self.during()
        super().save(slab, copies[half:])

    def load(self, slab: BytesSlab, copies: Sequence[BlockCopy]) -> None:
        """The first half of the batch, half a block, a pause, all the rest of it."""
        refuse_outside(copies, self.num_blocks, slab.num_places)
        half = len(copies) // 2
        super().load(slab, copies[:half])
        size = self.block_bytes // 2
        for block, place in copies[half : half + 1]:
            start = place * slab.place_bytes
            self._memory[block * self.block_bytes : block * self.block_bytes + size] = slab.view[start : start + size]
        self.during()
        for block, place in copies[half : half + 1]:
            start = place * slab.place_bytes
            self._memory[block * self.block_bytes + size : (block + 1) * self.block_bytes] = slab.view[start + size : start + 2 * size]
        super().load(slab, copies[half + 1 :])


@dataclass
class Request:
    """One request inside the engine."""

    request_id: str
    tokens: list[int]
    max_tokens: int
    salt: bytes = b""
    adapter: bytes = b""
    prompt_logprobs: bool = False
    num_prompt: int = 0
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    status: str = "waiting"
    load_failed: bool = False
    num_preempted: int = 0
    # A load failed once, so nothing external may be offered again.
    barred: bool = False
    # Of the admission before its first token: what the engine's own cache gave it, and what a load did.
    local_tokens: int = 0
    external_tokens: int = 0
    loaded: range = range(0)  # blocks of the latest load
    text: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def slot(self, position: int) -> bytes:
        """What the KV of this position must be: all tokens up to it, and what else tells chains apart."""
        digests = self.digests
        while len(digests) <= position:
            before = digests[-1] if digests else self.salt + b"/" + self.adapter
            digests.append(sha256(before + bytes((self.tokens[len(digests)] % 251,))).digest()[:DIGEST_BYTES])
        return digests[position]

    def hash_blocks(self) -> None:
        """Chain the hashes of blocks that are full of known tokens."""
        for index in range(len(self.hashes), len(self.tokens) // BLOCK):
            parent = self.hashes[-1] if self.hashes else b"root"
            extra = self.salt if index == 0 else b""
            self.hashes.append(sha256(parent + extra + repr(self.tokens[index * BLOCK : (index + 1) * BLOCK]).encode()).digest())


class MiniBlocks:
    """The blocks of one engine.

    Args:
        num_blocks: engine blocks, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.memory = bytearray(num_blocks * BLOCK_BYTES)
        self.free: deque[int] = deque(range(1, num_blocks))
        self.cached: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.users: dict[int, int] = {}

    def idle(self) -> bool:
        """No block is in use, as a clear sees it."""
        return len(self.free) == self.num_blocks - 1

    def reset(self) -> bool:
        """Forget all cached prefixes."""
        self.cached.clear()
        self.hash_of.clear()
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """No later request may hit these blocks."""
        for block in blocks:
            if (old := self.hash_of.pop(block, None)) is not None:
                self.cached.pop(old, None)

    def cached_prefix(self, request: Request) -> list[int]:
        """The blocks of the engine's own hit."""
        local: list[int] = []
        if not request.prompt_logprobs:
            for block_hash in request.hashes[: (len(request.tokens) - 1) // BLOCK]:
                if block_hash not in self.cached:
                    break
                local.append(self.cached[block_hash])
        return local

    def release(self, request: Request) -> None:
        """The request lets go of its blocks."""
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block) if block in self.hash_of else self.free.appendleft(block)
        request.blocks = []

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """New blocks for so many tokens, or None if there are not enough."""
        needed = -(-num_tokens // BLOCK) - len(request.blocks)
        if needed > len(self.free):
            return None
        new = [self.take() for _ in range(needed)]
        request.blocks.extend(new)
        return new

    def take(self) -> int:
        """A free block for a new owner."""
        block = self.free.popleft()
        if (old := self.hash_of.pop(block, None)) is not None:
            self.cached.pop(old, None)
        self.users[block] = 1
        return block

    def use(self, block: int) -> None:
        """One more user of a cached block."""
        if block in self.free:
            self.free.remove(block)
            self.users[block] = 0
        self.users[block] += 1

    def cache(self, request: Request, num_tokens: int) -> None:
        """Later requests may hit these tokens' blocks."""
        for index in range(min(num_tokens // BLOCK, len(request.hashes))):
            block = request.blocks[index]
            if block not in self.hash_of and request.hashes[index] not in self.cached:
                self.hash_of[block] = request.hashes[index]
                self.cached[request.hashes[index]] = block

    def compute(self, request: Request, start: int, stop: int, epoch: int) -> None:
        """Compare all slots before ``start``, then write those up to ``stop``."""
        for position in range(start):
            at = self._at(request, position)
            if self.memory[at : at + DIGEST_BYTES] != request.slot(position):
                raise WrongBytes(f"{request.request_id} computes on wrong bytes at {position}")
        for position in range(start, stop):
            at = self._at(request, position)
            self.memory[at : at + SLOT_BYTES] = request.slot(position) + epoch.to_bytes(SLOT_BYTES - DIGEST_BYTES, "little")

    def raw(self, block: int) -> bytes:
        """A block's bytes."""
        return bytes(self.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    def _at(self, request: Request, position: int) -> int:
        return (request.blocks[position // BLOCK] * BLOCK + position % BLOCK) * SLOT_BYTES

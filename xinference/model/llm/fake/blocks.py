"""The fake's KV memory: blocks with bytes, a chain of block hashes, and a free queue that is a prefix cache, as in vLLM's V1 engine."""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence

from xinference.model.llm.fake.network import SLOT_BYTES

NULL_BLOCK = 0  # never handed out


def hash_root(seed: str) -> bytes:
    """The parent of every first block: the same in all engines that were started with the same seed."""
    return hashlib.sha256(seed.encode()).digest()


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], block_size: int, root: bytes, salt: str) -> None:
    """Append the hashes of the blocks of ``tokens`` that are full by now. The salt enters with the first block and so reaches all."""
    while (len(hashes) + 1) * block_size <= len(tokens):
        start = len(hashes) * block_size
        content = struct.pack(f"<{block_size}Q", *tokens[start : start + block_size])
        extra = b"" if hashes or not salt else b"salt:" + salt.encode()
        hashes.append(hashlib.sha256((hashes[-1] if hashes else root) + content + extra).digest())


class BlockPool:
    """Blocks by id; block 0 is the null block.

    A free block keeps its hash and bytes until it is handed out again, oldest first: that is the prefix cache.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * SLOT_BYTES
        self.num_blocks = num_blocks
        self.memory = bytearray((num_blocks + 1) * self.block_bytes)
        self._references = [0] * (num_blocks + 1)
        self._hash_by_block: dict[int, bytes] = {}
        self._block_by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def block(self, block_id: int) -> memoryview:
        """Writable bytes of one block."""
        start = block_id * self.block_bytes
        return memoryview(self.memory)[start : start + self.block_bytes]

    def cached_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest cached prefix; takes no reference."""
        found = []
        for block_hash in hashes:
            block_id = self._block_by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def take(self, block_ids: Sequence[int]) -> None:
        """A reference to each block of a cached prefix."""
        for block_id in block_ids:
            self._references[block_id] += 1
            self._free.pop(block_id, None)

    def allocate(self, count: int) -> list[int]:
        """New blocks, least recently freed first, their old content forgotten. The caller checked ``num_free``."""
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self.forget(block_id)
            self._references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def remember(self, block_id: int, block_hash: bytes) -> None:
        """The block is full and its bytes are in place."""
        if block_hash in self._block_by_hash or block_id in self._hash_by_block:
            return
        self._hash_by_block[block_id] = block_hash
        self._block_by_hash[block_hash] = block_id

    def forget(self, block_id: int) -> None:
        """The block no longer counts as cached."""
        block_hash = self._hash_by_block.pop(block_id, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]

    def release(self, block_ids: Sequence[int]) -> None:
        """Give references back, last block first, so that the tail of a chain is reused before its head."""
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None

    def reset(self) -> bool:
        """Forget everything cached. False, and nothing changed, while blocks are in use."""
        if self.num_free != self.num_blocks:
            return False
        for block_id in list(self._hash_by_block):
            self.forget(block_id)
        return True

    def check(self) -> None:
        """Raises AssertionError when the books do not balance."""
        held = sum(1 for count in self._references[1:] if count > 0)
        if held + self.num_free != self.num_blocks or min(self._references) < 0:
            raise AssertionError(f"{held} blocks held, {self.num_free} free, {self.num_blocks} in all")

"""A mover over one plain buffer: the fake engine's, and the tests'."""

from collections.abc import Sequence
from dataclasses import dataclass

from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy, num_places_of, refuse_outside


@dataclass(frozen=True, slots=True)
class BytesSlab:
    """A slab as bytes."""

    view: memoryview
    place_bytes: int
    num_places: int


class BytesMover:
    """Engine blocks are consecutive runs of one bytearray.

    Args:
        memory: ``num_blocks * block_bytes`` bytes, written by the engine and by ``load``.
        block_bytes: bytes of one block.
    """

    loads_within_step = True

    def __init__(self, memory: bytearray, block_bytes: int) -> None:
        if block_bytes <= 0 or len(memory) % block_bytes:
            raise ValueError(f"{len(memory)} bytes are not whole blocks of {block_bytes}")
        self._memory = memoryview(memory)
        self._block_bytes = block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._block_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks in the buffer."""
        return len(self._memory) // self._block_bytes

    def open_slab(self, view: memoryview, place_bytes: int) -> BytesSlab:
        """The slab as bytes."""
        return BytesSlab(view, place_bytes, num_places_of(view.nbytes, place_bytes, self._block_bytes))

    def mark(self) -> None:
        """Nothing: the engine's writes are done when its hook is called."""

    def follow(self, mark: None) -> None:
        """Nothing to wait for."""

    def save(self, slab: BytesSlab, copies: Sequence[BlockCopy]) -> None:
        """Engine block -> place, for every copy."""
        refuse_outside(copies, self.num_blocks, slab.num_places)
        size = self._block_bytes
        for block, place in copies:
            start = place * slab.place_bytes
            slab.view[start : start + size] = self._memory[block * size : (block + 1) * size]

    def load(self, slab: BytesSlab, copies: Sequence[BlockCopy]) -> None:
        """Place -> engine block, for every copy."""
        refuse_outside(copies, self.num_blocks, slab.num_places)
        size = self._block_bytes
        for block, place in copies:
            start = place * slab.place_bytes
            self._memory[block * size : (block + 1) * size] = slab.view[start : start + size]

"""What every mover promises, as one suite: a subclass says how to make one and how its engine writes and reads a block."""

import mmap
from abc import ABC, abstractmethod

import pytest

from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy, Mover

NUM_BLOCKS = 8
NUM_PLACES = 6


class MoverContract(ABC):
    """Subclass it in a test module, under a name that begins with Test."""

    @abstractmethod
    def mover(self) -> Mover:
        """A mover over an engine of NUM_BLOCKS blocks, whose content differs from block to block."""

    @abstractmethod
    def block(self, number: int) -> bytes:
        """The content of one of that engine's blocks, in whatever order of bytes, the same each time."""

    def place_bytes(self, mover: Mover) -> int:
        """A block, rounded up as segments do it, and one cache line more: nothing may depend on a place having no slack."""
        return (mover.block_bytes + 63) // 64 * 64 + 64

    def slab(self, mover: Mover) -> mmap.mmap:
        """Zeroed memory for NUM_PLACES places."""
        return mmap.mmap(-1, NUM_PLACES * self.place_bytes(mover))

    def test_a_block_comes_back_as_it_was_saved(self) -> None:
        mover = self.mover()
        memory = self.slab(mover)
        slab = mover.open_slab(memoryview(memory), self.place_bytes(mover))
        wanted = [self.block(number) for number in range(NUM_BLOCKS)]
        mover.save(slab, [BlockCopy(3, 4), BlockCopy(1, 0), BlockCopy(7, 5)])
        mover.load(slab, [BlockCopy(2, 0), BlockCopy(0, 4), BlockCopy(6, 5)])
        found = [self.block(number) for number in range(NUM_BLOCKS)]
        assert [found[number] for number in (2, 0, 6)] == [wanted[number] for number in (1, 3, 7)]
        assert [found[number] for number in (1, 3, 4, 5, 7)] == [wanted[number] for number in (1, 3, 4, 5, 7)]

    def test_a_save_writes_its_places_and_nothing_else(self) -> None:
        mover = self.mover()
        memory = self.slab(mover)
        size = self.place_bytes(mover)
        memory[:] = b"\xee" * len(memory)
        mover.save(mover.open_slab(memoryview(memory), size), [BlockCopy(3, 2), BlockCopy(4, 3)])
        for place in (0, 1, 4, 5):
            assert memory[place * size : (place + 1) * size] == b"\xee" * size
        for place in (2, 3):
            assert memory[place * size + mover.block_bytes : (place + 1) * size] == b"\xee" * (size - mover.block_bytes)
            assert memory[place * size : place * size + mover.block_bytes] != b"\xee" * mover.block_bytes

    def test_equal_blocks_are_packed_into_equal_bytes(self) -> None:
        mover = self.mover()
        memory = self.slab(mover)
        size = self.place_bytes(mover)
        slab = mover.open_slab(memoryview(memory), size)
        mover.save(slab, [BlockCopy(3, 0)])
        mover.load(slab, [BlockCopy(5, 0)])
        mover.save(slab, [BlockCopy(5, 1), BlockCopy(3, 2)])
        assert memory[0:size] == memory[size : 2 * size] == memory[2 * size : 3 * size]

    def test_one_place_may_fill_several_blocks(self) -> None:
        mover = self.mover()
        slab = mover.open_slab(memoryview(self.slab(mover)), self.place_bytes(mover))
        mover.save(slab, [BlockCopy(3, 0)])
        mover.load(slab, [BlockCopy(5, 0), BlockCopy(6, 0)])
        assert self.block(5) == self.block(6) == self.block(3)

    def test_an_empty_batch_does_nothing(self) -> None:
        mover = self.mover()
        slab = mover.open_slab(memoryview(self.slab(mover)), self.place_bytes(mover))
        mover.save(slab, [])
        mover.load(slab, [])

    @pytest.mark.parametrize("bad", [BlockCopy(NUM_BLOCKS, 0), BlockCopy(-1, 0), BlockCopy(0, NUM_PLACES), BlockCopy(0, -1)])
    def test_memory_that_does_not_exist_is_refused_before_anything_moves(self, bad: BlockCopy) -> None:
        mover = self.mover()
        memory = self.slab(mover)
        slab = mover.open_slab(memoryview(memory), self.place_bytes(mover))
        before = [self.block(number) for number in range(NUM_BLOCKS)]
        with pytest.raises(ValueError, match="is not one of"):
            mover.save(slab, [BlockCopy(1, 1), bad])
        with pytest.raises(ValueError, match="is not one of"):
            mover.load(slab, [BlockCopy(1, 1), bad])
        assert bytes(memory) == bytes(len(memory))
        assert [self.block(number) for number in range(NUM_BLOCKS)] == before

    def test_a_slab_whose_places_are_too_small_is_refused(self) -> None:
        mover = self.mover()
        with pytest.raises(ValueError, match="cannot hold a block"):
            mover.open_slab(memoryview(bytearray(1024)), mover.block_bytes - 1)

    def test_a_read_only_slab_is_loaded_from_and_never_written(self) -> None:
        mover = self.mover()
        memory = self.slab(mover)
        size = self.place_bytes(mover)
        mover.save(mover.open_slab(memoryview(memory), size), [BlockCopy(3, 1)])
        view = memoryview(memory).toreadonly()
        slab = mover.open_slab(view, size)
        mover.load(slab, [BlockCopy(5, 1)])
        assert self.block(5) == self.block(3)
        with pytest.raises((ValueError, TypeError)):
            mover.save(slab, [BlockCopy(1, 1)])
        assert mover.block_bytes <= size

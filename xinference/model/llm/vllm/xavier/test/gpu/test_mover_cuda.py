"""The mover over CUDA tensors: the movers' contract, and its order against work that the engine's stream still has to do.

The engine's stream is held up by a kernel that spins, so what is not ordered behind a mark is seen to come too early.
"""

import pytest
import torch

from xinference.model.llm.vllm.xavier.test.mover_contract import NUM_BLOCKS, MoverContract
from xinference.model.llm.vllm.xavier.transfer.cuda import CudaLane
from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy, Mover
from xinference.model.llm.vllm.xavier.transfer.staged import StagedMover

HEADS, TOKENS, DIM, LAYERS = 2, 4, 8, 3
SPIN_CYCLES = 20_000_000  # about 10 ms
ROUNDS = 500


def fill(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Different bits everywhere, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
    return bits.cuda().view(torch.bfloat16)


class CudaContract(MoverContract):
    """Makes a mover over ``layers()``; ``dim`` is their block dimension."""

    dim = 0
    slot_blocks = 2

    def layers(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def mover(self) -> Mover:
        self.tensors = self.layers()
        block_bytes = sum(tensor.numel() * 2 // NUM_BLOCKS for tensor in self.tensors.values())
        torch.cuda.synchronize()
        return StagedMover(self.tensors, NUM_BLOCKS, CudaLane(torch.device("cuda", 0)), self.slot_blocks * block_bytes)

    def block(self, number: int) -> bytes:
        parts = [tensor.select(self.dim, number).contiguous().view(torch.int16).cpu() for tensor in self.tensors.values()]
        return b"".join(part.numpy().tobytes() for part in parts)


class TestKeysAndValuesOutermost(CudaContract):
    dim = 1

    def layers(self) -> dict[str, torch.Tensor]:
        return {f"layer.{n}": fill((2, NUM_BLOCKS, TOKENS, HEADS, DIM), n) for n in range(LAYERS)}


class TestBlocksOutermost(CudaContract):
    slot_blocks = 5

    def layers(self) -> dict[str, torch.Tensor]:
        return {f"layer.{n}": fill((NUM_BLOCKS, 2, TOKENS, HEADS, DIM), n) for n in range(LAYERS)}


class TestOneStorageForAllLayers(CudaContract):
    def layers(self) -> dict[str, torch.Tensor]:
        storage = fill((NUM_BLOCKS, LAYERS, HEADS, TOKENS, 2 * DIM), 2)
        return {f"layer.{n}": storage[:, n] for n in range(LAYERS)}


@pytest.fixture(scope="module")
def memory() -> bytearray:
    return bytearray(NUM_BLOCKS * 2 * 64 * 1024)


def one_layer(memory: bytearray) -> tuple[torch.Tensor, StagedMover, object]:
    """A layer of 128 KiB blocks, its mover, and a slab of as many places."""
    tensor = torch.zeros(NUM_BLOCKS, 64 * 1024, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    mover = StagedMover({"layer": tensor}, NUM_BLOCKS, CudaLane(tensor.device))
    return tensor, mover, mover.open_slab(memoryview(memory), mover.block_bytes)


def places(memory: bytearray, place: int) -> set[float]:
    """The different values in a place."""
    row = torch.frombuffer(memory, dtype=torch.bfloat16).view(NUM_BLOCKS, -1)[place]
    return set(row.unique().tolist())


def test_a_save_sees_what_the_engine_was_told_to_write_before_the_mark(memory: bytearray) -> None:
    tensor, mover, slab = one_layer(memory)
    for number in range(ROUNDS):
        torch.cuda._sleep(SPIN_CYCLES // 20)
        tensor[3].fill_(number % 200 + 1)
        mover.follow(mover.mark())
        mover.save(slab, [BlockCopy(3, 5)])
        assert places(memory, 5) == {number % 200 + 1}


def test_without_the_mark_it_would_not(memory: bytearray) -> None:
    tensor, mover, slab = one_layer(memory)
    torch.cuda._sleep(SPIN_CYCLES)
    tensor[3].fill_(7)
    mover.save(slab, [BlockCopy(3, 5)])
    assert places(memory, 5) == {0}


def test_a_load_lands_after_what_the_engine_was_told_to_write_before_the_mark(memory: bytearray) -> None:
    tensor, mover, slab = one_layer(memory)
    tensor[0].fill_(9)
    mover.follow(mover.mark())
    mover.save(slab, [BlockCopy(0, 1)])
    for _ in range(ROUNDS):
        torch.cuda._sleep(SPIN_CYCLES // 20)
        tensor[4].fill_(-1)  # the last step of a request that ended
        mover.follow(mover.mark())
        mover.load(slab, [BlockCopy(4, 1)])
        torch.cuda.synchronize()
        assert set(tensor[4].unique().tolist()) == {9}


def test_without_the_mark_a_load_would_be_overwritten(memory: bytearray) -> None:
    tensor, mover, slab = one_layer(memory)
    torch.cuda._sleep(SPIN_CYCLES)
    tensor[4].fill_(-1)
    mover.load(slab, [BlockCopy(4, 1)])
    torch.cuda.synchronize()
    assert set(tensor[4].unique().tolist()) == {-1}


def test_a_mark_costs_the_step_thread_no_wait(memory: bytearray) -> None:
    _, mover, _ = one_layer(memory)
    torch.cuda._sleep(SPIN_CYCLES * 20)
    marks = [mover.mark() for _ in range(100)]
    mover.follow(marks[-1])
    assert not marks[0].query(), "the device had time to finish: the host waited for it"
    torch.cuda.synchronize()

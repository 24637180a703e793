"""Movers over tensors keep the movers' contract for every layout that vLLM has had: straight, and through slots in a lane of copies."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from xinference.model.llm.vllm.xavier.test.mover_contract import NUM_BLOCKS, MoverContract
from xinference.model.llm.vllm.xavier.transfer.cpu import CpuMover
from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy, Mover
from xinference.model.llm.vllm.xavier.transfer.staged import StagedMover

HEADS, TOKENS, DIM, LAYERS = 2, 4, 8, 3


def fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Different bits everywhere, NaNs among them: bytes are moved, not numbers."""
    generator = torch.Generator().manual_seed(seed)
    tensor.view(torch.int16).copy_(torch.randint(-(2**15), 2**15, tensor.shape, generator=generator, dtype=torch.int16))
    return tensor


class TensorContract(MoverContract):
    """Makes a mover over ``layers()``; ``dim`` is their block dimension."""

    dim = 0

    def layers(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def mover(self) -> Mover:
        self.tensors = self.layers()
        return CpuMover(self.tensors, NUM_BLOCKS)

    def block(self, number: int) -> bytes:
        parts = [tensor.select(self.dim, number).contiguous().view(torch.int16) for tensor in self.tensors.values()]
        return b"".join(part.numpy().tobytes() for part in parts)


class TestKeysAndValuesOutermost(TensorContract):
    """0.21: (2, blocks, heads, tokens, dim), every layer in its own storage."""

    dim = 1

    def layers(self) -> dict[str, torch.Tensor]:
        shape = (2, NUM_BLOCKS, HEADS, TOKENS, DIM)
        return {f"layer.{n}": fill(torch.empty(shape, dtype=torch.bfloat16), n) for n in range(LAYERS)}


class TestOneStorageLayersOutermost(TensorContract):
    """0.32: (blocks, heads, tokens, 2 * dim), all layers views of one storage, one after the other."""

    def layers(self) -> dict[str, torch.Tensor]:
        storage = fill(torch.empty(LAYERS, NUM_BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=torch.bfloat16), 1)
        return {f"layer.{n}": storage[n] for n in range(LAYERS)}


class TestOneStorageBlocksOutermost(TensorContract):
    """Blocks outermost: a layer's blocks lie apart by a whole block of all layers."""

    def layers(self) -> dict[str, torch.Tensor]:
        storage = fill(torch.empty(NUM_BLOCKS, LAYERS, HEADS, TOKENS, 2 * DIM, dtype=torch.bfloat16), 2)
        return {f"layer.{n}": storage[:, n] for n in range(LAYERS)}


class TestHeadsOutermost(TensorContract):
    """A block is scattered in memory: heads outermost, blocks within."""

    def layers(self) -> dict[str, torch.Tensor]:
        storages = [fill(torch.empty(HEADS, NUM_BLOCKS, TOKENS, 2 * DIM, dtype=torch.bfloat16), n) for n in range(LAYERS)]
        return {f"layer.{n}": storage.transpose(0, 1) for n, storage in enumerate(storages)}


class TestLayersOfDifferentSizes(TensorContract):
    """Two sizes, one of which cannot be moved in words of eight bytes."""

    def layers(self) -> dict[str, torch.Tensor]:
        first = fill(torch.empty(NUM_BLOCKS, HEADS, TOKENS, DIM, dtype=torch.bfloat16), 1)
        second = fill(torch.empty(NUM_BLOCKS, 1, 3, 1, dtype=torch.bfloat16), 2)
        return {"a": first, "b": second}


class LazyLane:
    """A lane that does nothing until it is waited for, as a device may: whoever forgets to wait reads old bytes."""

    def __init__(self) -> None:
        self.followed: list[object] = []
        self.running = False

    def host_slot(self, shape: tuple[int, int], word: torch.dtype) -> torch.Tensor:
        return torch.full(shape, -1, dtype=word)

    def mark(self) -> object:
        return object()

    def follow(self, mark: object) -> None:
        self.followed.append(mark)

    @contextmanager
    def queued(self) -> Iterator[None]:
        assert not self.running, "the slots are in use: the last turn was not waited for"
        self.running = True
        yield

    def wait(self) -> None:
        self.running = False


class StagedContract(TensorContract):
    """The same through slots that hold two blocks, so that most batches take several turns."""

    def mover(self) -> Mover:
        self.tensors = self.layers()
        size = CpuMover(self.tensors, NUM_BLOCKS).block_bytes
        return StagedMover(self.tensors, NUM_BLOCKS, LazyLane(), slot_bytes=2 * size + size // 2)


class TestStagedKeysAndValuesOutermost(StagedContract, TestKeysAndValuesOutermost):
    pass


class TestStagedOneStorageLayersOutermost(StagedContract, TestOneStorageLayersOutermost):
    pass


class TestStagedOneStorageBlocksOutermost(StagedContract, TestOneStorageBlocksOutermost):
    pass


class TestStagedHeadsOutermost(StagedContract, TestHeadsOutermost):
    pass


class TestStagedLayersOfDifferentSizes(StagedContract, TestLayersOfDifferentSizes):
    pass


def test_a_slot_holds_at_least_one_block() -> None:
    tensors = {"layer": fill(torch.empty(NUM_BLOCKS, HEADS, TOKENS, DIM, dtype=torch.bfloat16), 1)}
    mover = StagedMover(tensors, NUM_BLOCKS, LazyLane(), slot_bytes=1)
    memory = bytearray(2 * mover.block_bytes)
    slab = mover.open_slab(memoryview(memory), mover.block_bytes)
    mover.save(slab, [BlockCopy(3, 0), BlockCopy(4, 1)])
    assert bytes(memory) == tensors["layer"][3:5].view(torch.int16).numpy().tobytes()


def test_a_mover_on_a_device_follows_marks_and_makes_no_load_within_a_step() -> None:
    lane = LazyLane()
    mover = StagedMover({"layer": torch.zeros(NUM_BLOCKS, HEADS, TOKENS, DIM)}, NUM_BLOCKS, lane)
    mark = mover.mark()
    mover.follow(mark)
    assert lane.followed == [mark]
    assert not mover.loads_within_step
    assert CpuMover({"layer": torch.zeros(NUM_BLOCKS, HEADS, TOKENS, DIM)}, NUM_BLOCKS).loads_within_step


def test_one_storage_is_moved_by_one_operation() -> None:
    storage = torch.zeros(LAYERS, NUM_BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=torch.bfloat16)
    assert CpuMover({str(n): storage[n] for n in range(LAYERS)}, NUM_BLOCKS).num_operations == 1
    apart = {str(n): torch.zeros(NUM_BLOCKS, HEADS, TOKENS, DIM) for n in range(LAYERS)}
    assert CpuMover(apart, NUM_BLOCKS).num_operations == LAYERS


def test_layers_that_share_memory_count_once() -> None:
    tensor = torch.zeros(NUM_BLOCKS, HEADS, TOKENS, DIM, dtype=torch.bfloat16)
    assert CpuMover({"a": tensor, "b": tensor}, NUM_BLOCKS).block_bytes == HEADS * TOKENS * DIM * 2


def test_the_layout_names_the_packing_and_not_the_number_of_blocks() -> None:
    def layout(num_blocks: int, dtype: torch.dtype = torch.bfloat16, heads: int = HEADS) -> str:
        storage = torch.zeros(LAYERS, num_blocks, heads, TOKENS, 2 * DIM, dtype=dtype)
        return CpuMover({str(n): storage[n] for n in range(LAYERS)}, num_blocks).layout

    assert layout(8) == layout(12) == "3*0:torch.bfloat16:2x4x16"
    assert len({layout(8), layout(8, torch.float16), layout(8, heads=1)}) == 3


@pytest.mark.parametrize("shape", [(3, 5, 4), (NUM_BLOCKS, NUM_BLOCKS, 4), (4,)])
def test_a_tensor_without_exactly_one_block_dimension_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must have one dimension of 8 blocks"):
        CpuMover({"layer": torch.zeros(shape)}, NUM_BLOCKS)


def test_an_engine_without_kv_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to share"):
        CpuMover({}, NUM_BLOCKS)

"""Layers of unequal storage, shape, order, distance or alignment: each comes back from a slab as it was."""

import pytest
import torch

from xinference.model.llm.vllm.xavier.transfer.cpu import CpuMover
from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy

NUM_BLOCKS = 5


def numbered(num_bytes: int) -> torch.Tensor:
    return (torch.arange(num_bytes) * 37 % 251).to(torch.uint8)


def rows(base: torch.Tensor, offset: int, width: int, stride: int | None = None) -> torch.Tensor:
    """A layer: one row of ``width`` bytes for each block."""
    return base.as_strided((NUM_BLOCKS, width), (stride or width, 1), offset)


def layers_of(kind: str) -> list[torch.Tensor]:
    base = numbered(4096)
    match kind:
        case "storages of their own":
            return [rows(base, 0, 16), rows(numbered(4096).flip(0).contiguous(), 512, 16)]
        case "unequal shapes":
            return [rows(base, 0, 16), rows(base, 512, 32)]
        case "the last in memory first":
            return [rows(base, 1024, 16), rows(base, 512, 16)]
        case "unequal distances":
            return [rows(base, 0, 16), rows(base, 512, 16), rows(base, 2048, 16)]
        case "a beginning between two words":
            return [rows(base, 3, 16)]
        case "an end between two words":
            return [rows(base, 0, 6, stride=8)]
        case _:
            raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "storages of their own",
        "unequal shapes",
        "the last in memory first",
        "unequal distances",
        "a beginning between two words",
        "an end between two words",
    ],
)
def test_every_layer_comes_back_as_it_was(kind: str) -> None:
    layers = layers_of(kind)
    mover = CpuMover({f"layer.{index}": layer for index, layer in enumerate(layers)}, NUM_BLOCKS)
    assert mover.block_bytes == sum(layer.shape[1] for layer in layers)
    before = [layer.clone() for layer in layers]
    place_bytes = 64
    slab = bytearray(place_bytes * NUM_BLOCKS)
    opened = mover.open_slab(memoryview(slab), place_bytes)
    copies = [BlockCopy(block, NUM_BLOCKS - 1 - block) for block in range(NUM_BLOCKS)]
    mover.save(opened, copies)
    for block, place in copies:
        packed = b"".join(bytes(layer[block].tolist()) for layer in before)
        assert bytes(slab[place * place_bytes : place * place_bytes + len(packed)]) == packed
    for layer in layers:
        layer.zero_()
    mover.load(opened, copies)
    assert [torch.equal(layer, was) for layer, was in zip(layers, before, strict=True)] == [True] * len(layers)

"""A mover over KV tensors on the CPU: one gather and one scatter for each segment and batch, straight to and from slabs."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy, num_places_of, refuse_outside
from xinference.model.llm.vllm.xavier.transfer.strided import StridedBlocks


@dataclass(frozen=True, slots=True)
class HostSlab:
    """A slab as rows of words, one row a place."""

    rows: torch.Tensor
    writable: bool


def open_host_slab(strided: StridedBlocks, view: memoryview, place_bytes: int) -> HostSlab:
    """The slab as a tensor of shape (places, words of a place).

    Raises:
        ValueError: a block does not fit into a place.
    """
    num_places = num_places_of(view.nbytes, place_bytes, strided.block_bytes)
    flat = _read_only(view) if view.readonly else torch.frombuffer(view, dtype=torch.uint8)
    return HostSlab(flat.view(strided.word).view(num_places, -1), not view.readonly)


class CpuMover:
    """Copies blocks of CPU tensors.

    Args:
        kv_caches, num_blocks: as ``StridedBlocks`` takes them.

    Raises:
        ValueError: a tensor has no block dimension, or two that could be it.
    """

    loads_within_step = True

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        self._strided = StridedBlocks(kv_caches, num_blocks)
        self.layout = self._strided.layout

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self._strided.block_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine."""
        return self._strided.num_blocks

    @property
    def num_operations(self) -> int:
        """Gathers (or scatters) that one batch takes."""
        return len(self._strided.segments)

    def open_slab(self, view: memoryview, place_bytes: int) -> HostSlab:
        """The slab as a tensor of shape (places, words of a place)."""
        return open_host_slab(self._strided, view, place_bytes)

    def mark(self) -> None:
        """Nothing: what the engine was told to compute is done when its hook is called."""

    def follow(self, mark: None) -> None:
        """Nothing to wait for."""

    def save(self, slab: HostSlab, copies: Sequence[BlockCopy]) -> None:
        """Engine block -> place, for every copy."""
        if not slab.writable:
            raise ValueError("this slab is somebody else's")
        if not copies:
            return
        blocks, places = self._indices(slab, copies)
        for segment in self._strided.segments:
            columns = slab.rows[:, segment.start : segment.stop]
            columns.index_copy_(0, places, segment.tensor.index_select(0, blocks).view(len(copies), -1))

    def load(self, slab: HostSlab, copies: Sequence[BlockCopy]) -> None:
        """Place -> engine block, for every copy."""
        if not copies:
            return
        blocks, places = self._indices(slab, copies)
        rows = slab.rows.index_select(0, places)
        for segment in self._strided.segments:
            columns = rows[:, segment.start : segment.stop]
            segment.tensor.index_copy_(0, blocks, columns.reshape(len(copies), *segment.tensor.shape[1:]))

    def _indices(self, slab: HostSlab, copies: Sequence[BlockCopy]) -> tuple[torch.Tensor, torch.Tensor]:
        refuse_outside(copies, self._strided.num_blocks, slab.rows.shape[0])
        return torch.tensor([copy.block for copy in copies]), torch.tensor([copy.place for copy in copies])


def _read_only(view: memoryview) -> torch.Tensor:
    """A tensor over memory that may not be written. Torch has no such tensors and warns; nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)

"""A mover over KV tensors on a device that copies through fixed slots: engine -> slot on the device -> pinned slot on the host -> slab.

Nothing is mapped, registered or allocated per copy, so it works with any memory of the engine and any slab, and a second copy on the host
is its price. All of a mover's device work runs in one lane (a stream beside the engine's), in the copier thread, which waits for it; the
step thread only leaves marks.

    step thread      ... step n is told to the device | mark | step n + 1 is told ...
    copier thread                                        follow(mark) | copies of blocks that step n wrote

A block that a later step overwrites meanwhile is found out by its generation, which is raised before that step is told to the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from xinference.model.llm.vllm.xavier.transfer.cpu import HostSlab, open_host_slab
from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy, refuse_outside
from xinference.model.llm.vllm.xavier.transfer.strided import StridedBlocks

# Bytes of each of the two slots, on the device and on the host. A block that is larger gets slots of its own size.
SLOT_BYTES = 16 << 20


class Lane(Protocol):
    """An ordered queue of device work beside the engine's own."""

    def host_slot(self, shape: tuple[int, int], word: torch.dtype) -> torch.Tensor:
        """Memory on the host that the device copies to and from."""

    def mark(self) -> Any:
        """A mark behind what the engine's queue holds now."""

    def follow(self, mark: Any) -> None:
        """What is queued here from now on runs after ``mark``."""

    def queued(self) -> AbstractContextManager[Any]:
        """Device operations inside are queued here instead of in the engine's queue."""

    def wait(self) -> None:
        """Return when all that is queued here is done. Lets other threads run meanwhile."""


class StagedMover:
    """Copies blocks of device tensors through slots.

    Args:
        kv_caches, num_blocks: as ``StridedBlocks`` takes them.
        lane: where copies run.
        slot_bytes: size of a slot.

    Raises:
        ValueError: a tensor has no block dimension, or two that could be it.
    """

    # A load waits for the device, which the step thread never does.
    loads_within_step = False

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, lane: Lane, slot_bytes: int = SLOT_BYTES) -> None:
        self._strided = strided = StridedBlocks(kv_caches, num_blocks)
        self._lane = lane
        self.layout = strided.layout
        self._slot_blocks = max(1, slot_bytes // strided.block_bytes)
        shape = (self._slot_blocks, strided.block_bytes // strided.word_bytes)
        self._host = lane.host_slot(shape, strided.word)
        self._device = torch.empty(shape, dtype=strided.word, device=strided.device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self._strided.block_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine."""
        return self._strided.num_blocks

    def open_slab(self, view: memoryview, place_bytes: int) -> HostSlab:
        """The slab as a tensor of shape (places, words of a place). The device is not told of it."""
        return open_host_slab(self._strided, view, place_bytes)

    def mark(self) -> Any:
        """A mark behind the engine's work so far; microseconds."""
        return self._lane.mark()

    def follow(self, mark: Any) -> None:
        """Copies from now on begin after ``mark``."""
        self._lane.follow(mark)

    def save(self, slab: HostSlab, copies: Sequence[BlockCopy]) -> None:
        """Engine block -> place, for every copy."""
        if not slab.writable:
            raise ValueError("this slab is somebody else's")
        refuse_outside(copies, self._strided.num_blocks, slab.rows.shape[0])
        for blocks, places, host, device in self._turns(copies):
            with self._lane.queued():
                chosen = blocks.to(device.device)
                for segment in self._strided.segments:
                    device[:, segment.start : segment.stop] = segment.tensor.index_select(0, chosen).view(len(blocks), -1)
                host.copy_(device, non_blocking=True)
            self._lane.wait()
            slab.rows[:, : host.shape[1]].index_copy_(0, places, host)

    def load(self, slab: HostSlab, copies: Sequence[BlockCopy]) -> None:
        """Place -> engine block, for every copy."""
        refuse_outside(copies, self._strided.num_blocks, slab.rows.shape[0])
        for blocks, places, host, device in self._turns(copies):
            torch.index_select(slab.rows[:, : host.shape[1]], 0, places, out=host)
            with self._lane.queued():
                chosen = blocks.to(device.device)
                device.copy_(host, non_blocking=True)
                for segment in self._strided.segments:
                    columns = device[:, segment.start : segment.stop]
                    segment.tensor.index_copy_(0, chosen, columns.reshape(len(blocks), *segment.tensor.shape[1:]))
            self._lane.wait()

    def _turns(self, copies: Sequence[BlockCopy]) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """As many copies as fit into a slot: blocks, places, and the rows of both slots that they use."""
        for start in range(0, len(copies), self._slot_blocks):
            turn = copies[start : start + self._slot_blocks]
            blocks, places = torch.tensor([copy.block for copy in turn]), torch.tensor([copy.place for copy in turn])
            yield blocks, places, self._host[: len(turn)], self._device[: len(turn)]

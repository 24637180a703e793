"""The KV tensors of an engine as strided bytes, whatever their layout and device.

vLLM 0.21 gives one tensor a layer, ``(2, blocks, heads, tokens, head_dim)`` in its own storage; 0.32 gives ``(blocks, heads, tokens,
2 * head_dim)``, all layers views of one storage. The inside of a block depends on the attention back end and the instruction set and is
never interpreted: what is used is where the block dimension lies, and strides. Layers with equal spacing in one storage form one segment:
one gather or scatter moves the blocks of all of them, in words of eight bytes where sizes allow it (the same copy in single bytes takes
seven times as long on a CPU).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@dataclass(frozen=True, slots=True)
class _Strided:
    """A layer's bytes: byte offset into its storage, then (size, byte stride) of the block dimension and of what a block consists of."""

    storage: torch.UntypedStorage
    offset: int
    dims: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers that one operation copies: a tensor of words, block dimension first, and the columns of a place that they fill."""

    tensor: torch.Tensor
    start: int
    stop: int


class StridedBlocks:
    """Blocks of an engine, as segments.

    Args:
        kv_caches: layer name -> that layer's KV tensor, any dtype, all on one device, with a block dimension of size ``num_blocks`` first
            or second. Layers that share memory count once.
        num_blocks: blocks of the engine.

    Raises:
        ValueError: a tensor has no such dimension, or two that could be it.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        layers: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
        for name, tensor in kv_caches.items():
            layers.setdefault((tensor.data_ptr(), tensor.numel()), (name, tensor))
        strided = [_describe(name, tensor, num_blocks) for name, tensor in layers.values()]
        if not strided:
            raise ValueError("an engine without KV tensors has nothing to share")
        self.num_blocks = num_blocks
        self.block_bytes = sum(_block_bytes(layer) for layer in strided)
        self.device = next(tensor.device for _, tensor in layers.values())
        self.word_bytes, self.word = next((size, dtype) for size, dtype in _WORDS if all(_divides(size, layer) for layer in strided))
        self.segments = self._merge(strided)
        self.layout = _layout(layers.values(), num_blocks)

    def _merge(self, layers: Sequence[_Strided]) -> list[Segment]:
        """One segment for each run of layers that lie in one storage at equal distances."""
        segments: list[Segment] = []
        start = first = 0
        while first < len(layers):
            count, step = _run_length(layers, first)
            head = layers[first]
            dims = (head.dims[0], (count, step), *head.dims[1:]) if count > 1 else head.dims
            stop = start + count * _block_bytes(head) // self.word_bytes
            segments.append(Segment(self._tensor(head, dims), start, stop))
            start, first = stop, first + count
        return segments

    def _tensor(self, layer: _Strided, dims: Sequence[tuple[int, int]]) -> torch.Tensor:
        words = torch.empty(0, dtype=self.word, device=self.device)
        size = self.word_bytes
        shape = [count for count, _ in dims[:-1]] + [dims[-1][0] // size]
        strides = [stride // size for _, stride in dims[:-1]] + [1]
        return words.set_(layer.storage, layer.offset // size, shape, strides)


def _layout(layers: Iterable[tuple[str, torch.Tensor]], num_blocks: int) -> str:
    """How a block is packed into a place: where the block dimension was, and type and shape of what is left, for runs of equal layers.

    Strides are left out: a place holds the dimensions in logical order, and strides grow with the number of blocks.
    """
    texts = []
    for _, tensor in layers:
        dim = _block_dim(tensor, num_blocks)[0]
        texts.append(f"{dim}:{tensor.dtype}:{'x'.join(str(size) for index, size in enumerate(tensor.shape) if index != dim)}")
    return ",".join(f"{len(list(run))}*{text}" for text, run in groupby(texts))


def _block_dim(tensor: torch.Tensor, num_blocks: int) -> list[int]:
    return [dim for dim in (0, 1) if dim < tensor.dim() and tensor.shape[dim] == num_blocks]


def _describe(name: str, tensor: torch.Tensor, num_blocks: int) -> _Strided:
    """A layer as bytes, block dimension first, neighbouring dimensions that lie together merged."""
    candidates = _block_dim(tensor, num_blocks)
    if len(candidates) != 1:
        raise ValueError(f"layer {name} of shape {tuple(tensor.shape)} must have one dimension of {num_blocks} blocks, first or second")
    item = tensor.element_size()
    moved = tensor.movedim(candidates[0], 0)
    dims = [(size, stride * item) for size, stride in zip(moved.shape, moved.stride(), strict=True)]
    dims.append((item, 1))
    merged = [dims[0], dims[1]]
    for size, stride in dims[2:]:
        before_size, before_stride = merged[-1]
        if len(merged) > 1 and before_stride == size * stride:
            merged[-1] = (before_size * size, stride)
        else:
            merged.append((size, stride))
    return _Strided(tensor.untyped_storage(), int(tensor.storage_offset()) * item, tuple(merged))


def _block_bytes(layer: _Strided) -> int:
    num_bytes = 1
    for size, _ in layer.dims[1:]:
        num_bytes *= size
    return num_bytes


def _divides(size: int, layer: _Strided) -> bool:
    return layer.offset % size == 0 and layer.dims[-1][0] % size == 0 and all(stride % size == 0 for _, stride in layer.dims[:-1])


def _run_length(layers: Sequence[_Strided], first: int) -> tuple[int, int]:
    """How many layers from ``first`` on lie at equal distances in one storage, and the distance in bytes."""
    head = layers[first]
    count, step = 1, 0
    for layer in layers[first + 1 :]:
        distance = layer.offset - layers[first + count - 1].offset
        same = layer.storage.data_ptr() == head.storage.data_ptr() and layer.dims == head.dims
        if not same or distance <= 0 or (count > 1 and distance != step):
            break
        count, step = count + 1, distance
    return count, step

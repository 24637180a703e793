"""Small segments and keys for tests."""

import os
from collections.abc import Iterable

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory.geometry import SegmentGeometry, segment_geometry
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter

SEGMENT_NAME = "xinference.w1.m-0.0123456789abcdef.seg"
_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def key(number: int) -> BlockKey:
    """A key whose words are spread like those of a hash; different for every number."""
    return BlockKey((number + 1) * _ODD & _MASK, (number + 1) * _ODD * _ODD & _MASK)


def keys(numbers: Iterable[int]) -> list[BlockKey]:
    """One key a number."""
    return [key(number) for number in numbers]


def small(num_places: int = 8, place_bytes: int = 64, request_records: int = 4) -> SegmentGeometry:
    """A geometry for tests."""
    return segment_geometry(num_places, place_bytes, request_records)


def open_segment(directory: object, geometry: SegmentGeometry | None = None, *, incarnation: int = 7, epoch: int = 1) -> SegmentWriter:
    """The owner of the segment in this directory."""
    return SegmentWriter.open(os.path.join(str(directory), SEGMENT_NAME), geometry or small(), incarnation=incarnation, epoch=epoch)


def fill(segment: SegmentWriter, place: int, block: BlockKey, parent: BlockKey | None = None) -> None:
    """Put a block into a place as an engine does: withdraw, write the bytes, publish."""
    size = segment.geometry.place_bytes
    segment.invalidate(place)
    with segment.slab_view() as slab:
        slab[place * size : (place + 1) * size] = content(block, size)
    segment.publish(place, block, parent)


def content(block: BlockKey, size: int) -> bytes:
    """The bytes that belong to a block."""
    return (block.k0.to_bytes(8, "little") + block.k1.to_bytes(8, "little")) * (size // 16)

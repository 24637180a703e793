"""Reading and writing a segment's header, and judging one that a stranger wrote."""

import os
from struct import Struct

from xinference.model.llm.vllm.xavier.directory.geometry import SegmentGeometry, segment_geometry
from xinference.model.llm.vllm.xavier.directory.layout import HEADER_BYTES, MAGIC, MASK, WORD_BYTES, Word, layout_word
from xinference.model.llm.vllm.xavier.errors import SegmentRefused

_HEADER = Struct(f"@{HEADER_BYTES // WORD_BYTES}Q")


def static_words(geometry: SegmentGeometry) -> dict[Word, int]:
    """The words that never change in a file's life. The last one commits to the others: rounded up to whole pages, a file may be as large
    as another geometry would make it."""
    words = {
        Word.MAGIC: MAGIC,
        Word.LAYOUT: layout_word(),
        Word.NUM_PLACES: geometry.num_places,
        Word.PLACE_BYTES: geometry.place_bytes,
        Word.REQUEST_RECORDS: geometry.request_records,
        Word.NUM_BUCKETS: geometry.num_buckets,
        Word.FILE_BYTES: geometry.file_bytes,
        Word.BOOK_BYTES: geometry.book_bytes,
        Word.COUNTERS_OFFSET: geometry.counters_offset,
        Word.REQUESTS_OFFSET: geometry.requests_offset,
        Word.HINTS_OFFSET: geometry.hints_offset,
        Word.RECORDS_OFFSET: geometry.records_offset,
        Word.SLAB_OFFSET: geometry.slab_offset,
    }
    return {**words, Word.STATIC_CHECK: hash(tuple(words.values())) & MASK}


def read_geometry(fd: int, path: str) -> SegmentGeometry:
    """What the header of this open file describes. The header is read, not mapped: nothing is touched beyond the file's end.

    The three free numbers are checked for range, everything else must be what follows from them, and the file must be exactly that
    large. So no offset or count of a stranger's is ever used.

    Raises:
        SegmentRefused: it is not a segment of this layout, or its size and its header disagree.
    """
    try:
        raw = os.pread(fd, HEADER_BYTES, 0)
    except OSError as error:
        raise SegmentRefused(f"{path} cannot be read: {error.strerror}", permanent=True) from None
    if len(raw) < HEADER_BYTES:
        raise SegmentRefused(f"{path} is too short for a header: {len(raw)} bytes", permanent=True)
    words = _HEADER.unpack(raw)
    if words[Word.MAGIC] != MAGIC:
        raise SegmentRefused(f"{path} is not a segment", permanent=True)
    if words[Word.LAYOUT] != layout_word():
        raise SegmentRefused(f"{path} has another layout than this version reads", permanent=True)
    try:
        geometry = segment_geometry(words[Word.NUM_PLACES], words[Word.PLACE_BYTES], words[Word.REQUEST_RECORDS])
    except ValueError as error:
        raise SegmentRefused(f"{path} has an impossible header: {error}", permanent=True) from None
    for word, value in static_words(geometry).items():
        if words[word] != value:
            raise SegmentRefused(f"{path} has an impossible header: {word.name.lower()} is {words[word]}, not {value}", permanent=True)
    size = os.fstat(fd).st_size
    if size != geometry.file_bytes:
        raise SegmentRefused(f"{path} has {size} bytes, but its header says {geometry.file_bytes}", permanent=True)
    return geometry


def write_static(words: memoryview, geometry: SegmentGeometry) -> None:
    """Fill a new file's header; the magic last."""
    values = static_words(geometry)
    for word, value in reversed(values.items()):
        words[word] = value


def describe(words: memoryview) -> dict[str, int]:
    """The header as a dict of lower-case names."""
    return {word.name.lower(): int(words[word]) for word in Word if word not in (Word.MAGIC, Word.LAYOUT)}

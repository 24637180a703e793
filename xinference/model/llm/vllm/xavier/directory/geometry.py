"""How many blocks a byte budget holds, and where each region of their segment lies."""

from dataclasses import dataclass

from xinference.model.llm.vllm.xavier.config import (
    BOOK_BYTES_FIXED,
    BOOK_BYTES_PER_FILLING,
    BOOK_BYTES_PER_PLACE,
    FILLING_MAX_BLOCKS,
)
from xinference.model.llm.vllm.xavier.directory.layout import (
    COUNTER_BYTES,
    HEADER_BYTES,
    LINE_BYTES,
    MAX_PLACES,
    PAGE_BYTES,
    RECORD_BYTES,
    REQUEST_BYTES,
)
from xinference.model.llm.vllm.xavier.errors import BudgetTooSmall

MAX_REQUEST_RECORDS = 1 << 20
MAX_PLACE_BYTES = 1 << 40


@dataclass(frozen=True)
class SegmentGeometry:
    """Sizes and offsets of one segment, in bytes unless named otherwise. All follow from the first three.

    Args:
        num_places: blocks that the slab holds.
        place_bytes: one block, rounded up to whole cache lines.
        request_records: length of the ring of accounting records.
        num_buckets: lines of the hint index; one a place, eight hints each.
        file_bytes: the whole file.
        book_bytes: set aside for in-process books.
    """

    num_places: int
    place_bytes: int
    request_records: int
    num_buckets: int
    counters_offset: int
    requests_offset: int
    hints_offset: int
    records_offset: int
    slab_offset: int
    file_bytes: int
    book_bytes: int

    @property
    def slab_bytes(self) -> int:
        """The blocks' bytes alone."""
        return self.num_places * self.place_bytes


def segment_geometry(num_places: int, place_bytes: int, request_records: int) -> SegmentGeometry:
    """The one geometry with these numbers: header and reader both compute it, so a header with other offsets is refused.

    Raises:
        ValueError: a number is out of range.
    """
    if not 1 <= num_places <= MAX_PLACES:
        raise ValueError(f"a segment has 1 to {MAX_PLACES} places, not {num_places}")
    if not 1 <= place_bytes <= MAX_PLACE_BYTES or place_bytes % LINE_BYTES:
        raise ValueError(f"a place has up to {MAX_PLACE_BYTES} bytes in multiples of {LINE_BYTES}, not {place_bytes}")
    if not 1 <= request_records <= MAX_REQUEST_RECORDS:
        raise ValueError(f"a request ring has 1 to {MAX_REQUEST_RECORDS} records, not {request_records}")
    requests_offset = HEADER_BYTES + COUNTER_BYTES
    hints_offset = requests_offset + request_records * REQUEST_BYTES
    records_offset = hints_offset + num_places * LINE_BYTES
    slab_offset = _round_up(records_offset + num_places * RECORD_BYTES, PAGE_BYTES)
    return SegmentGeometry(
        num_places=num_places,
        place_bytes=place_bytes,
        request_records=request_records,
        num_buckets=num_places,
        counters_offset=HEADER_BYTES,
        requests_offset=requests_offset,
        hints_offset=hints_offset,
        records_offset=records_offset,
        slab_offset=slab_offset,
        file_bytes=_round_up(slab_offset + num_places * place_bytes, PAGE_BYTES),
        book_bytes=BOOK_BYTES_FIXED + num_places * BOOK_BYTES_PER_PLACE + min(num_places, FILLING_MAX_BLOCKS) * BOOK_BYTES_PER_FILLING,
    )


def plan_segment(budget_bytes: int, block_bytes: int, *, request_records: int) -> SegmentGeometry:
    """The largest segment whose file and in-process books fit into the budget.

    Args:
        budget_bytes: what the CPU tier of one replica may take.
        block_bytes: one block in all layers of the engine.
        request_records: length of the ring of accounting records.

    Raises:
        BudgetTooSmall: not even one block fits.
    """
    if block_bytes < 1:
        raise ValueError(f"a block has at least one byte, not {block_bytes}")
    place_bytes = _round_up(block_bytes, LINE_BYTES)
    smallest = segment_geometry(1, place_bytes, request_records)
    if total_bytes(smallest) > budget_bytes:
        raise BudgetTooSmall(
            f"a CPU cache of {budget_bytes} bytes cannot hold one block: "
            f"{place_bytes} for the block + {smallest.slab_offset} for header, counters, request records and index "
            f"+ {smallest.book_bytes} for in-process books, in whole pages of {PAGE_BYTES} = {total_bytes(smallest)} bytes"
        )
    low, high = 1, min(budget_bytes // place_bytes, MAX_PLACES)
    while low < high:
        middle = (low + high + 1) // 2
        if total_bytes(segment_geometry(middle, place_bytes, request_records)) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return segment_geometry(low, place_bytes, request_records)


def total_bytes(geometry: SegmentGeometry) -> int:
    """What a segment takes of its budget."""
    return geometry.file_bytes + geometry.book_bytes


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule

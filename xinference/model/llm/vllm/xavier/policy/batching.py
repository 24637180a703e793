"""The copies of a step, for all its requests together, cut into bounded transfers.

One transfer reads from one source. A place that several requests need is read once and written to each of their blocks. Two different
contents for one block are a fault of whoever planned them, found before a byte has moved.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xinference.model.llm.vllm.xavier.errors import ConflictingWrites

# The engine's own block of no content: nothing may be written to it, and its number stands for "no block needed here".
NULL_BLOCK = 0


class Piece(NamedTuple):
    """One block to be filled: from a place (or the key that finds it) of a source."""

    source: str
    place: Hashable
    block: int


class Read(NamedTuple):
    """One place, read once, and the blocks it is written to."""

    place: Hashable
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One transfer."""

    source: str
    reads: tuple[Read, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks written."""
        return sum(len(read.blocks) for read in self.reads)


def cut_batches(pieces: Sequence[Piece], max_blocks: int, max_bytes: int, block_bytes: int) -> list[Batch]:
    """Group pieces by source and cut each group into transfers.

    Args:
        pieces: what all requests of a step need, in any order. Those for the null block are left out, equal ones count once.
        max_blocks: most blocks that one transfer writes.
        max_bytes: most bytes that one transfer writes; a single block is moved even if it is larger.
        block_bytes: bytes of one block.

    Returns:
        Transfers, sources and places in the order in which they first appear.

    Raises:
        ConflictingWrites: two pieces write different content to one block.
    """
    origins: dict[int, tuple[str, Hashable]] = {}
    reads: dict[str, dict[Hashable, list[int]]] = {}
    for source, place, block in pieces:
        if block == NULL_BLOCK:
            continue
        known = origins.get(block)
        if known is None:
            origins[block] = (source, place)
            reads.setdefault(source, {}).setdefault(place, []).append(block)
        elif known != (source, place):
            raise ConflictingWrites(f"block {block} is to be filled from {known[0]} and from {source}, with different content")
    limit = max(1, min(max_blocks, max_bytes // block_bytes))
    return [batch for source, by_place in reads.items() for batch in _cut(source, by_place, limit)]


def _cut(source: str, blocks_by_place: dict[Hashable, list[int]], limit: int) -> list[Batch]:
    """Cut one source's reads into batches of at most `limit` blocks; a place is read again only if its blocks alone exceed that."""
    batches: list[Batch] = []
    reads: list[Read] = []
    room = limit
    for place, blocks in blocks_by_place.items():
        for first in range(0, len(blocks), limit):
            part = tuple(blocks[first : first + limit])
            if len(part) > room:
                batches.append(Batch(source, tuple(reads)))
                reads, room = [], limit
            reads.append(Read(place, part))
            room -= len(part)
    if reads:
        batches.append(Batch(source, tuple(reads)))
    return batches

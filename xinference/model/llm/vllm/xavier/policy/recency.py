"""The order in which stored places are given up: content used once goes before content used again, tails before heads.

Two lists over the same arrays, one after the other in age::

    first to go                                                     last to go
    [ probation: oldest ............ newest ][ protected: oldest ....... newest ]
      used once, or not for a long time        used again

A hit moves its prefix to the newest end of *protected*. Protected holds at most PROTECTED_SHARE of the places: what falls out of it
starts again at the newest end of probation. That is the whole ageing of the reused mark: no clock, no sweep, and a mark is worth
nothing once enough other content has been reused since.

Through both lists together a parent is always newer than its children, so the oldest place never has a stored child and a chain is
given up from its tail. Three rules keep that: a child is linked just on the older side of its parent; a prefix is moved tail first;
a child is protected only while its parent is.
"""

from array import array
from collections.abc import Iterator, Sequence

from xinference.model.llm.vllm.xavier.policy.order import NO_PLACE, PlaceList
from xinference.model.llm.vllm.xavier.policy.places import require

# A fifth keeps what is asked for again and again (system prompts, long conversations) through a flood of new content, and leaves plain
# recency to rule the rest. Of 54 replays of public traces (`benchmarks/traces.py`) 47 find as much as plain LRU or more, by up to 1.5 % of
# all blocks; the others find up to 0.2 % less: caches that nearly hold the working set, and owners that are not told of hits by others,
# where a mark says less. One half, against a fifth on one replica, found up to 0.6 % more at one size and up to 1.9 % less at another.
PROTECTED_SHARE = 0.2

RECENCY_BYTES_PER_PLACE = 4 + 4 + 1


class RecencyOrder:
    """Keeps stored places in eviction order. Everything is O(1) a place; nothing here knows pins, keys or free places."""

    __slots__ = ("_newer", "_older", "_probation", "_protected", "_protected_max", "_reused")

    def __init__(self, num_places: int) -> None:
        self._older = array("i", bytes(4 * num_places))
        self._newer = array("i", bytes(4 * num_places))
        self._reused = bytearray(num_places)
        self._protected_max = int(num_places * PROTECTED_SHARE)
        self.clear()

    @property
    def size(self) -> int:
        """Places in order."""
        return self._probation.size + self._protected.size

    def nbytes(self) -> int:
        """Bytes of the arrays, which is RECENCY_BYTES_PER_PLACE for each place."""
        return sum(a.itemsize * len(a) for a in (self._older, self._newer)) + len(self._reused)

    def clear(self) -> None:
        """Forget every place."""
        self._probation = PlaceList(self._older, self._newer)
        self._protected = PlaceList(self._older, self._newer)
        self._reused[:] = bytes(len(self._reused))

    def reused(self, place: int) -> bool:
        """Say whether a place in order is protected: it was used again, and not too long ago."""
        return bool(self._reused[place])

    def add(self, place: int, parent: int, seen: bool) -> None:
        """Link a new place.

        Args:
            place: not in order yet.
            parent: its parent, in order, or NO_PLACE.
            seen: the content was asked for before; it starts protected if its parent is.
        """
        protected = seen and (parent == NO_PLACE or bool(self._reused[parent]))
        target = self._protected if protected else self._probation
        self._reused[place] = protected
        if parent != NO_PLACE and self._reused[parent] == protected:
            target.add_older_than(place, parent)
        else:
            target.add_newest(place)
        if protected:
            self._demote_surplus()

    def drop(self, place: int) -> None:
        """Unlink a place that has no child in order."""
        (self._protected if self._reused[place] else self._probation).drop(place)

    def touch(self, prefix: Sequence[int], reused: bool) -> None:
        """Make a prefix the newest, tail first.

        Args:
            prefix: places in order, each after its parent; a parent that is not named must not exist.
            reused: a hit, which protects; otherwise each place keeps its list.
        """
        for place in reversed(prefix):
            protected = reused or bool(self._reused[place])
            self.drop(place)
            self._reused[place] = protected
            (self._protected if protected else self._probation).add_newest(place)
        self._demote_surplus()

    def oldest_first(self) -> Iterator[int]:
        """Walk from the first to go. The place just given may be dropped before the next is asked for; no other change is allowed."""
        for order in (self._probation, self._protected):
            place = order.oldest
            while place != NO_PLACE:
                above = order.newer_than(place)
                yield place
                place = above

    def _demote_surplus(self) -> None:
        """Move what exceeds the protected share, oldest first, so that a demoted parent ends up newer than its demoted children."""
        protected = self._protected
        while protected.size > self._protected_max:
            place = protected.oldest
            protected.drop(place)
            self._reused[place] = 0
            self._probation.add_newest(place)

    def check(self, parent: Sequence[int], stored: Sequence[int]) -> None:
        """Compare the order with the stored places and their parents, O(places). Raises BookImbalance."""
        ranks = {place: rank for rank, place in enumerate(self.oldest_first())}
        require(ranks.keys() == set(stored) and len(ranks) == self.size, "the order does not hold exactly the stored places")
        require(self._protected.size <= self._protected_max, f"{self._protected.size} protected places")
        require(sum(self._reused[place] for place in ranks) == self._protected.size, "marks and protected places differ")
        for place, rank in ranks.items():
            require(parent[place] == NO_PLACE or ranks[parent[place]] > rank, f"place {place} is newer than its parent")

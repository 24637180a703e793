"""A doubly linked list over place numbers, kept in two flat arrays that several lists share.

A place is in at most one list at a time, so every list of a book can use the same two arrays: 8 bytes a place whatever
the number of lists, and no Python object per block held.
"""

from array import array

NO_PLACE = -1


class PlaceList:
    """Places from oldest to newest. Every verb is O(1); which place belongs to which list is the caller's knowledge."""

    __slots__ = ("_newer", "_older", "newest", "oldest", "size")

    def __init__(self, older: "array[int]", newer: "array[int]") -> None:
        """Start empty on arrays shared with the other lists of the same book (signed 32-bit, one entry a place)."""
        self._older = older
        self._newer = newer
        self.oldest = NO_PLACE
        self.newest = NO_PLACE
        self.size = 0

    def newer_than(self, place: int) -> int:
        """Return the neighbour on the newer side, or NO_PLACE at the newest end."""
        return self._newer[place]

    def add_newest(self, place: int) -> None:
        """Link an unlinked place at the newest end."""
        top = self.newest
        self._older[place] = top
        self._newer[place] = NO_PLACE
        if top == NO_PLACE:
            self.oldest = place
        else:
            self._newer[top] = place
        self.newest = place
        self.size += 1

    def add_older_than(self, place: int, anchor: int) -> None:
        """Link an unlinked place just on the older side of one that is in this list."""
        below = self._older[anchor]
        self._older[place] = below
        self._newer[place] = anchor
        self._older[anchor] = place
        if below == NO_PLACE:
            self.oldest = place
        else:
            self._newer[below] = place
        self.size += 1

    def drop(self, place: int) -> None:
        """Unlink a place of this list."""
        below, above = self._older[place], self._newer[place]
        if below == NO_PLACE:
            self.oldest = above
        else:
            self._newer[below] = above
        if above == NO_PLACE:
            self.newest = below
        else:
            self._older[above] = below
        self.size -= 1

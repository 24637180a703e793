"""The state, parent, children and pins of every place of a slab, in flat arrays, and the free places.

Mechanics only: which move is allowed when, and which place is given up, is `placement.py`.
"""

import re
from array import array

from xinference.model.llm.vllm.xavier.errors import BookImbalance
from xinference.model.llm.vllm.xavier.policy.order import NO_PLACE

FREE, RESERVED, CANCELLED, STORED, WITHDRAWN = range(5)
STATE_MASK = 0x07
SEEN = 0x08  # reserved for content that was seen before
PINNED = 0x10  # pins > 0, beside the state so that one pass over the flags finds the held places

TABLE_BYTES_PER_PLACE = 4 + 4 + 2 + 1

# What clear() makes of each flag. Reservations are still owed a commit or an abort; pinned places are still being read.
AFTER_CLEAR = {RESERVED: CANCELLED, RESERVED | SEEN: CANCELLED, CANCELLED: CANCELLED}
AFTER_CLEAR |= {STORED | PINNED: WITHDRAWN | PINNED, WITHDRAWN | PINNED: WITHDRAWN | PINNED}
CLEARED = bytes(AFTER_CLEAR.get(flag, FREE) for flag in range(256))
CLEAR_CHUNK_BYTES = 1 << 16
NOT_FREE = re.compile(rb"[^\x00]")


class PlaceTable:
    """Flat arrays, one entry a place. The attributes are for the book of the same slab and nobody else."""

    __slots__ = ("_free_top", "_fresh", "children", "flags", "num", "num_pinned", "num_places", "parent", "pins")

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.parent = array("i", bytes(4 * num_places))  # of a free place: the next free one
        self.children = array("I", bytes(4 * num_places))  # reserved, cancelled and stored ones
        self.pins = array("H", bytes(2 * num_places))
        self.flags = bytearray(num_places)
        self.num = [num_places, 0, 0, 0, 0]  # places by state
        self.num_pinned = 0
        self._free_top = NO_PLACE  # given back last
        self._fresh = 0  # free places from here on are not linked: a new or cleared book need not write to each

    def nbytes(self) -> int:
        """Bytes of all arrays: TABLE_BYTES_PER_PLACE for each place."""
        return sum(a.itemsize * len(a) for a in (self.parent, self.children, self.pins)) + len(self.flags)

    def state(self, place: int) -> int:
        """The state of a place. Raises IndexError for one that does not exist (NO_PLACE too)."""
        if place < 0:
            raise IndexError(f"no place {place}")
        return self.flags[place] & STATE_MASK

    def untouched(self, place: int) -> bool:
        """Say whether a place is free and was never taken since the table was new or cleared."""
        return place >= self._fresh and self.flags[place] == FREE

    def take_free(self) -> int:
        """Return a free place, still free, that is linked nowhere any more. There must be one."""
        place = self._free_top
        if place == NO_PLACE:
            place = self.flags.find(FREE, self._fresh)
            self._fresh = place + 1
        else:
            self._free_top = self.parent[place]
        return place

    def enter(self, place: int, parent: int, seen: bool) -> None:
        """Make a place that is linked nowhere a reserved child of a parent, or of NO_PLACE."""
        self.num[self.flags[place] & STATE_MASK] -= 1
        self.num[RESERVED] += 1
        self.flags[place] = RESERVED | SEEN if seen else RESERVED
        self.children[place] = 0
        self.parent[place] = parent
        if parent != NO_PLACE:
            self.children[parent] += 1

    def move(self, place: int, state: int) -> None:
        """Give a place without pins a new state."""
        self.num[self.flags[place] & STATE_MASK] -= 1
        self.num[state] += 1
        self.flags[place] = state

    def cut(self, place: int) -> None:
        """Make a place nobody's child. A withdrawn parent that waited only for this child becomes free."""
        parent = self.parent[place]
        self.parent[place] = NO_PLACE
        if parent == NO_PLACE:
            return
        self.children[parent] -= 1
        if not self.children[parent] and self.flags[parent] == WITHDRAWN:
            self.release(parent)

    def release(self, place: int) -> None:
        """Make a place that nobody holds free. Its own parent is cut by the caller before."""
        self.move(place, FREE)
        if place < self._fresh:
            self.parent[place] = self._free_top
            self._free_top = place

    def clear(self) -> None:
        """Free all that nobody holds, cancel reservations, withdraw what is pinned, forget all parents.

        Nothing that is left will ever be found, so nothing needs its ancestors. A few passes over the flags at the speed of bytes
        (some milliseconds for a million places), then O(1) for each place that is still held.
        """
        flags = self.flags
        for start in range(0, self.num_places, CLEAR_CHUNK_BYTES):  # in chunks: no second copy of the flags
            flags[start : start + CLEAR_CHUNK_BYTES] = flags[start : start + CLEAR_CHUNK_BYTES].translate(CLEARED)
        self.num = [flags.count(FREE), 0, flags.count(CANCELLED), 0, flags.count(WITHDRAWN | PINNED)]
        for held in NOT_FREE.finditer(flags) if self.num[FREE] < self.num_places else ():
            self.parent[held.start()] = NO_PLACE
            self.children[held.start()] = 0
        self._free_top = NO_PLACE
        self._fresh = 0

    def check(self) -> None:
        """Compare the arrays with each other, O(places). Raises BookImbalance."""
        states = [flag & STATE_MASK for flag in self.flags]
        require([states.count(state) for state in range(5)] == self.num, f"places by state should be {self.num}")
        require(sum(pins > 0 for pins in self.pins) == self.num_pinned, f"pinned places should be {self.num_pinned}")
        num_children = [0] * self.num_places
        for place, state in enumerate(states):
            if state == FREE or self.parent[place] == NO_PLACE:
                continue
            parent = self.parent[place]
            num_children[parent] += 1
            alone = states[parent] == FREE or (state == STORED and states[parent] != STORED)
            require(not alone, f"place {place} is without its parent {parent}")
        for place, state in enumerate(states):
            pins, pinned = self.pins[place], bool(self.flags[place] & PINNED)
            require(state == FREE or self.children[place] == num_children[place], f"place {place} has {num_children[place]} children")
            require((pins > 0) == pinned and (not pins or state in (STORED, WITHDRAWN)), f"place {place} has {pins} pins")
            require(state != WITHDRAWN or bool(pins or num_children[place]), f"place {place} is withdrawn and held by nobody")
        self._check_free(states)

    def _check_free(self, states: list[int]) -> None:
        linked: set[int] = set()
        place = self._free_top
        while place != NO_PLACE and place not in linked:
            linked.add(place)
            place = self.parent[place]
        expected = {place for place in range(self._fresh) if states[place] == FREE}
        require(place == NO_PLACE and linked == expected, "the free places are not those that are linked")


def require(holds: bool, what: str) -> None:
    """Raise BookImbalance with `what` unless it holds."""
    if not holds:
        raise BookImbalance(what)

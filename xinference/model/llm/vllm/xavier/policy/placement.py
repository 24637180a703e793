"""Which own place holds a block, who is its parent, who holds on to it, and which place is given up next.

The book knows places, not keys: the records of the segment hold those. It is flat arrays of DECISION_BYTES_PER_PLACE bytes a place, every
verb is O(1) a block, and no Python object exists for a block held: a million of those would slow every garbage collection of the engine.

Life of a place::

              reserve              commit
     free ───────────> reserved ───────────> stored ───────> free      evicted by a reservation, or cleared
      ^                 │    │ clear           │
      │           abort │    └──> cancelled    │ clear, while pinned
      │                 │            │         v
      ├─────────────────┴────────────┤     withdrawn                   nobody finds it any more; somebody still reads it,
      └──────────────────────────────┴─────────┘                       or it was aborted under children not settled yet

A reservation may have children before it is committed, so that one call reserves a whole chain. Places are settled parents first, as
one copy thread does by itself; a child whose parent was aborted or cleared is refused at its commit, and given back. So a stored place
has a stored parent or none, and a chain never has a gap. "None" also says that the content before it is kept elsewhere (in a peer's
slab): such a place starts a fragment of its own here.

Eviction takes the oldest stored place without children and pins, see `recency.py` for the order. Content not seen before takes only from
probation; content seen before (`admission.py`) also takes protected places when probation has none to give.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from xinference.model.llm.vllm.xavier.errors import BookImbalance
from xinference.model.llm.vllm.xavier.policy.admission import DOORKEEPER_BYTES_PER_PLACE
from xinference.model.llm.vllm.xavier.policy.order import NO_PLACE
from xinference.model.llm.vllm.xavier.policy.places import (
    CANCELLED,
    FREE,
    PINNED,
    RESERVED,
    SEEN,
    STORED,
    TABLE_BYTES_PER_PLACE,
    WITHDRAWN,
    PlaceTable,
)
from xinference.model.llm.vllm.xavier.policy.recency import RECENCY_BYTES_PER_PLACE, RecencyOrder

# Places a reservation may pass over (pinned, or with children that are) before it is refused. Blocks of a load are pinned for
# milliseconds and were touched when they were found, so they are near the newest end; 64 is one synchronous load left at the oldest.
EVICTION_SCAN_PLACES = 64

# What the decisions about one place take: the book and the doorkeeper that goes with it. A part of config.BOOK_BYTES_PER_PLACE, which a
# budget sets aside for all books of a place; a test holds the one to the other.
DECISION_BYTES_PER_PLACE = TABLE_BYTES_PER_PLACE + RECENCY_BYTES_PER_PLACE + DOORKEEPER_BYTES_PER_PLACE

Refusal = Literal["capacity", "admission", "parent_gone"]
State = Literal["free", "reserved", "cancelled", "stored", "withdrawn"]
STATE_NAMES: tuple[State, ...] = ("free", "reserved", "cancelled", "stored", "withdrawn")


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a call to reserve did.

    Attributes:
        places: one for each leading block of the chain, to be committed or aborted in this order.
        evicted: places whose content was given up for it, a subset of `places`; withdraw their records before writing.
        refused: why the rest of the chain got nothing, or None if all of it has places.
    """

    places: list[int]
    evicted: list[int]
    refused: Refusal | None


@dataclass(frozen=True, slots=True)
class PlaceView:
    """One place as the book sees it."""

    state: State
    parent: int | None
    num_children: int
    num_pins: int
    reused: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """Places by state; they add up to the capacity. `pinned` overlaps with stored and withdrawn."""

    free: int
    reserved: int
    stored: int
    withdrawn: int
    pinned: int

    @property
    def used(self) -> int:
        """Places that hold content, or bytes that somebody still reads."""
        return self.stored + self.withdrawn


class PlacementBook:
    """The book of one slab. Not thread safe: the engine's one lock orders the callers."""

    __slots__ = ("_order", "_table", "num_places")

    def __init__(self, num_places: int) -> None:
        """Start with all places free. Raises ValueError if there is none."""
        if num_places < 1:
            raise ValueError(f"a book needs at least one place, got {num_places}")
        self.num_places = num_places
        self._table = PlaceTable(num_places)
        self._order = RecencyOrder(num_places)

    def nbytes(self) -> int:
        """Bytes of all arrays, the doorkeeper's not among them."""
        return self._table.nbytes() + self._order.nbytes()

    def counts(self) -> Counts:
        """Places by state, now."""
        num = self._table.num
        return Counts(num[FREE], num[RESERVED] + num[CANCELLED], num[STORED], num[WITHDRAWN], self._table.num_pinned)

    def view(self, place: int) -> PlaceView:
        """One place, now. Raises IndexError for a place that does not exist."""
        table = self._table
        state = table.state(place)
        if state == FREE:
            return PlaceView("free", None, 0, 0, False)
        parent = None if table.parent[place] == NO_PLACE else table.parent[place]
        reused = state == STORED and self._order.reused(place)
        return PlaceView(STATE_NAMES[state], parent, table.children[place], table.pins[place], reused)

    def reserve(self, parent: int | None, count: int, num_seen: int = 0) -> Reservation:
        """Take places for a chain of new blocks, evicting where none is free.

        Takes as many leading blocks as it can and stops at the first without a place, so nothing is kept past a gap. A refused block
        changes nothing.

        Args:
            parent: the place, reserved or stored, of the block before the first one, or None.
            count: blocks in the chain.
            num_seen: how many of its leading blocks were seen before (`admission.py`).

        Returns:
            The places with the evicted ones among them. Refusals: "parent_gone" if the parent is in neither state, "admission" if only
            protected content could make room for a block not seen before, "capacity" if nothing can within EVICTION_SCAN_PLACES.
        """
        table, order = self._table, self._order
        tail = NO_PLACE if parent is None else parent
        if parent is not None and table.state(parent) not in (RESERVED, STORED):
            return Reservation([], [], "parent_gone")
        places: list[int] = []
        evicted: list[int] = []
        victims = self._evictable(tail)
        for index in range(count):
            seen = index < num_seen
            if table.num[FREE]:
                place = table.take_free()
            else:
                place = next(victims, NO_PLACE)
                if place == NO_PLACE:
                    return Reservation(places, evicted, "capacity")
                if not seen and order.reused(place):
                    return Reservation(places, evicted, "admission")
                order.drop(place)
                table.cut(place)
                evicted.append(place)
            table.enter(place, tail, seen)
            places.append(place)
            tail = place
        return Reservation(places, evicted, None)

    def commit(self, place: int) -> bool:
        """Turn a reserved place, whose bytes are in place, into a stored one.

        Returns:
            False if its parent is not stored or the reservation was cancelled: the place is given back and must not be published.

        Raises:
            BookImbalance: the place is not reserved.
        """
        table = self._table
        state = table.state(place)
        parent = table.parent[place]
        if state != RESERVED or (parent != NO_PLACE and table.state(parent) != STORED):
            self.abort(place)
            return False
        seen = bool(table.flags[place] & SEEN)
        table.move(place, STORED)
        self._order.add(place, parent, seen)
        return True

    def abort(self, place: int) -> None:
        """Give a reserved place back. Its reserved children will be refused at their commit.

        Raises:
            BookImbalance: the place is not reserved.
        """
        table = self._table
        if table.state(place) not in (RESERVED, CANCELLED):
            raise BookImbalance(f"place {place} is {self.view(place).state} and cannot be settled")
        table.cut(place)
        if table.children[place]:
            table.move(place, WITHDRAWN)
        else:
            table.release(place)

    def restore(self, place: int, parent: int | None) -> None:
        """Enter a place whose valid content was found in an adopted segment: parents first, what is least wanted first.

        Raises:
            BookImbalance: the place is in use or was already given out once, or its parent is not stored.
        """
        table = self._table
        if not table.untouched(place) or (parent is not None and table.state(parent) != STORED):
            raise BookImbalance(f"place {place} cannot be restored under {parent}")
        table.enter(place, NO_PLACE if parent is None else parent, seen=False)
        self.commit(place)

    def touch(self, prefix: Sequence[int], *, reused: bool = True) -> None:
        """Make a stored prefix the newest, heads newer than tails. A no-op for an empty one.

        Args:
            prefix: from head to tail, each place once. A place may be without a parent (the head, or after blocks that a peer keeps).
            reused: the content served a request again, which protects it; False only says that it is current.

        Raises:
            BookImbalance: a place is not stored, is named twice, or comes before its parent or without it. Nothing has changed then.
        """
        table = self._table
        before = {NO_PLACE}
        for place in prefix:
            if table.state(place) != STORED or table.parent[place] not in before or place in before:
                raise BookImbalance(f"place {place} does not continue a stored prefix")
            before.add(place)
        self._order.touch(prefix, reused)

    def pin(self, place: int) -> None:
        """Keep a stored place until as many calls of unpin; at most 65,535 at a time (OverflowError).

        Raises:
            BookImbalance: the place is not stored.
        """
        table = self._table
        if table.state(place) != STORED:
            raise BookImbalance(f"place {place} is {self.view(place).state}, and only stored places are pinned")
        table.pins[place] += 1
        if table.pins[place] == 1:
            table.flags[place] |= PINNED
            table.num_pinned += 1

    def unpin(self, place: int) -> None:
        """Undo one pin; the last one frees a withdrawn place.

        Raises:
            BookImbalance: the place has no pin.
        """
        table = self._table
        state = table.state(place)
        if not table.pins[place]:
            raise BookImbalance(f"place {place} is unpinned more often than pinned")
        table.pins[place] -= 1
        if table.pins[place]:
            return
        table.flags[place] &= ~PINNED
        table.num_pinned -= 1
        if state == WITHDRAWN:
            table.release(place)

    def clear(self) -> int:
        """Take everything out of service: reservations are cancelled, pinned places stay withdrawn until their last unpin.

        Returns:
            Places whose bytes were given back at once.
        """
        used = self.counts().used
        self._table.clear()
        self._order.clear()
        return used - self.counts().used

    def check(self) -> None:
        """Compare every book with every other, O(places). Raises BookImbalance with what does not agree."""
        self._table.check()
        stored = [place for place in range(self.num_places) if self._table.state(place) == STORED]
        self._order.check(self._table.parent, stored)

    def _evictable(self, keep: int) -> Iterator[int]:
        """Yield places that may be evicted, first to go first, until EVICTION_SCAN_PLACES others were passed over.

        `keep` is the parent of the chain that is being placed: it may have no child yet, and is not evicted for its own.
        """
        passed_over = 0
        for place in self._order.oldest_first():
            if place != keep and not self._table.children[place] and not self._table.pins[place]:
                yield place
            elif passed_over == EVICTION_SCAN_PLACES:
                return
            else:
                passed_over += 1

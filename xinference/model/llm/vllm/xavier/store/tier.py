"""The CPU tier of one replica: the places of its segment under a policy's book.

The segment knows which key lies where, the book knows what may be given up; this class keeps the two in step. Not thread safe: callers
hold the engine's one lock for every verb except ``prefix``, which only reads what anybody may read.

A place is withdrawn before it can be handed out again, so a peer that is copying it notices. A place that was handed out stays with
whoever fills it until it is published or given back, whatever happens meanwhile to its chain or its epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.config import FILLING_MAX_BLOCKS
from xinference.model.llm.vllm.xavier.directory.records import Keys
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.errors import BookImbalance
from xinference.model.llm.vllm.xavier.policy.admission import Doorkeeper
from xinference.model.llm.vllm.xavier.policy.placement import PlacementBook

_DROP_BY_REFUSAL = {
    "capacity": "drops_capacity",
    "admission": "drops_admission",
    "parent_gone": "drops_parent",
    "queue_full": "drops_queue_full",
}


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Blocks to be saved: a run of one chain.

    Args:
        parent_key: the block before the first one, if this tier keeps it or is being given it; None for the first block of a prompt, and
            for a run whose beginning is kept elsewhere.
        keys: the run, in chain order.
    """

    parent_key: BlockKey | None
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a reservation gave.

    Args:
        first: index of the first key that got a place; those before it are kept or on their way already.
        places: for keys[first], keys[first + 1], ... Each is to be published or given back, in this order.
        refused: why the keys from ``end`` on got none. None if there are none left, or if keys[end] was kept or on its way already, as
            the beginning of a run of its own: then the rest may be offered again. Each call gives a place or refuses, so that ends.
    """

    first: int
    places: list[int]
    refused: str | None

    @property
    def end(self) -> int:
        """Index behind the last key that got a place."""
        return self.first + len(self.places)


class CpuTier:
    """Blocks in the segment's slab.

    Args:
        segment: the segment, just opened; what it adopted is entered into the book, as far as its chains have no gaps.
        book: an empty book with as many places.
        doorkeeper: remembers which content was offered before.
    """

    def __init__(self, segment: SegmentWriter, book: PlacementBook, doorkeeper: Doorkeeper) -> None:
        if book.num_places != segment.geometry.num_places:
            raise BookImbalance(f"a book of {book.num_places} places for a segment of {segment.geometry.num_places}")
        self._segment = segment
        self._book = book
        self._doorkeeper = doorkeeper
        # What is being filled: at most FILLING_MAX_BLOCKS.
        self._filling: dict[BlockKey, int] = {}
        self._key_by_filling: dict[int, BlockKey] = {}
        self._restore()

    @classmethod
    def of(cls, segment: SegmentWriter) -> "CpuTier":
        """The tier of a segment, with new books."""
        num_places = segment.geometry.num_places
        return cls(segment, PlacementBook(num_places), Doorkeeper(num_places))

    @property
    def used_blocks(self) -> int:
        """Places that are not free: filled, being filled, or still read."""
        return self._book.num_places - self._book.counts().free

    @property
    def used_bytes(self) -> int:
        """Bytes of those places."""
        return self.used_blocks * self._segment.geometry.place_bytes

    def prefix(self, keys: Keys, start: int, stop: int) -> int:
        """End of the longest run of keys from ``start`` that are published here, at most ``stop``."""
        return self._segment.longest_prefix(keys, start, stop)

    def reserve(self, chain: ReserveRequest) -> Reserved:
        """Take places for the run's blocks that are not here yet, giving up others where none is free.

        Refused blocks are counted here. Each run is to be offered once a request: a second offer looks like a second request for it.
        """
        keys = chain.keys
        first, tail = self._skip_held(chain)
        if first == len(keys):
            return Reserved(first, [], None)
        if tail is None and chain.parent_key is not None:
            return self._refused(first, [], len(keys), "parent_gone")
        stop = self._segment.first_present(keys, first + 1, len(keys))
        if self._filling:
            stop = next((index for index in range(first + 1, stop) if keys[index] in self._filling), stop)
        wanted = keys[first : min(stop, first + FILLING_MAX_BLOCKS - len(self._filling))]
        plan = self._book.reserve(tail, len(wanted), self._doorkeeper.num_seen(wanted))
        self._doorkeeper.note(wanted)
        self._segment.invalidate_published(plan.places)  # not the evicted ones alone: a clear leaves its records behind
        self._filling.update(zip(wanted, plan.places, strict=False))
        self._key_by_filling.update(zip(plan.places, wanted, strict=False))
        self._segment.counters.add("evictions", len(plan.evicted))
        self._note_used()
        num_refused = stop - first - len(plan.places)
        if not num_refused:
            return Reserved(first, plan.places, None)
        return self._refused(first, plan.places, num_refused + len(keys) - stop, plan.refused or "queue_full")

    def publish(self, place: int, key: BlockKey, parent_key: BlockKey | None) -> bool:
        """The bytes are in place: let everybody find them.

        Returns:
            False if they must not be found: a clear came in between, the block before them is not kept, or the index has no room. The
            place is given back then, and the drop is counted.
        """
        if self._forget_filling(place, key) and self._segment.has_room(key) and self._book.commit(place):
            self._segment.publish(place, key, parent_key)
            return True
        self._segment.counters.add(self._refuse(place))
        self._note_used()
        return False

    def give_back(self, place: int) -> None:
        """A reserved place is not going to be published; the caller has counted why."""
        self._forget_filling(place, self._key_by_filling.get(place))
        self._forget_followers(place)
        self._book.abort(place)
        self._note_used()

    def pin(self, keys: Sequence[BlockKey]) -> list[int]:
        """Keep the leading keys that are published here until ``unpin``; their places, in order."""
        places = []
        for key in keys:
            place = self._segment.place_of(key)
            if place is None:
                break
            self._book.pin(place)
            places.append(place)
        return places

    def unpin(self, places: Sequence[int]) -> None:
        """Undo one ``pin``."""
        for place in places:
            self._book.unpin(place)
        self._note_used()

    def touch(self, keys: Sequence[BlockKey], *, reused: bool = True) -> None:
        """Make the leading keys that are published here the last to be given up.

        Args:
            keys: a run of one chain from its beginning here. One from the middle stays where it is: it must not outlive its head.
            reused: they served a request again, which protects them from content that was never asked for twice.
        """
        places: list[int] = []
        for key in keys:
            place = self._segment.place_of(key)
            if place is None:
                break
            places.append(place)
        if places and self._book.view(places[0]).parent is None:
            self._book.touch(places, reused=reused)

    def holds(self, key: BlockKey) -> bool:
        """Whether the key is published here or on its way: a run that follows it may name it as its parent."""
        return self._place_of(key) is not None

    def clear(self, epoch: int) -> int:
        """Start a new epoch: nothing that is here now is found again. Costs the same for any number of blocks but for a scan of bytes.

        Records stay as they are until their place is used again: no reader of the new epoch accepts them.

        Returns:
            Bytes given back at once; those of pinned places and of places being filled follow when they are let go.
        """
        self._segment.set_epoch(epoch)
        self._filling.clear()
        self._key_by_filling.clear()
        freed = self._book.clear()
        self._segment.counters.add("cleared_blocks", freed)
        self._note_used()
        return freed * self._segment.geometry.place_bytes

    def check(self) -> None:
        """Compare the book with the records, O(capacity).

        Raises:
            BookImbalance: they disagree.
        """
        self._book.check()
        segment = self._segment
        for place in range(self._book.num_places):
            view = self._book.view(place)
            key = segment.key_of(place)
            found = None if key is None else segment.place_of(key)
            if (view.state == "stored") != (found == place):
                raise BookImbalance(f"place {place} is {view.state} in the book, but the segment finds its key in {found}")
            filling = self._key_by_filling.get(place)
            if filling is not None and view.state != "reserved":
                raise BookImbalance(f"place {place} is {view.state} in the book, but it is filled with {filling}")
        if self._filling != {key: place for place, key in self._key_by_filling.items()}:
            raise BookImbalance("keys and places of blocks being filled disagree")

    def _place_of(self, key: BlockKey) -> int | None:
        place = self._filling.get(key)
        return self._segment.place_of(key) if place is None else place

    def _skip_held(self, chain: ReserveRequest) -> tuple[int, int | None]:
        """How many leading keys have a place, and the place that the next one follows, if it is here."""
        first = 0
        tail = None if chain.parent_key is None else self._place_of(chain.parent_key)
        for key in chain.keys:
            place = self._place_of(key)
            if place is None:
                break
            first, tail = first + 1, place
        return first, tail

    def _refuse(self, place: int) -> str:
        """Give a place back that cannot be published; why not, as the name of a counter."""
        self._forget_followers(place)
        view = self._book.view(place)
        if view.state not in ("reserved", "cancelled"):
            return "drops_parent"  # the book has refused it, and has it back already
        reason = "drops_epoch" if view.state == "cancelled" else "drops_parent"
        if view.state == "reserved" and (view.parent is None or self._book.view(view.parent).state == "stored"):
            reason = "drops_index_full"
        self._book.abort(place)
        return reason

    def _forget_followers(self, place: int) -> None:
        """What was to follow this place in its chain cannot be published any more, so its keys may be offered again."""
        if self._book.view(place).num_children:
            lost = {place}
            for child, key in list(self._key_by_filling.items()):  # parents come before their children
                if self._book.view(child).parent in lost:
                    lost.add(child)
                    self._forget_filling(child, key)

    def _forget_filling(self, place: int, key: BlockKey | None) -> bool:
        """False if the place was not wanted any more: a clear came in between, or what it was to follow was given back."""
        if key is None or self._filling.get(key) != place:
            return False
        del self._filling[key]
        del self._key_by_filling[place]
        return True

    def _refused(self, first: int, places: list[int], num_refused: int, reason: str) -> Reserved:
        self._segment.counters.add(_DROP_BY_REFUSAL[reason], num_refused)
        return Reserved(first, places, reason)

    def _restore(self) -> None:
        """Enter what the segment adopted, parents first; a block whose parent is not here any more is withdrawn."""
        segment, book = self._segment, self._book
        last_key, last_place = None, None  # blocks of a chain are mostly published one after the other
        for place, key, parent_key in segment.adopted:
            parent = None
            if parent_key is not None:
                parent = last_place if parent_key == last_key else segment.place_of(parent_key)
                if parent is None or book.view(parent).state != "stored":
                    segment.invalidate(place)
                    continue
            book.restore(place, parent)
            last_key, last_place = key, place
        segment.forget_adopted()
        self._note_used()

    def _note_used(self) -> None:
        used = self.used_blocks
        self._segment.set_used(used, used * self._segment.geometry.place_bytes)

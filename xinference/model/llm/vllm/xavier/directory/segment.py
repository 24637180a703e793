"""A replica's segment, seen by the one process that owns it.

Only the owner writes a segment; inside the engine one lock orders the threads that do. Life of a place:

    free --reserve--> being filled --publish--> published --invalidate--> free

``invalidate`` comes before anything may overwrite the bytes, ``publish`` after they are complete.
"""

import mmap
import os
import time
from array import array
from collections.abc import Sequence

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.config import LOCK_WAIT_SECONDS
from xinference.model.llm.vllm.xavier.directory.adoption import AdoptedPlaces, adopt_records
from xinference.model.llm.vllm.xavier.directory.counters import Counters
from xinference.model.llm.vllm.xavier.directory.files import (
    FileLock,
    allocate,
    create_file,
    discard,
    give_name,
    lock_file,
    map_file,
    refuse_open_to_others,
)
from xinference.model.llm.vllm.xavier.directory.geometry import SegmentGeometry
from xinference.model.llm.vllm.xavier.directory.header import read_geometry, write_static
from xinference.model.llm.vllm.xavier.directory.layout import (
    ATTACHED_FIRST,
    COUNTER_BYTES,
    HEADER_BYTES,
    MASK,
    MAX_ATTACHED,
    State,
    Word,
    refuse_unordered_machine,
)
from xinference.model.llm.vllm.xavier.directory.liveness import start_ticks
from xinference.model.llm.vllm.xavier.directory.records import Keys, OwnedRecordTable, words_of
from xinference.model.llm.vllm.xavier.directory.requests import RequestRing
from xinference.model.llm.vllm.xavier.errors import BookImbalance, SegmentRefused

# Plain numbers: looking an enum's member up costs as much as the store.
_USED_PLACES, _USED_BYTES = int(Word.USED_PLACES), int(Word.USED_BYTES)


class SegmentWriter:
    """The owner's side of a segment. Not thread safe: callers hold the engine's lock.

    Made by ``open``. ``adopted`` lists what a predecessor left, ``counters`` and ``requests`` are the other things it writes.
    """

    def __init__(self, path: str, lock: FileLock, mapping: mmap.mmap, geometry: SegmentGeometry) -> None:
        self.path = path
        self.geometry = geometry
        self._lock = lock
        self._mapping = mapping
        self._file = memoryview(mapping)
        self._header = words_of(self._file, 0, HEADER_BYTES)
        self._table = OwnedRecordTable(self._file, geometry)
        self._published = bytearray(geometry.num_places)
        self._order = 0
        self._epoch = 0  # as in the header, which only this object writes; the hot paths need it without a load
        self.adopted = AdoptedPlaces(self._table, array("I"))
        counters = words_of(self._file, geometry.counters_offset, geometry.counters_offset + COUNTER_BYTES)
        ring = words_of(self._file, geometry.requests_offset, geometry.hints_offset)
        cursor = self._header[Word.REQUEST_UPDATES : Word.REQUESTS_WRITTEN + 1]
        self.counters = Counters(counters)
        self.requests = RequestRing(ring, cursor)
        self._views = (self._file, self._header, counters, ring, cursor)

    @classmethod
    def open(cls, path: str, geometry: SegmentGeometry, *, incarnation: int, epoch: int) -> "SegmentWriter":
        """Take over the file that a dead owner left under this name, or make a new one.

        A file of another geometry or layout is removed first: its blocks are of no use, and both may not fit at once.

        Raises:
            SegmentRefused: a live process holds the file's lock or made the file meanwhile, or the file is not ours to touch.
            SharedMemoryFull: there is no room; nothing is left behind.
            PlatformRefused: this machine's memory order is not the one relied on.
        """
        refuse_unordered_machine()
        lock = lock_file(path, LOCK_WAIT_SECONDS)
        if lock is not None:
            try:
                mapping = _map_if_same(lock, path, geometry)
                if mapping is not None:
                    segment = cls(path, lock, mapping, geometry)
                    segment._take(incarnation, epoch, adopting=True)
                    return segment
                _remove(path)
            except BaseException:
                lock.release()
                raise
            lock.release()
        lock, mapping, unfinished = create_file(path, geometry.file_bytes)
        try:
            segment = cls(path, lock, mapping, geometry)
            write_static(segment._header, geometry)
            segment._take(incarnation, epoch, adopting=False)
            give_name(unfinished, path)
        except BaseException:
            discard(lock, unfinished)
            raise
        return segment

    def _take(self, incarnation: int, epoch: int, adopting: bool) -> None:
        header = self._header
        header[Word.STATE] = State.ADOPTING
        header[Word.START_TICKS] = 0  # nobody runs with this pid and start: no moment at which a stranger seems to be the owner
        header[Word.PID] = os.getpid()
        header[Word.INCARNATION] = incarnation
        header[Word.START_TICKS] = start_ticks(os.getpid()) or 0
        self.set_epoch(epoch)
        header[Word.EPOCH_CONFIRMED] = 0
        self.set_attached(())
        self.beat()
        if adopting:
            adoption = adopt_records(self._table, self.geometry.num_places, epoch)
            for place in adoption.places:
                self._published[place] = 1
            self._order = adoption.last_order
            self.adopted = AdoptedPlaces(self._table, adoption.places)
            header[Word.ADOPTIONS] = (header[Word.ADOPTIONS] + 1) & MASK
            self.requests.adopt()
            self.counters.add("adopted_blocks", len(adoption.places))
        self.set_used(len(self.adopted), len(self.adopted) * self.geometry.place_bytes)
        header[Word.STATE] = State.OPEN

    def forget_adopted(self) -> None:
        """Free the list of adopted places: whoever keeps books has entered them."""
        self.adopted = AdoptedPlaces(self._table, array("I"))

    @property
    def epoch(self) -> int:
        """The epoch of everything published from now on, and of everything that ``place_of`` finds."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Start a new epoch: what was published in others is unreachable at once, here and for readers that know of it."""
        self._header[Word.EPOCH] = epoch
        self._epoch = epoch

    def confirm_epoch(self, epoch: int) -> None:
        """Say that this replica holds nothing older than this epoch any more."""
        self._header[Word.EPOCH_CONFIRMED] = epoch

    def set_used(self, blocks: int, num_bytes: int) -> None:
        """What the store's books say, for whoever looks from outside."""
        self._header[_USED_PLACES] = blocks
        self._header[_USED_BYTES] = num_bytes

    def set_attached(self, incarnations: Sequence[int]) -> None:
        """Which peers' segments this replica has mapped, for whoever looks from outside: at most MAX_ATTACHED of them."""
        words = [*incarnations[:MAX_ATTACHED], *[0] * (MAX_ATTACHED - len(incarnations))]
        for index, incarnation in enumerate(words, ATTACHED_FIRST):
            self._header[index] = incarnation

    def beat(self) -> None:
        """Say that the owner's helper thread is alive, in microseconds of CLOCK_MONOTONIC."""
        self._header[Word.HEARTBEAT_US] = time.monotonic_ns() // 1000

    def published(self, place: int) -> bool:
        """Whether the place's record is valid, in whatever epoch."""
        return bool(self._published[place])

    def invalidate(self, place: int) -> None:
        """Withdraw the place at once. Its bytes may be overwritten after this returns, not before."""
        self._table.withdraw(place)
        self._published[place] = 0

    def invalidate_published(self, places: Sequence[int]) -> None:
        """Withdraw those of the places whose record is valid, in whatever epoch."""
        published, withdraw = self._published, self._table.withdraw
        for place in places:
            if published[place]:
                withdraw(place)
                published[place] = 0

    def publish(self, place: int, key: BlockKey, parent: BlockKey | None) -> None:
        """Make the place findable under this key. Its bytes are complete, and no other published place has the key.

        Raises:
            BookImbalance: the place is published already, so readers may be copying what was just overwritten; or ``has_room`` is false.
        """
        if self._published[place]:
            raise BookImbalance(f"place {place} was not withdrawn before it was filled again")
        slot = self._table.free_hint(key.k0, self._epoch)
        if slot is None:
            raise BookImbalance(f"the index has no room for place {place}")
        self._order += 1
        self._table.fill(place, key, parent, self._epoch, self._order)
        self._published[place] = 1
        self._table.put_hint(slot, place, key.k0)

    def has_room(self, key: BlockKey) -> bool:
        """Whether the key's line of the index has a free word: if not, the block cannot be published (one in 100,000 of a full slab)."""
        return self._table.free_hint(key[0], self._epoch) is not None

    def place_of(self, key: BlockKey) -> int | None:
        """The place that holds this key's bytes in the present epoch."""
        found = self._table.find(key, self._epoch)
        return None if found is None else found.place

    def key_of(self, place: int) -> BlockKey | None:
        """The key published in this place, or None."""
        record = self._table.record(place)
        return None if record is None else record.key

    def longest_prefix(self, keys: Keys, start: int, stop: int) -> int:
        """End of the longest run of keys from ``start`` that are published here in the present epoch, at most ``stop``."""
        return self._table.longest_prefix(keys, start, stop, self._epoch)

    def first_present(self, keys: Sequence[BlockKey], start: int, stop: int) -> int:
        """Index of the first key from ``start`` that is published here in the present epoch, or ``stop``."""
        return self._table.first_present(keys, start, stop, self._epoch)

    def slab_view(self) -> memoryview:
        """All places' bytes, writable; place p begins at p * place_bytes. It keeps the mapping alive."""
        start = self.geometry.slab_offset
        return self._file[start : start + self.geometry.slab_bytes]

    def close(self, unlink: bool = False) -> None:
        """Let the file go, for a successor to adopt, or remove it. A second call does nothing.

        From here on every other verb raises ValueError: a late store would damage what the successor owns. Whoever still writes into
        ``slab_view`` must have stopped before.
        """
        if not self._lock.held:
            return
        self._header[Word.STATE] = State.CLOSED
        if unlink and self._lock.same_file(self.path):
            os.unlink(self.path)
        self._table.release()
        for view in self._views:
            view.release()
        try:
            self._mapping.close()
        except BufferError:  # somebody holds a view of the slab: the mapping goes with it
            pass
        self._lock.release()


def _map_if_same(lock: FileLock, path: str, geometry: SegmentGeometry) -> mmap.mmap | None:
    """The locked file, mapped, if it is a segment of exactly this geometry that nobody else could write to."""
    with lock.reopen(path) as file:
        status = os.fstat(file.fileno())
        try:
            refuse_open_to_others(path, status)
            found = read_geometry(file.fileno(), path)
        except SegmentRefused:
            return None
        if found != geometry:
            return None
        if status.st_blocks * 512 < status.st_size:
            allocate(file.fileno(), geometry.file_bytes, path)
        return map_file(file.fileno(), geometry.file_bytes, path)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        raise SegmentRefused(f"{path} is of no use and cannot be removed: {error.strerror}", permanent=True) from None

"""Records and hints of one segment: how a key is found, published and withdrawn. Scalar words only, so the GIL is never dropped.

Publish (after the bytes are in place): key, epoch and parent, then the check word - from here on the record is valid - then the hint.
Withdraw: the generation, one store that makes the record invalid and every copy in flight fail its second look; then the hint.
A reader trusts a record whose check word fits, copies, and accepts the copy if the generation is still the same.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory.geometry import SegmentGeometry
from xinference.model.llm.vllm.xavier.directory.layout import LINE, LINE_BYTES, LINE_WORDS, MASK, WORD_BYTES, record_check

K0, K1, GENERATION, CHECK, EPOCH, PARENT0, PARENT1, FLAGS = range(LINE_WORDS)
_LOW = 0xFFFFFFFF
_ZEROS = memoryview(bytes(1 << 16))

Keys = Sequence[BlockKey] | Callable[[int], BlockKey]


class Found(NamedTuple):
    """Where a block's bytes are, and the generation for which that is true."""

    place: int
    generation: int


class Record(NamedTuple):
    """A valid record's content. ``order`` grows with every publish."""

    key: BlockKey
    parent: BlockKey | None
    generation: int
    epoch: int
    order: int


class RecordTable:
    """The reader's view of one segment's records and hints.

    Args:
        file: a view of the whole segment, bytes.
        geometry: where the regions lie.
    """

    def __init__(self, file: memoryview, geometry: SegmentGeometry) -> None:
        self._file = file
        self._num_places = geometry.num_places
        self._num_buckets = geometry.num_buckets
        self._hints_offset = geometry.hints_offset
        self._records_offset = geometry.records_offset
        end = geometry.records_offset + geometry.num_places * LINE_BYTES
        self._hints = file[geometry.hints_offset : geometry.records_offset].cast("Q")
        self._records = file[geometry.records_offset : end].cast("Q")
        self.rejected = 0  # records with the wanted key that did not validate: being written, torn, or of another epoch

    def find(self, key: BlockKey, epoch: int) -> Found | None:
        """The place that holds this key's bytes, if its record is valid and of this epoch."""
        k0, k1 = key
        tag = k0 >> 32
        for hint in LINE.unpack_from(self._file, self._hints_offset + k0 % self._num_buckets * LINE_BYTES):
            if hint >> 32 != tag:
                continue
            place = (hint & _LOW) - 1
            if not 0 <= place < self._num_places:
                continue
            r0, r1, generation, check, written, p0, p1, flags = LINE.unpack_from(self._file, self._records_offset + place * LINE_BYTES)
            if r0 != k0 or r1 != k1:
                continue
            if written == epoch and check == record_check(place, k0, k1, generation, epoch, p0, p1, flags):
                return Found(place, generation)
            self.rejected += 1
        return None

    def still(self, place: int, generation: int) -> bool:
        """Whether the place was not withdrawn since ``find``: to be asked after the bytes were copied."""
        return bool(self._records[place * LINE_WORDS + GENERATION] == generation)

    def longest_prefix(self, keys: Keys, start: int, stop: int, epoch: int) -> int:
        """End of the longest run of keys from ``start`` that are present, at most ``stop``.

        Stored chains have no gaps, so this gallops and then searches in halves: some 2 log n probes. With a gap it returns a boundary,
        not always the first one, so whoever takes the blocks looks at each.
        """
        at: Callable[[int], BlockKey] = keys if callable(keys) else keys.__getitem__
        find = self.find
        low, step = start, 1  # keys[start:low] are present
        while low < stop:
            probe = min(low + step, stop) - 1
            if find(at(probe), epoch) is None:
                stop = probe
                break
            low, step = probe + 1, step * 2
        while low < stop:  # keys[stop] is absent
            middle = (low + stop) // 2
            if find(at(middle), epoch) is None:
                stop = middle
            else:
                low = middle + 1
        return low

    def first_present(self, keys: Sequence[BlockKey], start: int, stop: int, epoch: int) -> int:
        """Index of the first key from ``start`` that is present, or ``stop``: for keys of which nearly all are absent."""
        unpack, file, offset, buckets = LINE.unpack_from, self._file, self._hints_offset, self._num_buckets
        for index in range(start, stop):
            k0 = keys[index][0]
            tag = k0 >> 32
            for hint in unpack(file, offset + k0 % buckets * LINE_BYTES):
                if hint >> 32 == tag and self.find(keys[index], epoch) is not None:
                    return index
        return stop

    def record(self, place: int) -> Record | None:
        """What the place's record says, or None if it is not valid."""
        k0, k1, generation, check, epoch, p0, p1, flags = LINE.unpack_from(self._file, self._records_offset + place * LINE_BYTES)
        if check != record_check(place, k0, k1, generation, epoch, p0, p1, flags):
            return None
        return Record(BlockKey(k0, k1), BlockKey(p0, p1) if flags & 1 else None, generation, epoch, flags >> 1)

    def key(self, place: int) -> BlockKey:
        """The key in the place's record, valid or not."""
        return BlockKey(self._records[place * LINE_WORDS + K0], self._records[place * LINE_WORDS + K1])

    def all_words(self) -> Iterator[tuple[int, ...]]:
        """The eight words of every record in turn, as they are when their turn comes."""
        return LINE.iter_unpack(self._file[self._records_offset : self._records_offset + self._num_places * LINE_BYTES])

    def generation(self, place: int) -> int:
        """The place's present generation."""
        return int(self._records[place * LINE_WORDS + GENERATION])

    def release(self) -> None:
        """Let the views go; the table is of no use afterwards."""
        self._hints.release()
        self._records.release()


class OwnedRecordTable(RecordTable):
    """The owner's view: the same, and the stores."""

    def withdraw(self, place: int) -> None:
        """Make the place's record invalid; from here on its bytes may be overwritten."""
        base = place * LINE_WORDS
        self._records[base + GENERATION] = (self._records[base + GENERATION] + 1) & MASK
        self.drop_hint(place, self._records[base + K0])

    def fill(self, place: int, key: BlockKey, parent: BlockKey | None, epoch: int, order: int) -> None:
        """Make the place's record valid. The bytes are in place and the place was withdrawn before they were written."""
        base = place * LINE_WORDS
        records = self._records
        k0, k1 = key
        p0, p1 = parent or (0, 0)
        flags = (order << 1 | (parent is not None)) & MASK
        records[base + K0] = k0
        records[base + K1] = k1
        records[base + EPOCH] = epoch
        records[base + PARENT0] = p0
        records[base + PARENT1] = p1
        records[base + FLAGS] = flags
        records[base + CHECK] = record_check(place, k0, k1, records[base + GENERATION], epoch, p0, p1, flags)

    def free_hint(self, k0: int, epoch: int) -> int | None:
        """A free word on the line of a key with this first half, or None if the line is full: it holds eight blocks, one on average."""
        base = k0 % self._num_buckets * LINE_WORDS
        hints = self._hints
        for slot in range(base, base + LINE_WORDS):
            if hints[slot] == 0:
                return slot
        for slot in range(base, base + LINE_WORDS):  # a clear leaves its hints behind: they lead to records of another epoch
            place = (hints[slot] & _LOW) - 1
            if not 0 <= place < self._num_places or self._records[place * LINE_WORDS + EPOCH] != epoch:
                return slot
        return None

    def put_hint(self, slot: int, place: int, k0: int) -> None:
        """Make the place findable, by a word that ``free_hint`` gave."""
        self._hints[slot] = (k0 >> 32) << 32 | (place + 1)

    def drop_hint(self, place: int, k0: int) -> None:
        """Remove the place's hint, if it is there."""
        base = k0 % self._num_buckets * LINE_WORDS
        word = (k0 >> 32) << 32 | (place + 1)
        hints = self._hints
        for slot in range(base, base + LINE_WORDS):
            if hints[slot] == word:
                hints[slot] = 0
                return

    def clear_hints(self) -> None:
        """Empty the index: until it is filled again readers get misses."""
        end = self._hints_offset + self._num_buckets * LINE_BYTES
        for start in range(self._hints_offset, end, len(_ZEROS)):
            stop = min(start + len(_ZEROS), end)
            self._file[start:stop] = _ZEROS[: stop - start]


def words_of(file: memoryview, start: int, stop: int) -> memoryview:
    """A region of the segment as u64 words; both bounds in bytes."""
    if start % WORD_BYTES or stop % WORD_BYTES:
        raise ValueError(f"words lie on multiples of {WORD_BYTES} bytes: {start}..{stop}")
    return file[start:stop].cast("Q")

"""Every order in which a reader's loads can fall between an owner's stores, played through word by word.

The owner's stores are recorded from the real code while it replaces the block in a place; then the real reader runs once for each way to
spread its loads over them. A reader that accepts bytes which are not the block it asked for has read wrong. With any one rule taken away
some order reads wrong: so each rule is needed, and these tests would notice if the code lost it.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory import records as records_module
from xinference.model.llm.vllm.xavier.directory.layout import LINE_WORDS
from xinference.model.llm.vllm.xavier.directory.records import CHECK, GENERATION, Found, OwnedRecordTable, RecordTable
from xinference.model.llm.vllm.xavier.test.segments import content, fill, key, open_segment, small

GEOMETRY = small(num_places=2, place_bytes=64)
PLACE = 1
OLD, NEW = key(1), key(2)
EPOCH = 1
WORD = Struct("@Q")
Store = tuple[int, int]  # byte offset in the file, u64 value
Replace = Callable[["Owner"], None]


class Recording:
    """A view of words that notes each store before it makes it."""

    def __init__(self, words: memoryview, start: int, stores: list[Store]) -> None:
        self._words, self._start, self._stores = words, start, stores

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._stores.append((self._start + index * 8, value))
        self._words[index] = value


class Owner(OwnedRecordTable):
    """The owner's real code, over recorded words."""

    def __init__(self, file: bytearray, stores: list[Store]) -> None:
        super().__init__(memoryview(file), GEOMETRY)
        self._hints = Recording(self._hints, GEOMETRY.hints_offset, stores)  # type: ignore[assignment]
        self._records = Recording(self._records, GEOMETRY.records_offset, stores)  # type: ignore[assignment]
        self._slab = Recording(memoryview(file)[GEOMETRY.slab_offset :].cast("Q"), GEOMETRY.slab_offset, stores)

    def write_bytes(self) -> None:
        """The new block's bytes: of each half of the place only the first two words, which tell one block from another."""
        words = memoryview(content(NEW, 64)).cast("Q")
        for index in (0, 1, 4, 5):
            self._slab[PLACE * 8 + index] = words[index]

    def publish(self) -> None:
        self.fill(PLACE, NEW, OLD, EPOCH, order=2)
        slot = self.free_hint(NEW.k0, EPOCH)
        assert slot is not None
        self.put_hint(slot, PLACE, NEW.k0)


def by_the_rules(owner: Owner) -> None:
    owner.withdraw(PLACE)
    owner.write_bytes()
    owner.publish()


def withdrawn_after_the_bytes(owner: Owner) -> None:
    owner.write_bytes()
    owner.withdraw(PLACE)
    owner.publish()


def published_before_the_bytes(owner: Owner) -> None:
    owner.withdraw(PLACE)
    owner.publish()
    owner.write_bytes()


def generation_kept(owner: Owner) -> None:
    owner.drop_hint(PLACE, OLD.k0)
    owner.write_bytes()
    owner.publish()


def check_stored_first(owner: Owner) -> None:
    """The check word before the words that it commits to, and before the bytes."""
    stores: list[Store] = []
    shadow = Owner(bytearray(owner._file), stores)
    by_the_rules(shadow)
    owner.withdraw(PLACE)
    owner._records[PLACE * LINE_WORDS + CHECK] = dict(stores)[GEOMETRY.records_offset + (PLACE * LINE_WORDS + CHECK) * 8]
    owner.publish()
    owner.write_bytes()


class Reader(RecordTable):
    """The reader's real code; each of its loads first lets some of the owner's stores happen."""

    def __init__(self, file: bytearray, tick: Callable[[], None]) -> None:
        super().__init__(memoryview(file), GEOMETRY)
        self.tick = tick

    def copy(self, place: int) -> bytes:
        """The telling words of both halves of the place, with time between them."""
        start = GEOMETRY.slab_offset + place * 64
        self.tick()
        first = bytes(self._file[start : start + 16])
        self.tick()
        return first + bytes(self._file[start + 32 : start + 48])

    def still(self, place: int, generation: int) -> bool:
        self.tick()
        return super().still(place, generation)


class IgnoresChecks(Reader):
    def find(self, key: BlockKey, epoch: int) -> Found | None:
        for hint in records_module.LINE.unpack_from(self._file, self._hints_offset + key.k0 % self._num_buckets * 64):
            place = (hint & 0xFFFFFFFF) - 1
            if hint >> 32 == key.k0 >> 32 and place >= 0:
                words = records_module.LINE.unpack_from(self._file, self._records_offset + place * 64)
                if words[:2] == key:
                    return Found(place, words[GENERATION])
        return None


class LooksOnce(Reader):
    def still(self, place: int, generation: int) -> bool:
        return True


class LooksAgainBeforeTheCopy(Reader):
    def copy(self, place: int) -> bytes:
        generation = self.generation(place)
        raw = super().copy(place)
        self._seen = generation
        return raw

    def still(self, place: int, generation: int) -> bool:
        return self._seen == generation


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A segment with OLD in the place."""
    segment = open_segment(tmp_path_factory.mktemp("image"), GEOMETRY)
    fill(segment, PLACE, OLD)
    segment.close()
    return Path(segment.path).read_bytes()


def stores_of(image: bytes, replace: Replace) -> list[Store]:
    stores: list[Store] = []
    replace(Owner(bytearray(image), stores))
    return stores


def read_wrong(image: bytes, stores: list[Store], reader: type[Reader], wanted: BlockKey, pauses: Iterator[int]) -> bool:
    """Whether a reader accepts other bytes than those of the block it wanted, with so many stores before each of its loads."""
    file = bytearray(image)
    pending = iter(stores)

    def tick() -> None:
        for offset, value in itertools.islice(pending, next(pauses, 0)):
            file[offset : offset + 8] = WORD.pack(value)

    class Line:
        """Loads a line word by word, as another core may see it."""

        def unpack_from(self, view: memoryview, offset: int) -> tuple[int, ...]:
            words = []
            for index in range(LINE_WORDS):
                if index in (0, 4) or offset >= GEOMETRY.records_offset:
                    tick()
                words.append(WORD.unpack_from(view, offset + index * 8)[0])
            return tuple(words)

    table = reader(file, tick)
    real, records_module.LINE = records_module.LINE, Line()  # type: ignore[assignment]
    try:
        found = table.find(wanted, EPOCH)
        if found is None:
            return False
        raw = table.copy(found.place)
        return table.still(*found) and raw != content(wanted, 32)
    finally:
        records_module.LINE = real


def pauses_around(num_stores: int, num_loads: int = 13) -> Iterator[list[int]]:
    """All ways to let the stores happen in at most three bursts between the reader's loads."""
    for cuts in itertools.combinations_with_replacement(range(num_loads + 1), 3):
        for first in range(num_stores + 1):
            for second in range(num_stores + 1 - first):
                pauses = [0] * (num_loads + 1)
                pauses[cuts[0]] += first
                pauses[cuts[1]] += second
                pauses[cuts[2]] += num_stores - first - second
                yield pauses


def any_order_reads_wrong(image: bytes, replace: Replace, reader: type[Reader]) -> bool:
    stores = stores_of(image, replace)
    return any(read_wrong(image, stores, reader, wanted, iter(pauses)) for wanted in (OLD, NEW) for pauses in pauses_around(len(stores)))


@settings(max_examples=2000, deadline=None)
@given(st.sampled_from([OLD, NEW]), st.lists(st.integers(0, 6), max_size=15))
def test_no_order_of_loads_and_stores_reads_wrong(image: bytes, wanted: BlockKey, pauses: list[int]) -> None:
    assert not read_wrong(image, stores_of(image, by_the_rules), Reader, wanted, iter(pauses))


def test_no_order_in_three_bursts_reads_wrong(image: bytes) -> None:
    assert not any_order_reads_wrong(image, by_the_rules, Reader)


@pytest.mark.parametrize("replace", [withdrawn_after_the_bytes, published_before_the_bytes, generation_kept, check_stored_first])
def test_an_owner_that_leaves_out_one_rule_makes_some_order_read_wrong(image: bytes, replace: Replace) -> None:
    assert any_order_reads_wrong(image, replace, Reader)


@pytest.mark.parametrize("reader", [IgnoresChecks, LooksOnce, LooksAgainBeforeTheCopy])
def test_a_reader_that_leaves_out_one_rule_reads_wrong_in_some_order(image: bytes, reader: type[Reader]) -> None:
    assert any_order_reads_wrong(image, by_the_rules, reader)


def test_the_owner_stores_whole_words_in_the_order_that_readers_rely_on(image: bytes) -> None:
    stores = stores_of(image, by_the_rules)
    record, slab = GEOMETRY.records_offset + PLACE * 64, GEOMETRY.slab_offset
    kinds = []
    for offset, _ in stores:
        if offset >= slab:
            kinds.append("bytes")
        elif offset >= GEOMETRY.records_offset:
            kinds.append({GENERATION: "generation", CHECK: "check"}.get((offset - record) // 8, "record"))
        else:
            kinds.append("hint")
    assert [kind for kind, _ in itertools.groupby(kinds)] == ["generation", "hint", "bytes", "record", "check", "hint"]
    assert all(offset % 8 == 0 for offset, _ in stores)

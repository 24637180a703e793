"""Readers of control page, ring of records and header, with the writer's stores falling between any two of their loads.

The writer's stores are the images that moments.py takes of its real code. The real reader runs one instruction at a time over a file that
moves on to a later image in between: in one leap of every length at every instruction, and in many random leaps.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xinference.model.llm.vllm.xavier.directory import requests as requests_module
from xinference.model.llm.vllm.xavier.directory.control import ControlPageReader, ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.layout import Word
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import RECORD_WORDS, RequestEntry
from xinference.model.llm.vllm.xavier.errors import ControlPageRefused, SegmentRefused
from xinference.model.llm.vllm.xavier.test.moments import Moments, each_instruction
from xinference.model.llm.vllm.xavier.test.segments import SEGMENT_NAME, open_segment, small

WORD = Struct("@Q")


class Film:
    """A file that shows one image after another.

    Args:
        path: the file, of which mappings may exist.
        images: what it shows.
    """

    def __init__(self, path: Path, images: Sequence[bytes]) -> None:
        self.path, self.images = path, images
        path.write_bytes(images[0])
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 (for as long as the test)
        self._shown = 0
        self._leaps: dict[int, int] = {}
        self.instructions = 0

    def show(self, number: int) -> None:
        """Change what differs, in place."""
        old, new = self.images[self._shown], self.images[number]
        for start in range(0, len(new), 4096):
            if old[start : start + 4096] != new[start : start + 4096]:
                self._file.seek(start)
                self._file.write(new[start : start + 4096])
        self._shown = number

    def tick(self) -> None:
        """The reader is between two instructions."""
        leap = self._leaps.get(self.instructions)
        self.instructions += 1
        if leap:
            self.show(min(self._shown + leap, len(self.images) - 1))

    def play(self, first: int, leaps: dict[int, int], read: Callable[[], Any]) -> Any:
        """Run a reader from this image on; ``leaps`` says before which of its instructions the file moves on, and by how many images."""
        self.show(first)
        self._leaps, self.instructions = leaps, 0
        return each_instruction(self.tick, read)

    def one_leap(self, read: Callable[[], Any]) -> Iterator[tuple[int, dict[int, int]]]:
        """Every first image, every instruction of the reader, every leap."""
        self.play(0, {}, read)
        for instruction in range(self.instructions):
            for first in range(len(self.images)):
                for leap in range(1, len(self.images) - first):
                    yield first, {instruction: leap}


LEAPS = st.dictionaries(st.integers(0, 250), st.integers(1, 6), max_size=6)

# ---- control page

STATES = [ControlState(epoch, (PeerEntry("w", "m", epoch),), epoch == 3) for epoch in range(4)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Film:
    path = tmp_path_factory.mktemp("page") / "page"
    writer = ControlPageWriter.create(str(path), STATES[0])
    moments = Moments(path)
    moments.run(lambda: [writer.write(state) for state in STATES[1:]])
    writer.close()
    return Film(path, moments.images)


def poll_wrong(film: Film, first: int, leaps: dict[int, int]) -> str | None:
    """What is wrong with what a reader sees that opened the page at its first image, polls at another, and is overtaken."""
    film.show(0)
    reader = ControlPageReader.open(str(film.path))
    before = reader.state
    try:
        seen = film.play(first, leaps, reader.poll)
    except ControlPageRefused as refusal:
        return str(refusal)
    if seen is not None and (seen not in STATES or seen.epoch <= before.epoch or reader.state != seen):
        return f"{seen} after {before}"
    film.show(len(film.images) - 1)
    reader.poll()
    return None if reader.state == STATES[-1] else f"the last state was missed: {reader.state}"


def test_no_leap_during_a_poll_shows_anything_but_whole_states_in_order(page: Film) -> None:
    opened = ControlPageReader.open(str(page.path))
    leaps = list(page.one_leap(opened.poll))
    assert len(leaps) > 1000
    assert [(first, leap, wrong) for first, leap in leaps if (wrong := poll_wrong(page, first, leap))] == []


@settings(max_examples=300)
@given(first=st.integers(0, 12), leaps=LEAPS)
def test_no_leaps_during_a_poll_show_anything_but_whole_states_in_order(page: Film, first: int, leaps: dict[int, int]) -> None:
    assert poll_wrong(page, min(first, len(page.images) - 1), leaps) is None


def test_a_poll_without_its_second_look_at_the_number_calls_some_race_corrupt(page: Film, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a state overwritten during the copy would count as a damaged page."""

    class Same(int):
        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = int.__hash__

    class Words:
        def __init__(self, words: memoryview) -> None:
            self._words = words

        def __getitem__(self, index: int) -> int:
            return Same(self._words[index])

    real = ControlPageReader.__init__

    def init(self: ControlPageReader, *arguments: Any) -> None:
        real(self, *arguments)
        self._words = Words(self._words)  # type: ignore[assignment]

    monkeypatch.setattr(ControlPageReader, "__init__", init)
    opened = ControlPageReader.open(str(page.path))
    assert any(poll_wrong(page, first, leap) for first, leap in page.one_leap(opened.poll))


# ---- accounting records

ENTRIES = [RequestEntry(bytes([number]) * 16, "running", number, (number,) * 8, *(number,) * 9) for number in range(1, 4)]
ENTRIES += [RequestEntry(b"\1" * 16, "finished", 9, (9,) * 8, *(9,) * 9), RequestEntry(b"\1" * 16, "aborted", 8, (8,) * 8, *(8,) * 9)]


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Film:
    directory = tmp_path_factory.mktemp("ring")
    segment = open_segment(directory, small(request_records=2))
    moments = Moments(segment.path)

    def work() -> None:
        slot = 0
        for entry in ENTRIES[:3]:
            slot = segment.requests.write(entry)
        for entry in ENTRIES[3:]:
            slot = segment.requests.update(slot, entry)

    moments.run(work)
    segment.close()
    return Film(directory / "film", moments.images)


class WordByWord:
    """Loads a record word by word, as another core may see it."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick

    def unpack_from(self, words: memoryview, offset: int) -> tuple[int, ...]:
        values = []
        for index in range(RECORD_WORDS):
            self._tick()
            values.append(words[offset // 8 + index])
        return tuple(values)


def ring_wrong(film: Film, reader: SegmentReader, first: int, leaps: dict[int, int]) -> bool:
    """Whether a reader of the ring gets a record that nobody wrote."""
    listed, update = film.play(first, leaps, lambda: reader.requests_since(0))
    found = film.play(first, leaps, lambda: reader.find_request(b"\1" * 16))
    film.show(len(film.images) - 1)
    later, _ = reader.requests_since(update)
    return any(entry not in ENTRIES for entry in (*listed, *found, *later)) or ENTRIES[-1] not in (*listed, *later)


@pytest.fixture
def word_by_word(ring: Film, monkeypatch: pytest.MonkeyPatch) -> Iterator[SegmentReader]:
    ring.show(0)
    reader = SegmentReader.open(str(ring.path), expected_incarnation=None)
    monkeypatch.setattr(requests_module, "_WORDS", WordByWord(ring.tick))
    yield reader
    monkeypatch.undo()
    reader.close()


def word_leaps(film: Film, reader: SegmentReader) -> Iterator[tuple[int, dict[int, int]]]:
    """One leap between any two words of a record, of each length up to a whole update and then some."""
    film.play(0, {}, lambda: reader.requests_since(0))
    for instruction in range(0, film.instructions, 2):
        for first in range(0, len(film.images), 3):
            for leap in (1, 2, 5, 11, 24, 30, 60):
                yield first, {instruction: leap}


def test_no_leap_during_a_look_at_the_ring_gives_a_record_that_nobody_wrote(ring: Film, word_by_word: SegmentReader) -> None:
    leaps = list(word_leaps(ring, word_by_word))
    assert len(leaps) > 1000
    assert [leap for leap in leaps if ring_wrong(ring, word_by_word, *leap)] == []


def test_without_the_check_word_some_leap_gives_one(ring: Film, word_by_word: SegmentReader, monkeypatch: pytest.MonkeyPatch) -> None:
    class Any64(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    monkeypatch.setattr(requests_module, "_check", lambda values: Any64(1))
    assert any(ring_wrong(ring, word_by_word, *leap) for leap in word_leaps(ring, word_by_word))


# ---- header


@pytest.fixture(scope="module")
def takeover(tmp_path_factory: pytest.TempPathFactory) -> Film:
    """A successor, incarnation 8, takes over from 5, which had the same pid and started at another time."""
    directory = tmp_path_factory.mktemp("takeover")
    segment = open_segment(directory, incarnation=5)
    ticks = segment._header[Word.START_TICKS]
    segment._header[Word.START_TICKS] = ticks + 1
    segment.close()
    moments = Moments(directory / SEGMENT_NAME)
    moments.run(lambda: open_segment(directory, incarnation=8)).close()
    return Film(directory / "film", moments.images)


def attach_wrong(film: Film, first: int, leaps: dict[int, int], expected: int) -> str | None:
    try:
        reader = film.play(first, leaps, lambda: SegmentReader.open(str(film.path), expected_incarnation=expected))
    except SegmentRefused as refusal:
        return "refused for good" if refusal.permanent else None
    try:
        film.show(len(film.images) - 1)
        if expected == 5 and not reader.replaced():
            return "the dead owner's successor counts as the dead one"
        return None if reader.alive() else "the successor does not seem to run"
    finally:
        reader.close()


@pytest.mark.parametrize("expected", [5, 8])
def test_no_leap_while_a_reader_attaches_mistakes_one_owner_for_another(takeover: Film, expected: int) -> None:
    def attach() -> None:
        SegmentReader.open(str(takeover.path), expected_incarnation=5).close()

    leaps = [(first, leap) for first, leap in takeover.one_leap(attach) if min(leap) % 17 == 0 and leap[min(leap)] in (1, 5)]
    assert len(leaps) > 200
    assert [wrong for first, leap in leaps if (wrong := attach_wrong(takeover, first, leap, expected))] == []


def test_no_leap_makes_the_dead_owner_seem_to_run(takeover: Film) -> None:
    takeover.show(0)
    reader = SegmentReader.open(str(takeover.path), expected_incarnation=5)
    for first, leaps in list(takeover.one_leap(reader.alive)):
        alive = takeover.play(first, leaps, reader.alive)
        if alive:  # then it is the successor, as its incarnation tells
            assert reader.replaced()
    reader.close()

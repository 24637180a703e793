"""Guards of keys, records and files that nothing else here would miss: each test is red without one of them."""

import os
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.block import namespace as namespace_module
from xinference.model.llm.vllm.xavier.directory import files, layout, liveness, sweep
from xinference.model.llm.vllm.xavier.directory.layout import LINE, LINE_BYTES, WORD_BYTES, record_check
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.records import CHECK, EPOCH, FLAGS, GENERATION, K0, K1, PARENT0, PARENT1, words_of
from xinference.model.llm.vllm.xavier.errors import SegmentRefused
from xinference.model.llm.vllm.xavier.test.pure.test_block import NAMESPACE
from xinference.model.llm.vllm.xavier.test.segments import SEGMENT_NAME, fill, key, open_segment, small

ALL_ONES = (1 << 64) - 1
WORDS = {"k0": K0, "k1": K1, "generation": GENERATION, "check": CHECK, "epoch": EPOCH, "p0": PARENT0, "p1": PARENT1, "flags": FLAGS}


def patch_record(directory: Path, place: int, words: dict[int, int], num_places: int = 8) -> None:
    """Change words of a record in the file of an owner that is gone."""
    offset = small(num_places).records_offset + place * LINE_BYTES
    fd = os.open(directory / SEGMENT_NAME, os.O_RDWR)
    try:
        for word, value in words.items():
            os.pwrite(fd, value.to_bytes(8, "little"), offset + word * WORD_BYTES)
    finally:
        os.close(fd)


def record_of(directory: Path, place: int) -> list[int]:
    with open(directory / SEGMENT_NAME, "rb") as file:
        return list(LINE.unpack(os.pread(file.fileno(), LINE_BYTES, small().records_offset + place * LINE_BYTES)))


def test_blocks_of_another_meaning_have_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = NAMESPACE.digest()
    monkeypatch.setattr(namespace_module, "SCHEMA_VERSION", namespace_module.SCHEMA_VERSION + 1)
    assert NAMESPACE.digest() != before


@pytest.mark.parametrize("word", WORDS)
def test_a_successor_keeps_no_record_of_which_any_word_was_damaged(tmp_path: Path, word: str) -> None:
    owner = open_segment(tmp_path, small())
    fill(owner, 2, key(1), key(0))
    owner.close()
    patch_record(tmp_path, 2, {WORDS[word]: record_of(tmp_path, 2)[WORDS[word]] ^ 1 << 40})
    successor = open_segment(tmp_path, small(), incarnation=8)
    assert len(successor.adopted) == 0
    assert successor.key_of(2) is None


@pytest.mark.parametrize("word", WORDS)
def test_a_record_of_which_any_word_was_damaged_says_nothing(tmp_path: Path, word: str) -> None:
    owner = open_segment(tmp_path, small())
    fill(owner, 2, key(1), key(0))
    patch_record(tmp_path, 2, {WORDS[word]: record_of(tmp_path, 2)[WORDS[word]] ^ 1 << 40})
    assert owner.key_of(2) is None


def test_a_record_says_nothing_in_another_place(tmp_path: Path) -> None:
    owner = open_segment(tmp_path, small())
    fill(owner, 2, key(1))
    patch_record(tmp_path, 5, dict(enumerate(record_of(tmp_path, 2))))
    assert (owner.key_of(2), owner.key_of(5)) == (key(1), None)


def test_a_damaged_generation_does_not_stop_a_successor(tmp_path: Path) -> None:
    owner = open_segment(tmp_path, small())
    fill(owner, 2, key(1))
    owner.close()
    patch_record(tmp_path, 2, {GENERATION: ALL_ONES})
    successor = open_segment(tmp_path, small(), incarnation=8)
    assert len(successor.adopted) == 0
    fill(successor, 2, key(3))
    assert successor.place_of(key(3)) == 2


def test_a_record_is_not_made_valid_again_by_withdrawing_it(tmp_path: Path) -> None:
    owner = open_segment(tmp_path, small())
    fill(owner, 2, key(1))
    owner.close()
    patch_record(tmp_path, 2, {GENERATION: record_of(tmp_path, 2)[GENERATION] - 1})
    successor = open_segment(tmp_path, small(), incarnation=8)
    assert len(successor.adopted) == 0
    assert successor.key_of(2) is None


def test_the_highest_publish_order_does_not_stop_a_successor(tmp_path: Path) -> None:
    owner = open_segment(tmp_path, small(1))
    fill(owner, 0, key(1))
    owner.close()
    k0, k1 = key(1)
    check = record_check(0, k0, k1, 1, 1, 0, 0, ALL_ONES - 1)
    patch_record(tmp_path, 0, {GENERATION: 1, FLAGS: ALL_ONES - 1, CHECK: check}, num_places=1)
    successor = open_segment(tmp_path, small(1), incarnation=8)
    assert [found.key for found in successor.adopted] == [key(1)]
    fill(successor, 0, key(2))
    assert successor.place_of(key(2)) == 0


@pytest.mark.parametrize("place", [0, 9, 1 << 31], ids=["none", "one behind the last", "far away"])
def test_hints_that_name_no_place_make_room(tmp_path: Path, place: int) -> None:
    geometry = small(8)
    owner = open_segment(tmp_path, geometry)
    line = key(5).k0 % geometry.num_buckets
    fd = os.open(tmp_path / SEGMENT_NAME, os.O_RDWR)
    os.pwrite(fd, (7 << 32 | place).to_bytes(8, "little") * 8, geometry.hints_offset + line * LINE_BYTES)
    os.close(fd)
    assert owner.has_room(key(5))
    fill(owner, 4, key(5))
    assert owner.place_of(key(5)) == 4


def test_other_counters_or_request_records_are_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {layout.layout_word()}
    with monkeypatch.context() as patched:
        patched.setattr(layout, "COUNTERS", layout.COUNTERS[:-1])
        words.add(layout.layout_word())
    with monkeypatch.context() as patched:
        patched.setattr(layout, "ENTRY_FORMAT", f"{layout.ENTRY_FORMAT},more")
        words.add(layout.layout_word())
    assert len(words) == 3


def test_a_pipe_of_a_segments_name_is_neither_read_nor_taken_for_a_file_of_no_use(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SEGMENT_NAME, 0o600)
    with pytest.raises(SegmentRefused, match="not a regular file"):
        open_segment(tmp_path)
    with pytest.raises(SegmentRefused, match="not a regular file"):
        SegmentReader.open(str(tmp_path / SEGMENT_NAME), expected_incarnation=None)
    assert (tmp_path / SEGMENT_NAME).is_fifo()


def test_a_file_that_is_swept_as_it_gets_its_name_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def and_swept(unfinished: str, path: str) -> None:
        link(unfinished, path)
        os.unlink(unfinished)

    monkeypatch.setattr(files.os, "link", and_swept)
    owner = open_segment(tmp_path)
    assert os.listdir(tmp_path) == [SEGMENT_NAME]
    owner.close()


def test_a_file_that_gets_an_owner_while_the_directory_is_swept_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_segment(tmp_path).close()
    found = sweep.stale_files
    owners = []

    def and_then_an_owner(shm_dir: str, now: float, min_age_seconds: float) -> list[sweep.StaleFile]:
        stale = found(shm_dir, now, min_age_seconds)
        owners.append(open_segment(tmp_path, incarnation=8))
        return stale

    monkeypatch.setattr(sweep, "stale_files", and_then_an_owner)
    assert sweep.remove_stale(str(tmp_path), 4e9, 0.0) == []
    assert os.listdir(tmp_path) == [SEGMENT_NAME]


def test_a_successor_waits_for_a_predecessor_that_is_just_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = open_segment(tmp_path)
    fill(owner, 0, key(1))
    monkeypatch.setattr(files.time, "sleep", lambda seconds: owner.close())
    assert len(open_segment(tmp_path, incarnation=8).adopted) == 1


def test_a_command_of_any_name_hides_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stat:
        def __init__(self, path: str) -> None:
            self.path = path

        def read_bytes(self) -> bytes:
            return b"7 (x) Z 1) S " + b" ".join(b"%d" % number for number in range(1, 40))

    monkeypatch.setattr(liveness, "Path", Stat)
    assert liveness.start_ticks(7) == 19


def test_a_successor_has_confirmed_nothing_and_a_list_of_peers_stays_in_its_words(tmp_path: Path) -> None:
    owner = open_segment(tmp_path)
    owner.confirm_epoch(5)
    owner.set_attached(range(1, layout.MAX_ATTACHED + 9))
    behind = layout.ATTACHED_FIRST + layout.MAX_ATTACHED
    assert list(owner._header[behind : behind + 9]) == [0] * 9
    owner.close()
    reader = SegmentReader.open(open_segment(tmp_path, incarnation=8).path, expected_incarnation=8)
    assert reader.header()["epoch_confirmed"] == 0


@pytest.mark.parametrize(("start", "stop"), [(4, 12), (0, 12), (4, 8)])
def test_words_begin_and_end_on_their_multiples(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="multiples"):
        words_of(memoryview(bytearray(32)), start, stop)

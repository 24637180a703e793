"""Guards of adoption, control pages and request records that nothing else here would miss: each test is red without one of them."""

import os
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory import adoption, layout
from xinference.model.llm.vllm.xavier.directory.control import CONTROL_BYTES, ControlPageReader, ControlPageWriter
from xinference.model.llm.vllm.xavier.directory.layout import record_check
from xinference.model.llm.vllm.xavier.directory.records import CHECK, EPOCH, FLAGS, GENERATION, K0, K1
from xinference.model.llm.vllm.xavier.directory.requests import RECORD_WORDS, STATE, RequestEntry, RequestLog, RequestRing, _check
from xinference.model.llm.vllm.xavier.errors import ControlPageRefused, PlatformRefused
from xinference.model.llm.vllm.xavier.test.pure.test_guards_directory import ALL_ONES, patch_record
from xinference.model.llm.vllm.xavier.test.segments import fill, key, open_segment, small

# ---- adoption


def test_of_nine_records_on_one_line_of_the_index_a_successor_keeps_eight(tmp_path: Path) -> None:
    owner = open_segment(tmp_path, small(16))
    for number in range(8):
        fill(owner, number, BlockKey(16 * number + 3, number))
    owner.close()
    k0, k1 = 16 * 8 + 3, 8
    words = {K0: k0, K1: k1, GENERATION: 0, EPOCH: 1, FLAGS: 0, CHECK: record_check(8, k0, k1, 0, 1, 0, 0, 0)}
    patch_record(tmp_path, 8, words, num_places=16)
    successor = open_segment(tmp_path, small(16), incarnation=8)
    assert len(successor.adopted) == 8
    assert successor.key_of(8) is None


def test_blocks_are_adopted_in_the_order_of_their_publishing_however_many_runs_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "_MIN_RUN_RECORDS", 2)
    owner = open_segment(tmp_path, small())
    for number, place in enumerate((5, 0, 3, 1, 4, 2)):
        fill(owner, place, key(number))
    owner.close()
    successor = open_segment(tmp_path, small(), incarnation=8)
    assert [found.key for found in successor.adopted] == [key(number) for number in range(6)]


def test_a_damaged_publish_order_does_not_stop_a_successor(tmp_path: Path) -> None:
    owner = open_segment(tmp_path, small())
    fill(owner, 0, key(1))
    owner.close()
    flags = ALL_ONES - 1
    patch_record(tmp_path, 0, {GENERATION: 1, FLAGS: flags, CHECK: record_check(0, *key(1), 1, 1, 0, 0, flags)})
    successor = open_segment(tmp_path, small(), incarnation=8)
    assert [found.key for found in successor.adopted] == [key(1)]
    fill(successor, 1, key(2))
    assert successor.place_of(key(2)) == 1


# ---- control pages


def test_a_machine_that_reorders_stores_writes_no_control_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout.platform, "machine", lambda: "aarch64")
    with pytest.raises(PlatformRefused):
        ControlPageWriter.create(str(tmp_path / "page"))


def test_a_longer_file_is_no_control_page(tmp_path: Path) -> None:
    page = ControlPageWriter.create(str(tmp_path / "page"))
    with open(tmp_path / "page", "ab") as file:
        file.write(bytes(CONTROL_BYTES))
    with pytest.raises(ControlPageRefused, match="bytes"):
        ControlPageReader.open(str(tmp_path / "page"))
    page.close()


def test_a_writer_removes_only_its_own_page(tmp_path: Path) -> None:
    path = tmp_path / "page"
    first = ControlPageWriter.create(str(path))
    os.unlink(path)
    second = ControlPageWriter.create(str(path))
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


# ---- request records


@pytest.fixture
def ring() -> tuple[RequestRing, RequestLog, memoryview, memoryview]:
    words, cursor = memoryview(bytearray(4 * RECORD_WORDS * 8)).cast("Q"), memoryview(bytearray(16)).cast("Q")
    return RequestRing(words, cursor), RequestLog(words, cursor), words, cursor


Ring = tuple[RequestRing, RequestLog, memoryview, memoryview]


def entry(number: int, **kinds: int) -> RequestEntry:
    return RequestEntry(number.to_bytes(16, "little"), "finished", 10, **kinds)  # type: ignore[arg-type]


def test_a_number_that_does_not_fit_its_word_does_not_raise(ring: Ring) -> None:
    writer, log, _, _ = ring
    writer.write(entry(1, output_tokens=1 << 64))
    writer.write(entry(2))
    assert [found.request for found in log.since(0)[0]][-1:] == [entry(2).request]


def test_a_record_with_a_state_that_nobody_knows_is_skipped(ring: Ring) -> None:
    writer, log, words, _ = ring
    writer.write(entry(1))
    words[STATE] = 99
    words[0] = _check(tuple(words[:RECORD_WORDS]))
    assert log.since(0)[0] == []


def test_a_record_whose_writing_has_not_ended_is_given_the_next_time(ring: Ring) -> None:
    writer, log, _, cursor = ring
    writer.write(entry(1))
    writer.write(entry(2))
    cursor[0] = 1
    found, latest = log.since(0)
    assert ([some.request for some in found], latest) == ([entry(1).request], 1)
    cursor[0] = 2
    found, latest = log.since(latest)
    assert ([some.request for some in found], latest) == ([entry(2).request], 2)


def test_a_record_that_changed_while_it_was_looked_for_is_not_taken(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, log, _, _ = ring
    writer.write(entry(1))
    monkeypatch.setattr(log, "_read", lambda slots: [(number, entry(2)) for number, _ in enumerate(slots)])
    assert log.find(entry(1).request) == []

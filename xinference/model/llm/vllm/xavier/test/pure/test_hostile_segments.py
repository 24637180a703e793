"""Files that a stranger or a broken machine could leave under a segment's name: refused, or read as misses; never a crash."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xinference.model.llm.vllm.xavier.directory import files
from xinference.model.llm.vllm.xavier.directory.layout import HEADER_BYTES, Word, record_check
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.errors import SegmentRefused
from xinference.model.llm.vllm.xavier.test.segments import SEGMENT_NAME, fill, key, open_segment, small

WORDS = st.one_of(st.integers(0, 16), st.integers(0, (1 << 64) - 1), st.sampled_from([1 << 32, 1 << 63, (1 << 64) - 1, (1 << 64) - 4096]))
STATIC = [word for word in Word if word <= Word.STATIC_CHECK]


class Image(bytes):
    """A file's bytes, shown as what they are."""

    def __repr__(self) -> str:
        return "<a good segment>"


@pytest.fixture(scope="module")
def image() -> Iterator[bytes]:
    """A good segment with blocks 0..3 in places 0..3."""
    with tempfile.TemporaryDirectory() as directory:
        segment = open_segment(directory)
        for number in range(4):
            fill(segment, number, key(number), key(number - 1) if number else None)
        segment.close()
        yield Image((Path(directory) / SEGMENT_NAME).read_bytes())


def opened(raw: bytes) -> SegmentReader:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / SEGMENT_NAME
        path.write_bytes(raw)
        return SegmentReader.open(str(path), expected_incarnation=None)


def with_word(raw: bytes, offset: int, value: int) -> bytes:
    return raw[:offset] + value.to_bytes(8, "little") + raw[offset + 8 :]


def look_everywhere(reader: SegmentReader) -> None:
    """Every read a peer or the model actor makes."""
    for number in range(6):
        found = reader.find(key(number), epoch=1)
        if found is not None:
            assert 0 <= found.place < reader.geometry.num_places
            reader.still(*found)
    reader.longest_prefix([key(number) for number in range(6)], 0, 6, epoch=1)
    reader.header()
    reader.counters()
    reader.requests_since(0)
    reader.find_request(bytes(16))
    reader.alive()
    assert len(bytes(reader.slab_view())) == reader.geometry.slab_bytes


def test_the_image_itself_is_good(image: bytes) -> None:
    reader = opened(image)
    assert reader.longest_prefix([key(number) for number in range(6)], 0, 6, epoch=1) == 4
    look_everywhere(reader)


@example(word=Word.PLACE_BYTES, value=128)  # makes a file of the same size
@given(word=st.sampled_from(STATIC), value=WORDS)
def test_any_other_size_count_or_offset_in_the_header_is_refused(image: bytes, word: Word, value: int) -> None:
    damaged = with_word(image, word * 8, value)
    if damaged == image:
        return
    with pytest.raises(SegmentRefused) as refusal:
        opened(damaged)
    assert refusal.value.permanent


def test_what_is_wrong_with_a_header_is_said(image: bytes) -> None:
    for word, value, message in (
        (Word.MAGIC, 1, "is not a segment"),
        (Word.LAYOUT, 1, "has another layout than this version reads"),
        (Word.NUM_PLACES, 0, "has an impossible header: a segment has 1 to 4294967294 places, not 0"),
        (Word.SLAB_OFFSET, 4096, "has an impossible header: slab_offset is 4096, not 12288"),
    ):
        with pytest.raises(SegmentRefused, match=message):
            opened(with_word(image, word * 8, value))


@given(st.lists(st.tuples(st.sampled_from(STATIC[2:]), WORDS), min_size=2, max_size=11))
def test_a_header_with_several_damaged_words_is_refused_or_consistent_with_the_file(image: bytes, changes: list[tuple[Word, int]]) -> None:
    damaged = image
    for word, value in changes:
        damaged = with_word(damaged, word * 8, value)
    if damaged != image:
        with pytest.raises(SegmentRefused):
            opened(damaged)


@given(st.integers(0, 4 * 4096 + 8 * 64))
def test_a_file_of_any_other_length_is_refused(image: bytes, length: int) -> None:
    if length != len(image):
        with pytest.raises(SegmentRefused):
            opened((image + bytes(4096))[:length])


def test_a_file_that_is_one_page_short_or_long_is_refused(image: bytes) -> None:
    for raw in (image[:-4096], image + bytes(4096)):
        with pytest.raises(SegmentRefused, match="but its header says"):
            opened(raw)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_rubbish_is_refused(raw: bytes) -> None:
    with pytest.raises(SegmentRefused):
        opened(raw)


@given(st.data())
def test_damage_anywhere_behind_the_header_is_at_worst_a_miss(image: bytes, data: st.DataObject) -> None:
    damaged = bytearray(image)
    for _ in range(data.draw(st.integers(1, 8))):
        offset = data.draw(st.integers(16 * 8, len(image) - 1))
        damaged[offset] ^= data.draw(st.integers(1, 255))
    look_everywhere(opened(bytes(damaged)))


@given(st.lists(WORDS, min_size=64, max_size=64))
def test_an_index_full_of_rubbish_leads_nowhere(image: bytes, hints: list[int]) -> None:
    geometry = small()
    damaged = image
    for index, hint in enumerate(hints):
        damaged = with_word(damaged, geometry.hints_offset + index * 8, hint)
    look_everywhere(opened(damaged))


@given(st.one_of(st.integers(0, 40), st.integers(0, (1 << 32) - 1), st.just((1 << 32) - 1)))
def test_a_hint_with_the_right_tag_that_names_no_place_leads_nowhere(image: bytes, low: int) -> None:
    hint = key(5).k0 >> 32 << 32 | low
    reader = opened(with_word(image, small().hints_offset + key(5).k0 % 8 * 64, hint))
    assert reader.find(key(5), epoch=1) is None


@given(place=st.integers(0, 7), word=st.integers(0, 7), bit=st.integers(0, 63))
def test_one_flipped_bit_in_a_record_makes_it_invalid(image: bytes, place: int, word: int, bit: int) -> None:
    geometry = small()
    offset = geometry.records_offset + place * 64 + word * 8
    value = int.from_bytes(image[offset : offset + 8], "little") ^ 1 << bit
    reader = opened(with_word(image, offset, value))
    for number in range(4):
        found = reader.find(key(number), epoch=1)
        assert (found is None) == (number == place)


def test_a_record_copied_to_another_place_is_invalid_there(image: bytes) -> None:
    geometry = small()
    start = geometry.records_offset
    moved = image[: start + 5 * 64] + image[start : start + 64] + image[start + 6 * 64 :]
    hint = key(0).k0 >> 32 << 32 | 6
    moved = with_word(moved, geometry.hints_offset + key(0).k0 % 8 * 64, hint)
    assert opened(moved).find(key(0), epoch=1) is None


def test_a_record_of_zeros_is_invalid_in_every_place() -> None:
    assert all(record_check(place, 0, 0, 0, 0, 0, 0, 0) for place in range(1000))


@given(st.data())
def test_a_successor_of_a_damaged_segment_keeps_only_what_validates(image: bytes, data: st.DataObject) -> None:
    damaged = bytearray(image)
    for _ in range(data.draw(st.integers(1, 8))):
        offset = data.draw(st.integers(0, small().slab_offset - 1))
        damaged[offset] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / SEGMENT_NAME).write_bytes(damaged)
        segment = open_segment(directory, incarnation=9)
        adopted = list(segment.adopted)
        assert {(place, found) for place, found, _ in adopted} <= {(number, key(number)) for number in range(4)}
        assert all(segment.place_of(found) == place for place, found, _ in adopted)
        fill(segment, 7, key(77))
        assert segment.place_of(key(77)) == 7
        segment.close()


def test_a_sparse_file_is_refused_since_reading_a_hole_can_kill(tmp_path: Path, image: bytes) -> None:
    path = tmp_path / SEGMENT_NAME
    path.write_bytes(image[: small().slab_offset])
    os.truncate(path, len(image))
    if os.stat(path).st_blocks * 512 >= len(image):
        os.truncate(path, 0)
        with open(path, "r+b") as file:
            file.write(image[:4096])
            file.truncate(len(image))
    with pytest.raises(SegmentRefused, match="is sparse"):
        SegmentReader.open(str(path), expected_incarnation=None)


def test_a_successor_gives_a_sparse_file_its_bytes(tmp_path: Path, image: bytes) -> None:
    path = tmp_path / SEGMENT_NAME
    with open(path, "w+b") as file:
        file.write(image[:4096])
        file.truncate(len(image))
    segment = open_segment(tmp_path, incarnation=9)
    status = os.stat(path)
    assert status.st_blocks * 512 >= status.st_size
    segment.close()


def test_directories_links_pipes_and_sockets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "directory")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    for name in ("directory", "pipe", "link", "socket"):
        with pytest.raises(SegmentRefused) as refusal:
            SegmentReader.open(str(tmp_path / name), expected_incarnation=None)
        assert refusal.value.permanent
        with pytest.raises(SegmentRefused):
            SegmentWriter.open(str(tmp_path / name), small(), incarnation=1, epoch=1)


def test_a_link_to_a_good_segment_is_refused(tmp_path: Path, image: bytes) -> None:
    (tmp_path / "good").write_bytes(image)
    (tmp_path / SEGMENT_NAME).symlink_to(tmp_path / "good")
    with pytest.raises(SegmentRefused, match="cannot be opened"):
        SegmentReader.open(str(tmp_path / SEGMENT_NAME), expected_incarnation=None)
    with pytest.raises(SegmentRefused, match="cannot be opened"):
        open_segment(tmp_path)


def test_another_users_file_is_neither_read_nor_adopted(tmp_path: Path, image: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / SEGMENT_NAME
    path.write_bytes(image)
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SegmentRefused, match="belongs to user"):
        SegmentReader.open(str(path), expected_incarnation=None)
    with pytest.raises(SegmentRefused, match="belongs to user"):
        open_segment(tmp_path)
    assert path.read_bytes() == image

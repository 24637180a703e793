"""What may lie in the shared directory, or become of it, without anybody of ours having done so: refused in words, never a crash."""

import errno
import gc
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference.model.llm.vllm.xavier.directory import control, files, names
from xinference.model.llm.vllm.xavier.directory.control import CONTROL_BYTES, ControlPageReader, ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.files import create_file
from xinference.model.llm.vllm.xavier.directory.layout import Word
from xinference.model.llm.vllm.xavier.directory.names import segment_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import RECORD_WORDS, RequestEntry
from xinference.model.llm.vllm.xavier.errors import ControlPageRefused, SegmentRefused, SharedMemoryFull
from xinference.model.llm.vllm.xavier.test.segments import SEGMENT_NAME, fill, key, open_segment

NAMESPACE = "0123456789abcdef"
CHANGING = [word for word in Word if word > Word.STATIC_CHECK]
HUGE = st.one_of(st.integers(0, (1 << 64) - 1), st.sampled_from([0, 1 << 62, 1 << 63, (1 << 64) - 1]))
FAR = 4_102_444_801.0


def read(path: str | Path) -> SegmentReader:
    return SegmentReader.open(str(path), expected_incarnation=None)


def store(path: str | Path, offset: int, value: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(value.to_bytes(8, "little"))


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """A segment with one block whose owner is gone."""
    segment = open_segment(tmp_path)
    fill(segment, 0, key(0))
    segment.requests.write(RequestEntry(b"r" * 16, "finished", 7))
    segment.close()
    return Path(segment.path)


# ---- words that no owner wrote


@given(words=st.dictionaries(st.sampled_from(CHANGING), HUGE, min_size=1))
def test_a_successor_starts_whatever_the_words_of_the_header_say_that_change(
    words: dict[Word, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("words")
    segment = open_segment(directory)
    fill(segment, 0, key(0))
    segment.close()
    for word, value in words.items():
        store(segment.path, word * 8, value)
    reader = read(segment.path)
    for look in (reader.alive, reader.header, reader.attached, lambda: reader.requests_since(0)):
        look()
    successor = open_segment(directory, incarnation=9)
    assert successor.place_of(key(0)) == 0
    slot = successor.requests.write(RequestEntry(b"n" * 16, "running", 5))
    successor.requests.update(slot, RequestEntry(b"n" * 16, "finished", 5))
    (entry,) = read(segment.path).find_request(b"n" * 16)
    assert (entry.state, entry.prompt_tokens) == ("finished", 5)
    assert entry in read(segment.path).requests_since(0)[0]
    assert (successor.counters.value("adopted_blocks"), read(segment.path).owner_incarnation()) == (1, 9)
    assert len(successor.adopted) == 1
    successor.close()


def test_records_of_requests_survive_an_adoption_unless_their_numbers_are_impossible(tmp_path: Path, dead: Path) -> None:
    open_segment(tmp_path, incarnation=8).close()
    assert [entry.prompt_tokens for entry in read(dead).find_request(b"r" * 16)] == [7]
    store(dead, Word.REQUEST_UPDATES * 8, 1 << 63)
    open_segment(tmp_path, incarnation=9).close()
    assert read(dead).find_request(b"r" * 16) == []
    assert read(dead).requests_since(0) == ([], 0)


@given(hints=st.lists(HUGE, min_size=8, max_size=8), line=st.integers(0, 7))
def test_rubbish_in_the_index_of_a_live_owner_costs_hints_and_nothing_else(
    hints: list[int], line: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    segment = open_segment(tmp_path_factory.mktemp("index"))
    for index, hint in enumerate(hints):
        store(segment.path, segment.geometry.hints_offset + line * 64 + index * 8, hint)
    wanted = next(key(number) for number in range(1000) if key(number).k0 % 8 == line)
    if segment.has_room(wanted):
        fill(segment, 1, wanted)
        assert segment.place_of(wanted) == 1
    segment.invalidate(1)
    assert segment.place_of(wanted) is None
    segment.close()


@given(words=st.lists(HUGE, min_size=RECORD_WORDS, max_size=RECORD_WORDS), slot=st.integers(0, 3))
def test_rubbish_in_the_ring_of_records_is_skipped(words: list[int], slot: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    segment = open_segment(tmp_path_factory.mktemp("ring"))
    segment.requests.write(RequestEntry(b"a" * 16, "finished", 1))
    for index, word in enumerate(words):
        store(segment.path, segment.geometry.requests_offset + (slot * RECORD_WORDS + index) * 8, word)
    reader = read(segment.path)
    found = [*reader.requests_since(0)[0], *reader.find_request(b"a" * 16)]
    assert all(entry.request == b"a" * 16 for entry in found)
    assert len(found) == (0 if slot == 0 else 2)
    segment.close()


# ---- control pages

IDS = st.one_of(st.text(max_size=60), st.none(), st.integers(), st.just("w1"), st.sampled_from(["../../etc", "a/b", "a\0b", "a.b", ""]))
NUMBERS = st.one_of(st.integers(-(1 << 70), 1 << 70), st.floats(), st.booleans(), st.none(), st.text(max_size=20))
STATES = st.fixed_dictionaries(
    {"epoch": NUMBERS, "peers": st.lists(st.lists(st.one_of(IDS, NUMBERS), max_size=4), max_size=3), "stopping": NUMBERS}
)


def forged(path: Path, raw: bytes) -> None:
    """A page with this text, whose check is right."""
    writer = ControlPageWriter.create(str(path))
    writer.close(unlink=False)
    start = control._slot(1)
    page = bytearray(path.read_bytes())
    page[start : start + 8] = len(raw).to_bytes(8, "little")
    page[start + 8 : start + 16] = control._check(1, raw).to_bytes(8, "little")
    page[start + 16 : start + 16 + len(raw)] = raw
    path.write_bytes(page)


@given(STATES)
def test_a_forged_state_is_refused_or_names_nothing_but_files_of_ours(wire: dict[str, object]) -> None:
    try:
        state = ControlState.from_wire(json.dumps(wire).encode())
    except ControlPageRefused:
        return
    assert 0 <= state.epoch < 1 << 64
    for peer in state.peers:
        assert 0 <= peer.incarnation < 1 << 64
        path = segment_path("/dev/shm", peer.worker_id, peer.replica_uid, NAMESPACE)
        assert os.path.dirname(path) == "/dev/shm"
        assert names.parse_name(os.path.basename(path)) is not None


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 8000,
        b'{"epoch":Infinity,"peers":[],"stopping":false}',
        b'{"epoch":-1,"peers":[],"stopping":false}',
        b'{"epoch":18446744073709551616,"peers":[],"stopping":false}',
        b'{"epoch":1.5,"peers":[],"stopping":false}',
        b'{"epoch":true,"peers":[],"stopping":false}',
        b'{"epoch":1,"peers":[["..","m","1"]],"stopping":false}',
        b'{"epoch":1,"peers":[["w","a/../../b","1"]],"stopping":false}',
        b'{"epoch":1,"peers":[["w","m","-1"]],"stopping":false}',
        b'{"epoch":1,"peers":[["w","m","10000000000000000"]],"stopping":false}',
        b'{"epoch":1,"peers":[["w","m"]],"stopping":false}',
        b"\xff\xfe",
    ],
)
def test_a_state_that_no_writer_of_ours_makes_is_refused(tmp_path: Path, raw: bytes) -> None:
    forged(tmp_path / "page", raw)
    with pytest.raises(ControlPageRefused, match="no valid state"):
        ControlPageReader.open(str(tmp_path / "page"))


@given(data=st.data())
def test_a_page_damaged_anywhere_is_refused_or_as_it_was(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("page") / "page"
    state = ControlState(3, (PeerEntry("w", "m", 5),))
    ControlPageWriter.create(str(path), state).close(unlink=False)
    page = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        page[data.draw(st.integers(0, CONTROL_BYTES - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(page)
    try:
        assert ControlPageReader.open(str(path)).state == state
    except ControlPageRefused:
        pass


def test_a_page_that_is_damaged_while_it_is_mapped_keeps_its_last_state(tmp_path: Path) -> None:
    writer = ControlPageWriter.create(str(tmp_path / "page"), ControlState(3))
    reader = ControlPageReader.open(str(tmp_path / "page"))
    store(tmp_path / "page", 8, 77)
    for _ in range(2):
        with pytest.raises(ControlPageRefused, match="check of state 77"):
            reader.poll()
    assert reader.state == ControlState(3)
    store(tmp_path / "page", 8, 1)
    writer.write(ControlState(4))
    assert reader.poll() == ControlState(4)


# ---- truncated while mapped


def test_a_segment_truncated_while_it_is_mapped_is_a_miss_and_counts_as_replaced(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    fill(segment, 0, key(0))
    reader = read(segment.path)
    found = reader.find(key(0), 1)
    assert found is not None
    os.truncate(segment.path, 4096)
    assert not reader.whole()
    assert reader.find(key(0), 1) is None
    assert reader.longest_prefix([key(0)], 0, 1, 1) == 0
    assert not reader.still(*found)
    assert not reader.alive()
    assert reader.replaced()
    with pytest.raises(SegmentRefused, match="its header says"):
        read(segment.path)
    reader.close()


def test_a_control_page_truncated_while_it_is_mapped_is_refused_by_both_sides(tmp_path: Path) -> None:
    writer = ControlPageWriter.create(str(tmp_path / "page"), ControlState(3))
    reader = ControlPageReader.open(str(tmp_path / "page"))
    os.truncate(tmp_path / "page", 0)
    with pytest.raises(ControlPageRefused, match="truncated to 0 bytes"):
        reader.poll()
    with pytest.raises(ControlPageRefused, match="relaunch its replica"):
        writer.write(ControlState(4))
    assert reader.state == ControlState(3)


def test_a_segment_truncated_between_its_check_and_its_mapping_is_refused(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = files.mmap.mmap

    def late(fd: int, num_bytes: int, **kinds: int) -> object:
        os.truncate(dead, 4096)
        return real(fd, num_bytes, **kinds)

    monkeypatch.setattr(files.mmap, "mmap", late)
    with pytest.raises(SegmentRefused, match="cannot be mapped") as refusal:
        read(dead)
    assert not refusal.value.permanent


# ---- a directory that does not do what it should


@pytest.mark.parametrize("make", [lambda path: open_segment(path), lambda path: ControlPageWriter.create(str(path / "page"))])
@pytest.mark.parametrize("kind", ["missing", "a file", "a dangling link"])
def test_a_directory_that_is_none_is_refused_in_words(tmp_path: Path, make: Callable[[Path], object], kind: str) -> None:
    directory = tmp_path / "shm"
    if kind == "a file":
        directory.write_bytes(b"")
    elif kind == "a dangling link":
        directory.symlink_to(tmp_path / "nowhere")
    with pytest.raises((SegmentRefused, ControlPageRefused), match=r"cannot be (made|opened).*(No such file|Not a directory)"):
        make(directory)


def test_a_directory_behind_a_link_is_as_good_as_any(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    segment = open_segment(tmp_path / "link")
    fill(segment, 0, key(0))
    assert read(tmp_path / "real" / SEGMENT_NAME).find(key(0), 1) is not None
    segment.close()


CALLS = ["open", "posix_fallocate", "link"]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    def fail(call: str, number: int) -> None:
        real = getattr(files.os, call)

        def broken(*arguments: object, **kinds: object) -> object:
            if call == "open" and not int(arguments[1]) & os.O_CREAT:
                return real(*arguments, **kinds)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(files.os, call, broken)

    return fail


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_for_bytes_inodes_or_names_says_what_is_missing_and_leaves_nothing(
    tmp_path: Path, failing: Callable[[str, int], None], call: str, number: int
) -> None:
    failing(call, number)
    for make in (open_segment, lambda path: ControlPageWriter.create(str(path / "page"))):
        with pytest.raises(SharedMemoryFull, match=r"needs \d+ bytes, but .* has \d+ free and \d+ of \d+ files left"):
            make(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("number", "permanent"), [(errno.EACCES, True), (errno.EROFS, True), (errno.EMFILE, False), (errno.EOPNOTSUPP, True)]
)
def test_a_file_that_cannot_be_made_says_why_and_leaves_nothing(
    tmp_path: Path, failing: Callable[[str, int], None], call: str, number: int, permanent: bool
) -> None:
    failing(call, number)
    with pytest.raises(SegmentRefused, match=os.strerror(number)) as refusal:
        open_segment(tmp_path)
    assert refusal.value.permanent == permanent
    with pytest.raises(ControlPageRefused, match=os.strerror(number)):
        ControlPageWriter.create(str(tmp_path / "page"))
    assert list(tmp_path.iterdir()) == []


def test_memory_that_cannot_be_mapped_says_so_and_leaves_nothing(tmp_path: Path, dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **kinds: object) -> object:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(files.mmap, "mmap", refuse)
    for make in (open_segment, lambda path: open_segment(path / "other"), lambda path: read(dead)):
        (tmp_path / "other").mkdir(exist_ok=True)
        with pytest.raises(SegmentRefused, match="cannot be mapped with"):
            make(tmp_path)
    with pytest.raises(ControlPageRefused, match="cannot be mapped with"):
        ControlPageWriter.create(str(tmp_path / "page"))
    monkeypatch.undo()
    assert list((tmp_path / "other").iterdir()) == []
    assert open_segment(tmp_path, incarnation=9).place_of(key(0)) == 0  # nothing kept its lock, and it is as it was


@pytest.fixture
def no_descriptors() -> Iterator[None]:
    """This process has no free descriptor."""
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, hard))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        yield
    for fd in taken:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_a_free_descriptor_everything_is_refused_for_now_only(tmp_path: Path, dead: Path, no_descriptors: None) -> None:
    for attempt in (read, lambda path: open_segment(path.parent), lambda path: create_file(f"{path}.x", 4096)):
        with pytest.raises(SegmentRefused, match=r"Too many open files") as refusal:
            attempt(dead)
        assert not refusal.value.permanent

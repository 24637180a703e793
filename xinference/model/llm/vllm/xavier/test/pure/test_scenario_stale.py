"""Files that somebody left: which are adopted, replaced, refused, swept or let be, and that sweeping ends with no byte of ours left."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.directory import files, segment, sweep
from xinference.model.llm.vllm.xavier.directory.control import ControlPageReader, ControlPageWriter
from xinference.model.llm.vllm.xavier.directory.files import lock_file
from xinference.model.llm.vllm.xavier.directory.layout import Word
from xinference.model.llm.vllm.xavier.directory.names import control_path, segment_path, unfinished_path, unfinished_paths
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.directory.sweep import remove_segments, remove_stale, stale_files
from xinference.model.llm.vllm.xavier.errors import ControlPageRefused, SegmentRefused
from xinference.model.llm.vllm.xavier.test.segments import SEGMENT_NAME, fill, key, open_segment, small

NAMESPACE = "0123456789abcdef"
FAR = 4_102_444_801.0


def left(directory: Path, worker: str = "w1", replica: str = "m-0", namespace: str = NAMESPACE) -> Path:
    """A segment with one block whose owner is gone."""
    path = segment_path(str(directory), worker, replica, namespace)
    owner = SegmentWriter.open(path, small(), incarnation=1, epoch=1)
    fill(owner, 0, key(0))
    owner.close()
    return Path(path)


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a lock."""
    monkeypatch.setattr(segment, "LOCK_WAIT_SECONDS", 0.0)


# ---- what a start finds under its own name

STALE: dict[str, Callable[[Path], object]] = {
    "another layout": lambda path: patch(path, Word.LAYOUT * 8, b"\1"),
    "another magic": lambda path: patch(path, 0, b"\1"),
    "truncated": lambda path: os.truncate(path, 5000),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, os.path.getsize(path) + 4096),
    "writable by a group": lambda path: path.chmod(0o660),
    "writable by anybody": lambda path: path.chmod(0o602),
}


def patch(path: Path, offset: int, raw: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(raw)


@pytest.mark.parametrize("kind", STALE)
def test_a_file_of_no_use_is_refused_by_readers_and_replaced_at_start(tmp_path: Path, kind: str) -> None:
    path = left(tmp_path)
    STALE[kind](path)
    with pytest.raises(SegmentRefused) as refusal:
        SegmentReader.open(str(path), expected_incarnation=None)
    assert refusal.value.permanent
    owner = SegmentWriter.open(str(path), small(), incarnation=2, epoch=1)
    assert (owner.place_of(key(0)), path.stat().st_mode & 0o777) == (None, 0o600)
    fill(owner, 1, key(1))
    assert SegmentReader.open(str(path), expected_incarnation=2).find(key(1), 1) is not None
    owner.close(unlink=True)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("kind", STALE)
def test_a_file_of_no_use_is_swept_like_any_other(tmp_path: Path, kind: str) -> None:
    path = left(tmp_path)
    STALE[kind](path)
    assert [file.path for file in remove_segments(str(tmp_path), "w1")] == [str(path)]
    assert names_in(tmp_path) == []


def test_a_file_that_others_may_write_to_says_so(tmp_path: Path) -> None:
    path = left(tmp_path)
    path.chmod(0o666)
    with pytest.raises(SegmentRefused, match="can be written by other users: its mode is 0666"):
        SegmentReader.open(str(path), expected_incarnation=None)


def test_a_page_that_others_may_write_to_is_refused_and_replaced(tmp_path: Path) -> None:
    path = control_path(str(tmp_path), "w1", "m-0")
    ControlPageWriter.create(path).close(unlink=False)
    Path(path).chmod(0o606)
    with pytest.raises(ControlPageRefused, match="can be written by other users"):
        ControlPageReader.open(path)
    writer = ControlPageWriter.create(path)
    assert ControlPageReader.open(path).state.epoch == 0
    writer.close()


def test_a_file_of_no_use_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left(tmp_path)
    os.truncate(path, 0)

    def refuse(name: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patched:
        patched.setattr(segment.os, "unlink", refuse)
        with pytest.raises(SegmentRefused, match=r"is of no use and cannot be removed: Operation not permitted"):
            open_segment(tmp_path)
    open_segment(tmp_path).close()  # and it did not stay locked


def test_another_users_file_is_refused_with_what_to_do_and_never_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    path = left(tmp_path)
    raw = path.read_bytes()
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)
    for attempt in (lambda: open_segment(tmp_path), lambda: SegmentReader.open(str(path), expected_incarnation=None)):
        with pytest.raises(SegmentRefused, match="remove it, or use another shm_dir") as refusal:
            attempt()
        assert refusal.value.permanent
    assert remove_segments(str(tmp_path), "w1", "m-0", force=True) == []
    assert remove_stale(str(tmp_path), FAR) == stale_files(str(tmp_path), FAR) == []
    assert path.read_bytes() == raw


def test_two_clusters_with_one_worker_name_on_one_host_keep_off_each_others_files(tmp_path: Path, at_once: None) -> None:
    mine = open_segment(tmp_path)
    page = ControlPageWriter.create(control_path(str(tmp_path), "w1", "m-0"))
    fill(mine, 0, key(0))
    assert remove_segments(str(tmp_path), "w1") == []  # the other cluster's worker starts
    with pytest.raises(SegmentRefused, match="locked by a live process") as refusal:  # and its replica of the same name
        open_segment(tmp_path, incarnation=9)
    assert not refusal.value.permanent
    assert mine.place_of(key(0)) == 0
    page.close()
    mine.close(unlink=True)
    assert names_in(tmp_path) == []


def test_a_relaunch_with_another_model_neither_reads_nor_keeps_what_the_first_left_once_it_is_terminated(tmp_path: Path) -> None:
    first = left(tmp_path)
    other = segment_path(str(tmp_path), "w1", "m-0", "f" * 16)
    owner = SegmentWriter.open(other, small(), incarnation=2, epoch=1)
    assert owner.place_of(key(0)) is None
    owner.close()
    assert {file.path for file in remove_segments(str(tmp_path), "w1", "m-0", force=True)} == {str(first), other}
    assert names_in(tmp_path) == []


# ---- one inode with two names


def test_an_owner_killed_while_its_file_has_two_names_leaves_one_file_that_is_adopted_and_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "unlink", lambda name: None)  # it died before
        owner = open_segment(tmp_path)
    fill(owner, 0, key(0))
    owner.close()
    assert len(names_in(tmp_path)) == 2
    successor = open_segment(tmp_path, incarnation=2)
    assert successor.place_of(key(0)) == 0
    assert remove_segments(str(tmp_path), "w1") == []  # both names are locked
    successor.close()
    assert len(remove_segments(str(tmp_path), "w1")) == 2
    assert names_in(tmp_path) == []


def test_a_hard_link_under_a_peers_name_is_read_only_as_the_start_that_it_is(tmp_path: Path, at_once: None) -> None:
    owner = open_segment(tmp_path, incarnation=5)
    fill(owner, 0, key(0))
    link = segment_path(str(tmp_path), "w1", "m-1", NAMESPACE)
    os.link(owner.path, link)
    with pytest.raises(SegmentRefused, match="belongs to incarnation"):
        SegmentReader.open(link, expected_incarnation=6)
    with pytest.raises(SegmentRefused, match="locked by a live process"):
        SegmentWriter.open(link, small(), incarnation=6, epoch=1)
    assert remove_segments(str(tmp_path), "w1") == []
    assert owner.place_of(key(0)) == 0
    owner.close()


def test_a_name_that_changes_hands_under_the_lock_does_not_give_two_owners_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terminated and launched again at the moment at which a successor of the former launch holds the old file's lock."""
    path = left(tmp_path)
    others: list[SegmentWriter] = []

    def meanwhile(name: str, wait_seconds: float = 0.0) -> object:
        lock = lock_file(name, wait_seconds)
        if lock is not None and not others:
            os.unlink(name)
            others.append(open_segment(tmp_path, incarnation=7))
        return lock

    monkeypatch.setattr(segment, "lock_file", meanwhile)
    late = open_segment(tmp_path, incarnation=6)
    (new,) = others
    fill(late, 3, key(3))
    assert new.place_of(key(3)) is None
    assert SegmentReader.open(str(path), expected_incarnation=7).find(key(3), 1) is None
    late.close(unlink=True)
    assert names_in(tmp_path) == [SEGMENT_NAME]
    new.close()


# ---- what has one of our names and is not ours


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A directory, a pipe, a link and a dangling link under names of worker w1, and names that no parser expects."""
    (tmp_path / f"xinference.w1.directory.{NAMESPACE}.seg").mkdir()
    os.mkfifo(tmp_path / f"xinference.w1.pipe.{NAMESPACE}.seg")
    (tmp_path / f"xinference.w1.link.{NAMESPACE}.seg").symlink_to("/dev/null")
    (tmp_path / "xinference.w1.dangling.ctl").symlink_to("nowhere")
    for name in (b"xinference.w1.\xff\xfe.ctl", b"xinference.w1.m\n.ctl", b"xinference.w1.m-0.ctl ", b"xinference.w1.\xce\xb1.ctl", b"\n"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"")
    return tmp_path


def test_sweeping_leaves_what_has_our_names_and_is_not_ours(strange: Path) -> None:
    before = names_in(strange)
    path = left(strange)
    for replica in ("directory", "pipe", "link", "dangling"):
        assert remove_segments(str(strange), "w1", replica, force=True) == []
    assert [file.path for file in stale_files(str(strange), FAR)] == [str(path)]
    assert [file.path for file in remove_segments(str(strange), "w1", force=True)] == [str(path)]
    assert names_in(strange) == before


@pytest.mark.parametrize("name", ["/dev/null", "/dev/zero", "/dev/tty", "/proc/self/mem", "/"])
def test_devices_are_refused_without_being_read(name: str) -> None:
    for attempt in (
        lambda: SegmentReader.open(name, expected_incarnation=None),
        lambda: SegmentWriter.open(name, small(), incarnation=1, epoch=1),
        lambda: ControlPageReader.open(name),
    ):
        with pytest.raises((SegmentRefused, ControlPageRefused)):
            attempt()


def test_one_file_that_cannot_be_removed_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, other = left(tmp_path, replica="a"), left(tmp_path, replica="b")
    real = os.unlink

    def unlink(path: str) -> None:
        if path == str(stuck):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        real(path)

    monkeypatch.setattr(sweep.os, "unlink", unlink)
    assert [file.path for file in remove_segments(str(tmp_path), "w1")] == [str(other)]
    assert "cannot be removed: Operation not permitted" in caplog.text
    held = lock_file(str(stuck))  # the sweep keeps no lock of what it could not remove
    assert held is not None
    held.release()


@pytest.mark.parametrize("kind", ["a file", "missing"])
def test_a_shared_directory_that_is_none_holds_nothing(tmp_path: Path, kind: str) -> None:
    if kind == "a file":
        (tmp_path / "shm").write_bytes(b"")
    assert remove_segments(str(tmp_path / "shm"), "w1") == stale_files(str(tmp_path / "shm"), FAR) == []


def test_only_unfinished_files_of_exactly_this_name_are_removed_for_it(tmp_path: Path) -> None:
    path = str(tmp_path / SEGMENT_NAME)
    mine = unfinished_path(path)
    endings = (".notes.tmp", ".0123456.tmp", ".01234567.tmp.tmp", ".ABCDEF01.tmp", "x.01234567.tmp")
    others = [path + ending for ending in endings]
    for name in (mine, *others):
        Path(name).write_bytes(b"half")
    assert unfinished_paths(path) == [mine]
    open_segment(tmp_path).close()
    assert {str(tmp_path / name) for name in names_in(tmp_path)} == {path, *others}

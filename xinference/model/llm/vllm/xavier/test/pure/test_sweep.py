import os
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter
from xinference.model.llm.vllm.xavier.directory.names import FileName, control_path, parse_name, segment_path, unfinished_path
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.directory.sweep import Removed, remove_segments, remove_stale, stale_files
from xinference.model.llm.vllm.xavier.test.segments import small

NAMESPACE = "0123456789abcdef"
NOW = 4_102_444_801.0


def dead(directory: Path, worker: str, replica: str) -> str:
    path = segment_path(str(directory), worker, replica, NAMESPACE)
    SegmentWriter.open(path, small(), incarnation=1, epoch=1).close()
    return path


def live(directory: Path, worker: str, replica: str) -> SegmentWriter:
    return SegmentWriter.open(segment_path(str(directory), worker, replica, NAMESPACE), small(), incarnation=1, epoch=1)


def test_names_say_whose_a_file_is() -> None:
    segment = segment_path("/dev/shm", "w-1", "m_0", NAMESPACE)
    assert segment == f"/dev/shm/xinference.w-1.m_0.{NAMESPACE}.seg"
    assert control_path("/dev/shm", "w-1", "m_0") == "/dev/shm/xinference.w-1.m_0.ctl"
    assert parse_name(os.path.basename(segment)) == FileName("w-1", "m_0", NAMESPACE, False)
    assert parse_name("xinference.w-1.m_0.ctl") == FileName("w-1", "m_0", None, False)
    assert parse_name(os.path.basename(unfinished_path(segment))) == FileName("w-1", "m_0", NAMESPACE, True)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "xinference",
        "xinference.w.m.seg",
        "xinference.w.m.0123.seg",
        f"xinference.w.{NAMESPACE}.seg",
        f"xinference.w.m.{NAMESPACE}.seg.bak",
        f"xinference.a.b.c.{NAMESPACE}.seg",
        "xinference.w.m.ctl.x.tmp",
        f"other.w.m.{NAMESPACE}.seg",
        f"xinference.w.m.{NAMESPACE}.seg\n",
    ],
)
def test_files_of_others_are_not_ours(name: str) -> None:
    assert parse_name(name) is None


def test_a_worker_removes_its_dead_files_and_nothing_else(tmp_path: Path) -> None:
    mine = [dead(tmp_path, "w1", "m-0"), dead(tmp_path, "w1", "m-1")]
    page = ControlPageWriter.create(control_path(str(tmp_path), "w1", "m-0"))
    page.close(unlink=False)
    unfinished = unfinished_path(mine[0])
    Path(unfinished).write_bytes(b"half")
    others = [dead(tmp_path, "w10", "m-0"), dead(tmp_path, "w", "m-0"), str(tmp_path / "xinference.w1.notes")]
    Path(others[2]).write_text("mine")
    removed = remove_segments(str(tmp_path), "w1")
    size = small().file_bytes
    assert sorted(removed, key=lambda file: file.path) == sorted(
        [Removed(mine[0], size), Removed(mine[1], size), Removed(page.path, 16384), Removed(unfinished, 4)], key=lambda file: file.path
    )
    assert sorted(str(path) for path in tmp_path.iterdir()) == sorted(others)


def test_one_replicas_files_can_be_removed_alone(tmp_path: Path) -> None:
    mine, other = dead(tmp_path, "w1", "m-0"), dead(tmp_path, "w1", "m-1")
    assert [file.path for file in remove_segments(str(tmp_path), "w1", "m-0")] == [mine]
    assert [str(path) for path in tmp_path.iterdir()] == [other]


def test_a_live_owners_file_stays_unless_the_caller_saw_it_die(tmp_path: Path) -> None:
    segment = live(tmp_path, "w1", "m-0")
    assert remove_segments(str(tmp_path), "w1") == []
    assert [file.path for file in remove_segments(str(tmp_path), "w1", force=True)] == [segment.path]
    assert list(tmp_path.iterdir()) == []
    segment.close(unlink=True)


def test_sweeping_keeps_no_lock(tmp_path: Path) -> None:
    path = dead(tmp_path, "w1", "m-0")
    assert stale_files(str(tmp_path), NOW) != []
    remove_segments(str(tmp_path), "w2")
    SegmentWriter.open(path, small(), incarnation=2, epoch=1).close()


def test_old_files_without_an_owner_are_listed_with_their_age(tmp_path: Path) -> None:
    path = dead(tmp_path, "w1", "m-0")
    live(tmp_path, "w1", "m-1")
    born = max(os.stat(path).st_mtime, os.stat(path).st_ctime)
    assert stale_files(str(tmp_path), born + 3599) == []
    (found,) = stale_files(str(tmp_path), born + 3601)
    assert (found.path, found.num_bytes, found.name.replica_uid) == (path, small().file_bytes, "m-0")
    assert found.age_seconds == pytest.approx(3601)


def test_stale_files_are_removed_on_request(tmp_path: Path) -> None:
    path = dead(tmp_path, "w1", "m-0")
    segment = live(tmp_path, "w2", "m-0")
    assert remove_stale(str(tmp_path), NOW) == [Removed(path, small().file_bytes)]
    assert [str(left) for left in tmp_path.iterdir()] == [segment.path]


def test_a_directory_that_does_not_exist_holds_nothing(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    assert remove_segments(missing, "w1") == []
    assert stale_files(missing, NOW) == []


def test_a_directory_with_one_of_our_names_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"xinference.w1.m-0.{NAMESPACE}.seg").mkdir()
    assert remove_segments(str(tmp_path), "w1") == []

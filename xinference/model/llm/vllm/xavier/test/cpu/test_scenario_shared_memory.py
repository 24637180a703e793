"""Shared memory in real processes: full, out of inodes, read-only, unmappable, truncated under a reader, left by the killed."""

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter, ControlState
from xinference.model.llm.vllm.xavier.directory.names import control_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.sweep import remove_segments
from xinference.model.llm.vllm.xavier.errors import SegmentRefused
from xinference.model.llm.vllm.xavier.test import full_disk, optimised, racing
from xinference.model.llm.vllm.xavier.test.segments import SEGMENT_NAME, content, fill, key, open_segment

SHM = "/dev/shm"
LIMIT_SECONDS = 60.0
PACKAGE = Path(__file__).parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHM, prefix="xavier-test-") as path:
        yield Path(path)


def python(code: str, *arguments: str, **kinds: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kinds)  # type: ignore[call-overload]


# ---- a small tmpfs


def on_small_tmpfs(scenario: str, directory: Path, options: str = "size=1m") -> dict[str, object]:
    """What a scenario of full_disk.py sees on a tmpfs of its own, in a mount namespace of its own."""
    mount = 'mount -t tmpfs -o "$1" tmpfs "$0" && shift && exec "$@"'
    command = [sys.executable, "-m", full_disk.__name__, str(directory), scenario]
    result = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mount, str(directory), options, *command], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_what_finds_no_room_is_refused_with_numbers_and_leaves_nothing(directory: Path) -> None:
    seen = on_small_tmpfs("create", directory)
    for what, num_bytes in (("segment", 16384), ("page", 16384)):
        kind, words = seen[what]
        assert kind == "SharedMemoryFull"
        assert f"needs {num_bytes} bytes, but {directory} has 0 free" in words
    assert seen["left"] == ["filler"]


def test_a_file_system_without_inodes_is_full(directory: Path) -> None:
    seen = on_small_tmpfs("inodes", directory, "size=1m,nr_inodes=8")
    assert [seen[what][0] for what in ("segment", "page")] == ["SharedMemoryFull"] * 2
    assert "0 of 8 files left" in seen["segment"][1]
    assert seen["left"] == 0


def test_a_predecessors_segment_is_adopted_with_no_byte_free_and_one_with_holes_is_refused(directory: Path) -> None:
    seen = on_small_tmpfs("adopt", directory)
    assert (seen["free"], seen["adopted"]) == (0, 0)
    assert seen["sparse"][0] == "SharedMemoryFull"
    assert (seen["reader"][0], "is sparse" in seen["reader"][1]) == ("SegmentRefused", True)


def test_a_successor_with_a_larger_budget_gets_the_room_of_the_file_that_it_replaces(directory: Path) -> None:
    seen = on_small_tmpfs("grow", directory)
    assert seen["grown"] is True
    assert (seen["too large"][0], seen["left"]) == ("SharedMemoryFull", [])


def test_replicas_share_evict_clear_and_are_relaunched_with_no_byte_free(directory: Path) -> None:
    seen = on_small_tmpfs("serve", directory)
    assert (seen["free"], seen["errors"]) == (0, 0)
    assert seen["peer tokens"] > 0
    assert seen["evictions"] > 0
    assert seen["adopted"] > 0
    assert seen["after the clear"] == {"computed": 20}
    assert seen["restored"]["cpu_tier"] == 16


def test_a_read_only_file_system_is_read_and_refused_for_writing(directory: Path) -> None:
    seen = on_small_tmpfs("read_only", directory)
    assert (seen["read"], seen["state"]) == (True, 5)
    assert (seen["owner"][0], seen["new"][0]) == ("SegmentRefused", "ControlPageRefused")
    assert "Read-only file system" in seen["new"][1]


def test_a_process_without_address_space_is_refused_and_leaves_nothing(directory: Path) -> None:
    code = (
        "import resource, sys\n"
        "from xinference.model.llm.vllm.xavier.test.segments import open_segment, small\n"
        "from xinference.model.llm.vllm.xavier.errors import SegmentRefused\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (48 << 20),) * 2)\n"
        "try:\n"
        "    open_segment(sys.argv[1], small(num_places=64, place_bytes=1 << 20))\n"
        "except SegmentRefused as refusal:\n"
        "    print(refusal.permanent, refusal)\n"
    )
    out, err = python(code, str(directory)).communicate(timeout=LIMIT_SECONDS)
    assert out.startswith("False "), err
    assert "cannot be mapped with" in out
    assert list(directory.iterdir()) == []


# ---- truncated under a reader

LOOKER = """
import sys
from xinference.model.llm.vllm.xavier.directory.control import ControlPageReader
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.errors import ControlPageRefused
from xinference.model.llm.vllm.xavier.test.segments import key
reader = SegmentReader.open(sys.argv[1], expected_incarnation=None)
page = ControlPageReader.open(sys.argv[2])
if sys.argv[3] == "careless":
    reader.whole = lambda: True
found = reader.find(key(0), 1)
for line in sys.stdin:
    seen = [reader.find(key(0), 1), reader.longest_prefix([key(0)], 0, 1, 1), reader.still(*found), reader.alive(), reader.replaced()]
    try:
        page.poll()
        seen.append("page")
    except ControlPageRefused as refusal:
        seen.append("truncated" in str(refusal))
    print(found is not None, *seen, flush=True)
"""


@pytest.fixture
def looker(directory: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    started = []

    def start(kind: str) -> "subprocess.Popen[str]":
        segment = open_segment(directory)
        fill(segment, 0, key(0))
        segment.close()
        page = ControlPageWriter.create(control_path(str(directory), "w1", "m-0"), ControlState(3))
        page.close(unlink=False)
        process = python(LOOKER, segment.path, page.path, kind)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_SECONDS)


def look(process: "subprocess.Popen[str]") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("look\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize("num_bytes", [0, 4096, 8192, 12288])
def test_files_truncated_while_they_are_mapped_do_not_kill_who_reads_them(
    directory: Path, looker: Callable[[str], "subprocess.Popen[str]"], num_bytes: int
) -> None:
    process = looker("careful")
    assert look(process) == "True Found(place=0, generation=1) 1 True True False page"
    for path in directory.iterdir():
        os.truncate(path, num_bytes)
    for _ in range(3):
        assert look(process) == "True None 0 False False True True"
    assert process.poll() is None


def test_without_the_look_at_the_size_a_reader_is_killed(directory: Path, looker: Callable[[str], "subprocess.Popen[str]"]) -> None:
    process = looker("careless")
    assert look(process).startswith("True Found")
    os.truncate(directory / SEGMENT_NAME, 0)
    assert look(process) == ""
    assert process.wait(LIMIT_SECONDS) == -signal.SIGBUS


# ---- left by the killed

DYING = """
import os, signal, sys
from xinference.model.llm.vllm.xavier.directory import files, segment
from xinference.model.llm.vllm.xavier.test import racing
def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
at = sys.argv[2]
if at == "unfinished":
    segment.give_name = die
elif at == "allocated":
    files.map_file = die
elif at == "two names":
    files.os.unlink = die
elif at == "adopting":
    segment.adopt_records = die
racing.run_tier(sys.argv[1])
"""


def used_bytes(directory: Path) -> int:
    """Bytes of the files, each inode once."""
    return sum(num_bytes for num_bytes in {s.st_ino: s.st_blocks * 512 for s in map(os.stat, directory.iterdir())}.values())


@pytest.mark.parametrize(
    "order", [("allocated", "unfinished", "serving", "adopting", "serving"), ("two names", "adopting", "adopting", "serving", "adopting")]
)
def test_five_kills_leave_one_file_at_most_and_no_byte_after_the_next_start_of_the_worker(directory: Path, order: tuple[str, ...]) -> None:
    for at in order:
        process = python(DYING, str(directory / SEGMENT_NAME), at)
        assert process.stdout is not None
        if ready := process.stdout.readline():  # it got past the point at which it is to die
            assert json.loads(ready)["wrong"] == 0
            assert at == "serving"
            process.kill()
        process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == -signal.SIGKILL
        assert used_bytes(directory) == racing.geometry().file_bytes
    segment = open_segment(directory, racing.geometry(), incarnation=99, epoch=racing.EPOCH)  # it starts in spite of them
    segment.close()
    assert sum(file.num_bytes > 0 for file in remove_segments(str(directory), "w1")) >= 1
    assert used_bytes(directory) == 0
    assert list(directory.iterdir()) == []


def attach(directory: Path) -> SegmentReader | None:
    try:
        return SegmentReader.open(str(directory / SEGMENT_NAME), expected_incarnation=None)
    except SegmentRefused as refusal:
        if refusal.permanent:
            raise
        return None


def test_owners_that_come_and_go_while_a_reader_attaches_are_never_mistaken_for_each_other(directory: Path) -> None:
    code = (
        "import os, sys\n"
        "from xinference.model.llm.vllm.xavier.test.segments import fill, key, open_segment\n"
        "number, parent = 0, os.getppid()\n"
        "while os.getppid() == parent:\n"  # a test that is killed leaves nobody behind
        "    number += 1\n"
        "    segment = open_segment(sys.argv[1], incarnation=number)\n"
        "    block = key(number % 100)\n"
        "    if segment.place_of(block) is None and segment.has_room(block):\n"
        "        fill(segment, number % 8, block)\n"
        "    segment.close(unlink=number % 50 == 0)\n"
    )
    process = python(code, str(directory))
    try:
        attached = blocks = last = 0
        while attached < 300:
            reader = attach(directory)
            if reader is None:
                continue
            attached += 1
            incarnation = reader.owner_incarnation()
            assert incarnation >= last
            last = incarnation
            slab = reader.slab_view()
            for number in range(100):
                found = reader.find(key(number), 1)
                if found is not None:
                    raw = bytes(slab[found.place * 64 : found.place * 64 + 64])
                    assert not reader.still(*found) or raw == content(key(number), 64)
                    blocks += 1
            slab.release()
            reader.close()
        assert blocks > 0
        assert last > 1
    finally:
        process.kill()
        _, err = process.communicate(timeout=LIMIT_SECONDS)
    assert err == ""


# ---- without asserts


def test_the_life_of_two_replicas_is_the_same_under_python_o(directory: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-O", "-m", optimised.__name__, str(directory)], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert result.returncode == 0, result.stderr
    done = json.loads(result.stdout)
    assert (len(done), done[-1]) == (15, "no hook failed")


def test_nothing_in_the_package_is_left_to_an_assert() -> None:
    """Under -O it would not happen; and what a caller did wrong deserves an error with words."""
    sources = [path for path in PACKAGE.rglob("*.py") if "test" not in path.relative_to(PACKAGE).parts]
    assert len(sources) > 40
    found = [(path.name, node.lineno) for path in sources for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert found == []
    debug = [path.name for path in sources if "__debug__" in path.read_text()]
    assert debug == []

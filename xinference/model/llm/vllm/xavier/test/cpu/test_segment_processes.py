"""Owners and readers in processes of their own: validated reads against a rewriting owner, kills, stops, forks, locks."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.directory.control import ControlPageReader, ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.liveness import start_ticks
from xinference.model.llm.vllm.xavier.directory.names import unfinished_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import RequestEntry
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.directory.sweep import remove_segments
from xinference.model.llm.vllm.xavier.errors import SegmentRefused, SharedMemoryFull
from xinference.model.llm.vllm.xavier.store.tier import CpuTier
from xinference.model.llm.vllm.xavier.test import racing
from xinference.model.llm.vllm.xavier.test.segments import SEGMENT_NAME, fill, key, open_segment, small

SHM = "/dev/shm"
DEADLINE_SECONDS = 30.0
Start = Callable[..., "Process"]


class Process:
    """A role of racing.py in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", racing.__name__, *arguments]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> dict[str, int]:
        """What it says next."""
        assert self.popen.stdout is not None
        return dict(json.loads(self.popen.stdout.readline()))

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait(DEADLINE_SECONDS)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHM, prefix="xavier-test-") as path:
        yield Path(path)


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    """Starts a role on the directory's segment and waits until it is ready."""
    started: list[Process] = []

    def start(role: str, *rest: str) -> Process:
        process = Process(role, str(directory / SEGMENT_NAME), *rest)
        started.append(process)
        return process

    yield start
    for process in started:
        process.end()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


def race(start: Start, order: str, rule: str, enough: int) -> list[dict[str, int]]:
    start("write", order).line()
    readers = [start("read", rule, str(DEADLINE_SECONDS), str(enough)) for _ in range(2)]
    for reader in readers:
        reader.line()
    return [reader.line() for reader in readers]


def test_validated_reads_of_a_rewriting_owner_are_never_wrong(start: Start) -> None:
    for result in race(start, "by_the_rules", "by_the_rules", enough=20_000):
        assert result["wrong"] == 0
        assert result["accepted"] >= 20_000
        assert result["caught"] > 0, "the second look never mattered: the race was not tried"


@pytest.mark.parametrize(
    ("order", "rule"),
    [
        ("withdraw_late", "by_the_rules"),
        ("publish_early", "by_the_rules"),
        ("keep_generation", "by_the_rules"),
        ("by_the_rules", "look_once"),
        ("by_the_rules", "look_before"),
    ],
)
def test_with_one_rule_left_out_a_wrong_read_soon_happens(start: Start, order: str, rule: str) -> None:
    assert any(result["wrong"] for result in race(start, order, rule, enough=1 << 60))


def test_an_owner_killed_anywhere_leaves_only_right_blocks_to_readers_and_successors(start: Start, directory: Path) -> None:
    reader, wrong, kept = None, 0, 0
    for _ in range(25):
        owner = start("tier")
        ready = owner.line()
        assert ready["wrong"] == 0
        kept += ready["kept"]
        if reader is None:
            reader = SegmentReader.open(str(directory / SEGMENT_NAME), expected_incarnation=None)
        stop_at = time.monotonic() + random.uniform(0.0, 0.05)
        while time.monotonic() < stop_at:
            wrong += count_wrong(reader)
        owner.signal(signal.SIGKILL)
        wait_until(lambda seen=reader: not seen.alive())
        wrong += count_wrong(reader)
        owner.end()
    assert wrong == 0
    assert kept > 0


def count_wrong(reader: SegmentReader) -> int:
    """Read every block once, validated."""
    slab, size, wrong = reader.slab_view(), racing.PLACE_BYTES, 0
    for block, expected in racing.CHAIN_CONTENT.items():
        found = reader.find(block, racing.EPOCH)
        if found is not None:
            raw = bytes(slab[found.place * size : (found.place + 1) * size])
            wrong += reader.still(*found) and raw != expected
    return wrong


def test_a_stopped_owner_is_a_source_like_any_other(start: Start, directory: Path) -> None:
    owner = start("tier")
    owner.line()
    reader = SegmentReader.open(str(directory / SEGMENT_NAME), expected_incarnation=None)
    wait_until(lambda: reader.header()["used_places"] == racing.NUM_PLACES)
    readable = 0
    for _ in range(20):
        owner.signal(signal.SIGSTOP)
        wait_until(lambda: b" T " in Path(f"/proc/{owner.popen.pid}/stat").read_bytes())
        assert reader.alive()
        assert count_wrong(reader) == 0
        readable += sum(reader.find(block, racing.EPOCH) is not None for block in racing.CHAIN_CONTENT)
        owner.signal(signal.SIGCONT)
        time.sleep(random.uniform(0.0, 0.003))
    assert readable > 20 * racing.NUM_PLACES // 2


def test_a_dead_owner_that_nobody_reaped_is_dead_and_can_be_adopted(start: Start, directory: Path) -> None:
    owner = start("hold")
    owner.line()
    reader = SegmentReader.open(str(directory / SEGMENT_NAME), expected_incarnation=1)
    assert reader.alive()
    owner.signal(signal.SIGKILL)
    wait_until(lambda: b") Z " in Path(f"/proc/{owner.popen.pid}/stat").read_bytes())
    assert not reader.alive()
    segment = SegmentWriter.open(str(directory / SEGMENT_NAME), racing.geometry(), incarnation=2, epoch=racing.EPOCH)
    assert reader.replaced()
    assert reader.alive()
    segment.close()


def test_a_successor_waits_for_an_owner_that_is_just_ending(start: Start, directory: Path) -> None:
    owner = start("hold")
    owner.line()
    successor = start("hold")
    assert owner.popen.stdin is not None
    owner.popen.stdin.close()
    assert successor.line()["adopted"] == 0


def test_of_two_successors_one_gets_the_segment(start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xinference.model.llm.vllm.xavier.directory.segment.LOCK_WAIT_SECONDS", 0.0)
    start("hold").line()
    with pytest.raises(SegmentRefused, match="locked by a live process"):
        SegmentWriter.open(str(directory / SEGMENT_NAME), racing.geometry(), incarnation=2, epoch=racing.EPOCH)


def test_a_forked_child_does_not_keep_the_lock(directory: Path) -> None:
    segment = open_segment(directory)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        segment.close()
        successor = open_segment(directory, incarnation=8)
        assert start_ticks(child) is not None
        successor.close()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_unlock_or_remove_its_parents_segment(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xinference.model.llm.vllm.xavier.directory.segment.LOCK_WAIT_SECONDS", 0.0)
    segment = open_segment(directory)
    child = os.fork()
    if child == 0:
        segment.close(unlink=True)  # not the child's to close
        os._exit(0)
    os.waitpid(child, 0)
    assert os.listdir(directory) == [SEGMENT_NAME]
    with pytest.raises(SegmentRefused, match="locked by a live process"):
        open_segment(directory)
    fill(segment, 0, key(1))
    assert segment.place_of(key(1)) == 0
    segment.close()


def test_a_started_program_does_not_keep_the_lock(directory: Path) -> None:
    segment = open_segment(directory)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as program:
        segment.close()
        open_segment(directory, incarnation=8).close()
        program.kill()


def test_views_held_after_closing_do_not_keep_the_lock(directory: Path) -> None:
    segment = open_segment(directory)
    slab = segment.slab_view()
    segment.close()
    open_segment(directory, incarnation=8).close()
    assert slab.nbytes == small().slab_bytes


def test_a_full_file_system_is_an_error_with_numbers_and_leaves_nothing(directory: Path) -> None:
    room = os.statvfs(SHM)
    huge = small(num_places=2 * room.f_blocks * room.f_frsize // (1 << 20), place_bytes=1 << 20)
    with pytest.raises(SharedMemoryFull, match=rf"needs {huge.file_bytes} bytes, but .* has \d+ free"):
        open_segment(directory, huge)
    assert list(directory.iterdir()) == []


def test_a_segment_too_large_to_replace_the_old_one_leaves_nothing_locked(directory: Path) -> None:
    open_segment(directory).close()
    room = os.statvfs(SHM)
    huge = small(num_places=2 * room.f_blocks * room.f_frsize // (1 << 20), place_bytes=1 << 20)
    with pytest.raises(SharedMemoryFull):
        open_segment(directory, huge)
    open_segment(directory).close()


def test_what_an_owner_left_unfinished_is_removed_by_its_successor_and_by_the_sweep(directory: Path) -> None:
    path = str(directory / SEGMENT_NAME)
    left = Path(unfinished_path(path))
    left.write_bytes(b"half")
    open_segment(directory).close()
    assert not left.exists()
    left.write_bytes(b"half")
    assert {removed.path for removed in remove_segments(str(directory), "w1")} == {path, str(left)}


def test_a_file_shorter_than_its_header_says_is_refused_instead_of_killing_the_reader(directory: Path) -> None:
    segment = open_segment(directory, small(num_places=64, place_bytes=4096))
    segment.close()
    os.truncate(directory / SEGMENT_NAME, small(num_places=64, place_bytes=4096).slab_offset)
    code = (
        "import sys\n"
        "from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader\n"
        "from xinference.model.llm.vllm.xavier.errors import SegmentRefused\n"
        "try:\n"
        "    reader = SegmentReader.open(sys.argv[1], expected_incarnation=None)\n"
        "    bytes(reader.slab_view())\n"
        "except SegmentRefused:\n"
        "    print('refused')\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(directory / SEGMENT_NAME)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "refused\n")


def test_a_successor_is_not_fooled_by_what_its_predecessor_had_in_hand(start: Start, directory: Path) -> None:
    owner = start("tier")
    owner.line()
    reader = SegmentReader.open(str(directory / SEGMENT_NAME), expected_incarnation=None)
    wait_until(lambda: reader.header()["used_places"] == racing.NUM_PLACES)
    owner.signal(signal.SIGKILL)
    wait_until(lambda: not reader.alive())
    segment = SegmentWriter.open(str(directory / SEGMENT_NAME), racing.geometry(), incarnation=2, epoch=racing.EPOCH + 1)
    tier = CpuTier.of(segment)
    tier.check()
    assert tier.used_blocks == 0
    assert all(reader.find(block, racing.EPOCH) is None for block in racing.CHAIN_CONTENT)
    segment.close(unlink=True)


def test_accounting_records_read_while_they_are_written_are_whole(directory: Path) -> None:
    segment = open_segment(directory, small(request_records=2))
    reader = SegmentReader.open(segment.path, expected_incarnation=None)
    child = os.fork()
    if child == 0:
        slot, tokens = segment.requests.write(RequestEntry(bytes(16), "running", 0)), 0
        while True:
            tokens += 1
            entry = RequestEntry(bytes(16), "running", tokens, (tokens,) * 8, tokens, tokens, tokens, *(tokens,) * 6)
            slot = segment.requests.update(slot, entry)
    try:
        seen, update, deadline = 0, 0, time.monotonic() + DEADLINE_SECONDS
        while seen < 2000 and time.monotonic() < deadline:
            changed, update = reader.requests_since(update)
            for entry in [*changed, *reader.find_request(bytes(16))]:
                seen += 1
                numbers = {entry.prompt_tokens, *entry.sources, entry.output_tokens, entry.queued_us, entry.finished_us}
                assert len(numbers) == 1
        assert seen >= 2000
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    segment.close()


def test_a_control_page_read_while_it_is_written_shows_only_whole_states(directory: Path) -> None:
    path = str(directory / "xinference.w1.m-0.ctl")
    writer = ControlPageWriter.create(path)
    child = os.fork()
    if child == 0:
        epoch = 0
        while True:
            epoch += 1
            writer.write(
                ControlState(epoch, tuple(PeerEntry("w1", f"m-{number}", epoch) for number in range(1 + epoch % 20)), epoch % 2 == 1)
            )
    try:
        reader = ControlPageReader.open(path)
        seen, deadline = 0, time.monotonic() + DEADLINE_SECONDS
        while seen < 300 and time.monotonic() < deadline:
            state = reader.poll()
            if state is not None and state.epoch:
                seen += 1
                assert {peer.incarnation for peer in state.peers} == {state.epoch}
                assert (len(state.peers), state.stopping) == (1 + state.epoch % 20, state.epoch % 2 == 1)
        assert seen == 300
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    wait_until(lambda: reader.poll() is None)
    writer.close()

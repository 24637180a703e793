"""What a replica's process reads from its engine's segment."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from xinference.core.cache_view import CacheView, run_time_ns
from xinference.core.clock import Clock, SystemClock
from xinference.core.machine import Machine
from xinference.core.orders import CacheOrder
from xinference.core.runner import Watch
from xinference.core.test.fakes import ManualClock, order
from xinference.model.llm.vllm.xavier.directory.geometry import plan_segment
from xinference.model.llm.vllm.xavier.directory.names import segment_path
from xinference.model.llm.vllm.xavier.directory.requests import RequestEntry
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter

INCARNATION = 77
REQUEST = bytes(range(16))
IDLE = "import time\nwhile True: time.sleep(0.05)"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine("w1", str(tmp_path / "run"), str(tmp_path), Watch())


@pytest.fixture
def segment(machine: Machine) -> Iterator[SegmentWriter]:
    path = segment_path(machine.shm_dir, "w1", "m-0", "0123456789abcdef")
    writer = SegmentWriter.open(path, plan_segment(1 << 20, 512, request_records=64), incarnation=INCARNATION, epoch=1)
    yield writer
    writer.close(unlink=True)


def view(machine: Machine, incarnation: int = INCARNATION, clock: Clock | None = None) -> CacheView:
    return CacheView(machine, order(incarnation=incarnation, cache=CacheOrder(1 << 20, "id", 1)), clock or SystemClock())


def entry(state: str = "first_token", queued_us: int = 5) -> RequestEntry:
    return RequestEntry(REQUEST, state, 100, (32, 0, 0, 16, 48, 0, 0, 4), recomputed_tokens=3, queued_us=queued_us)


def test_without_a_segment_there_is_no_report(machine: Machine) -> None:
    assert view(machine).report() is None
    assert view(machine).recent(10) == []
    assert view(machine).silence_seconds() is None


def test_the_segment_of_another_start_is_not_read(machine: Machine, segment: SegmentWriter) -> None:
    assert view(machine, 78).report() is None


def test_a_report_holds_budget_use_sources_and_counters(machine: Machine, segment: SegmentWriter) -> None:
    segment.set_used(3, 1536)
    segment.counters.add("prompt_tokens_peer_cpu", 48)
    report = view(machine).report()
    assert report is not None
    tier = report["tiers"]["cpu"]
    assert (tier["budget_bytes"], tier["used_bytes"], tier["blocks"], tier["tokens_per_block"]) == (1 << 20, 1536, 3, 16)
    assert tier["file_bytes"] == os.path.getsize(segment.path)
    assert report["sources"]["peer_cpu"] == report["counters"]["prompt_tokens_peer_cpu"] == 48
    assert report["namespace"] == "0123456789abcdef"


async def test_a_record_is_found_by_its_request_once_its_accounting_is_fixed(machine: Machine, segment: SegmentWriter) -> None:
    looking = view(machine)
    slot = segment.requests.write(entry("running"))
    assert await looking.wait_request(REQUEST.hex(), 0.0) is None
    segment.requests.update(slot, entry("finished"))
    record = await looking.wait_request(REQUEST.hex(), 0.0)
    assert record is not None
    assert (record["request_id"], record["state"], record["prompt_tokens"]) == (REQUEST.hex(), "finished", 100)
    assert (record["cached_tokens"], record["recomputed_tokens"]) == (96, 3)
    assert record["times"]["finished"] is None
    assert record["times"]["queued"] < time.time()


async def test_an_epoch_is_confirmed_when_the_engine_says_so(machine: Machine, segment: SegmentWriter) -> None:
    looking = view(machine)
    assert not await looking.wait_confirmed(2, 0.0)
    segment.set_epoch(2)
    segment.confirm_epoch(2)
    assert await looking.wait_confirmed(2, 0.0)


def test_an_engine_that_beats_is_not_silent(machine: Machine, segment: SegmentWriter) -> None:
    segment.beat()
    silence = view(machine).silence_seconds()
    assert silence is not None
    assert silence < 1.0


def test_a_process_that_only_sleeps_still_runs_and_a_stopped_one_does_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", IDLE])
    try:
        first = _until_more(process.pid, 0)
        _until_more(process.pid, first)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        frozen = run_time_ns(process.pid)
        assert frozen == run_time_ns(process.pid) > 0
    finally:
        process.kill()
        process.wait()
    assert run_time_ns(process.pid) == 0


def _until_more(pid: int, than: int) -> int:
    deadline = time.monotonic() + 20
    while (ran := run_time_ns(pid)) <= than:
        assert time.monotonic() < deadline
    return ran


def test_a_core_that_runs_without_beating_is_not_silent(machine: Machine, segment: SegmentWriter) -> None:
    clock = ManualClock()
    clock._now = time.monotonic() + 100  # the segment's owner is this process: its beat is 100 s old, but it has run since
    assert view(machine, clock=clock).silence_seconds() == 0.0

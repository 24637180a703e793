"""Time in which those who watch did not run is not held against those they watch."""

import asyncio
from collections.abc import Callable

import pytest

from xinference.core.orders import ReplicaReport
from xinference.core.roster import Member, Roster
from xinference.core.runner import ReplicaRunner, SharedMemory, Watch
from xinference.core.stalls import STALL_SECONDS, missed_seconds
from xinference.core.states import ReplicaState
from xinference.core.test.fakes import FakeEngine, FakePage, ManualClock, control, facts, order, settle

WATCH = Watch(health_seconds=0.0, hang_seconds=5.0, wrong_answers=2, log_lines=10)


def test_a_wait_that_ends_in_time_or_a_little_late_missed_nothing() -> None:
    assert missed_seconds(100.0, 100.5, 0.5) == 0.0
    assert missed_seconds(100.0, 100.5 + STALL_SECONDS, 0.5) == 0.0
    assert missed_seconds(100.0, 100.1, 0.5) == 0.0


def test_a_wait_that_ends_much_too_late_missed_what_it_was_late() -> None:
    assert missed_seconds(100.0, 107.5, 0.5) == pytest.approx(7.0)


def test_a_worker_is_excused_for_what_nobody_heard() -> None:
    roster = Roster(5.0)
    roster.register(Member("w1", 1, "127.0.0.1:1", facts(), 100.0))
    roster.excuse(6.0)
    assert roster.expire(111.0) == []
    assert [lost.worker_id for lost in roster.expire(111.1)] == ["w1"]


@pytest.mark.parametrize(("probe_seconds", "patience"), [(1.0, 4.0), (0.5, 4.5), (30.0, 2.5)])
def test_a_watching_process_that_stops_just_after_a_probe_is_found_within_the_hang_limit(probe_seconds: float, patience: float) -> None:
    assert Watch(hang_seconds=5.0, probe_seconds=probe_seconds).probe_patience_seconds == patience


@pytest.mark.parametrize(("health_seconds", "patience"), [(0.5, 4.5), (0.0, 5.0), (4.0, 2.5)])
def test_an_engine_that_is_silent_is_given_up_one_look_before_the_hang_limit(health_seconds: float, patience: float) -> None:
    assert Watch(hang_seconds=5.0, health_seconds=health_seconds).patience_seconds == patience


class Watched:
    """A runner with an engine that serves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.reports: list[ReplicaReport] = []
        self.engine: FakeEngine
        memory = SharedMemory(FakePage(), lambda: None)
        self.runner = ReplicaRunner(order(), self._make, memory, WATCH, self.clock, self.reports.append)

    def _make(self, log: Callable[[str], None]) -> FakeEngine:
        self.engine = FakeEngine(log)
        return self.engine

    async def start(self, ready: bool = True) -> "Watched":
        await self.runner.start(control())
        if ready:
            self.engine.ready.set_result(None)
            await self.until(ReplicaState.READY)
        await settle(50)
        return self

    async def until(self, state: ReplicaState) -> None:
        async with asyncio.timeout(5):
            while self.runner.state is not state:
                await asyncio.sleep(0)

    async def pass_time(self, seconds: float) -> None:
        """Time goes by in small steps, as for a process that runs."""
        for _ in range(round(seconds / 0.5)):
            self.clock._now += 0.5
            await settle(50)


async def test_a_pause_of_the_watching_process_is_not_the_engines_silence() -> None:
    watched = await Watched().start()
    for answers in (False, True) * 3:
        watched.engine.healthy = answers
        watched.clock._now += 20.0
        watched.engine.on_health = lambda _: setattr(watched.engine, "healthy", True)
        await settle(50)
    assert watched.runner.state is ReplicaState.READY
    await watched.runner.stop(0.0)


async def test_a_health_check_that_the_watching_process_slept_through_is_asked_again() -> None:
    watched = await Watched().start()
    slept: list[float] = []

    def sleep_through(patience: float) -> None:
        watched.engine.healthy = bool(slept)
        if not slept:
            slept.append(patience)
            watched.clock._now += 60.0

    watched.engine.on_health = sleep_through
    await settle(50)
    assert slept == [5.0]
    assert watched.runner.state is ReplicaState.READY
    await watched.runner.stop(0.0)


@pytest.mark.parametrize("ready", [False, True], ids=["loading", "serving"])
async def test_a_stopped_process_of_the_engine_is_a_hang_although_its_server_answers(ready: bool) -> None:
    watched = await Watched().start(ready)
    watched.engine.stopped_process = "12 (core)"
    await watched.pass_time(4.5)
    assert watched.runner.state is (ReplicaState.READY if ready else ReplicaState.LOADING)
    await watched.pass_time(0.5)
    await watched.until(ReplicaState.FAILED)
    assert watched.reports[-1].cause == "process 12 (core) of the engine has been stopped for 5 s (hung)"


async def test_one_that_is_continued_in_time_and_one_that_was_stopped_together_with_its_watcher_are_forgiven() -> None:
    watched = await Watched().start()
    for _ in range(3):
        watched.engine.stopped_process = "12 (core)"
        await watched.pass_time(4.0)
        watched.engine.stopped_process = None
        await watched.pass_time(0.5)
    watched.engine.stopped_process = "12 (core)"
    watched.clock._now += 60.0
    await settle(50)
    assert watched.runner.state is ReplicaState.READY
    await watched.runner.stop(0.0)

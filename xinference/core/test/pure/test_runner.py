"""One engine start in its process: from its first line of log to its end."""

import asyncio
from collections.abc import Callable

import pytest

from xinference.core.orders import ReplicaReport
from xinference.core.runner import ReplicaRunner, SharedMemory, Watch
from xinference.core.states import ReplicaState
from xinference.core.test.fakes import FakeEngine, FakePage, ManualClock, control, order, settle

# Health checks as fast as the event loop turns; time itself is moved by hand.
WATCH = Watch(health_seconds=0.0, hang_seconds=5.0, wrong_answers=2, log_lines=10)


class Running:
    """A runner with its fakes."""

    def __init__(self) -> None:
        self.reports: list[ReplicaReport] = []
        self.clock = ManualClock()
        self.page = FakePage()
        self.engine: FakeEngine
        self.silence: float | None = None
        memory = SharedMemory(self.page, lambda: self.silence)
        self.runner = ReplicaRunner(order(log_start=40), self._make, memory, WATCH, self.clock, self.reports.append)

    def _make(self, log: Callable[[str], None]) -> FakeEngine:
        self.engine = FakeEngine(log)
        return self.engine

    async def ready(self) -> "Running":
        await self.runner.start(control())
        self.engine.ready.set_result(None)
        await self.state_is(ReplicaState.READY)
        return self

    async def state_is(self, state: ReplicaState) -> None:
        async with asyncio.timeout(5):
            while self.runner.state is not state:
                await asyncio.sleep(0)

    @property
    def states(self) -> list[str]:
        return [report.state for report in self.reports]


async def test_the_control_page_is_written_before_the_engine_starts() -> None:
    running = Running()
    seen = []
    start = running.engine.start

    async def noting_start() -> None:
        seen.append(len(running.page.states))
        await start()

    running.engine.start = noting_start  # type: ignore[method-assign]
    await running.runner.start(control())
    assert seen == [1]
    await running.runner.stop(0.0)


async def test_a_replica_is_reported_loading_then_ready() -> None:
    running = await Running().ready()
    assert running.states == ["loading", "ready"]
    assert running.reports[-1].pid == 4711
    await running.runner.stop(0.0)


async def test_an_engine_that_ends_is_reported_failed_with_its_cause_and_its_last_lines() -> None:
    running = await Running().ready()
    running.engine.log("the last line")
    running.engine.ended.set_result(-9)
    await running.state_is(ReplicaState.FAILED)
    report = running.reports[-1]
    assert (report.cause, report.log_tail, report.log_next) == ("ended with -9", ("the last line",), 41)


async def test_an_engine_that_ends_while_it_loads_is_reported_failed() -> None:
    running = Running()
    await running.runner.start(control())
    running.engine.ready.set_exception(RuntimeError("no such weights"))
    await running.state_is(ReplicaState.FAILED)
    assert running.states == ["loading", "failed"]
    assert running.reports[-1].cause == "no such weights"


async def test_a_failed_engine_is_killed_before_its_failure_is_reported() -> None:
    running = Running()
    killed_at_report: list[bool] = []
    running.runner._on_report = lambda report: killed_at_report.append(running.engine.ended.done())
    await running.runner.start(control())
    running.engine.ready.set_exception(RuntimeError("late"))
    await running.state_is(ReplicaState.FAILED)
    assert killed_at_report == [False, True]


async def test_silence_up_to_the_limit_is_forgiven_and_beyond_it_is_a_hang() -> None:
    running = await Running().ready()
    silence = iter([4.0, 0.0, 4.9, 0.2])

    def answer(timeout: float) -> None:
        waited = next(silence, 0.0)
        running.clock._now += waited
        running.engine.healthy = waited == 0.0

    running.engine.on_health = answer
    await running.state_is(ReplicaState.FAILED)
    assert running.reports[-1].cause == "the engine answered no health check for 5 s (hung)"
    assert running.clock.now() - 1_000_003.0 == pytest.approx(9.1)


async def test_the_patience_of_a_health_check_is_what_is_left_until_a_hang() -> None:
    running = await Running().ready()
    patience: list[float] = []

    def answer(timeout: float) -> None:
        patience.append(timeout)
        running.clock._now += timeout
        running.engine.healthy = False

    running.engine.on_health = answer
    await running.state_is(ReplicaState.FAILED)
    assert patience == [5.0]


async def test_a_server_that_twice_says_its_engine_is_dead_is_believed_at_once() -> None:
    running = await Running().ready()
    before = running.clock.now()
    running.engine.healthy = False
    await running.state_is(ReplicaState.FAILED)
    assert running.clock.now() == before
    assert running.reports[-1].cause == "the engine's server is up but says that the engine is dead"


async def test_a_core_that_does_not_beat_is_a_hang_although_its_server_answers() -> None:
    running = await Running().ready()
    running.silence = 4.9
    await settle(50)
    assert running.runner.state is ReplicaState.READY
    running.silence = 5.0
    await running.state_is(ReplicaState.FAILED)
    assert running.reports[-1].cause == "the engine's core has not moved for 5 s (hung)"


async def test_one_wrong_answer_is_not_believed() -> None:
    running = await Running().ready()
    answers = iter([False])
    checks: list[bool] = []

    def answer(timeout: float) -> None:
        running.engine.healthy = next(answers, True)
        checks.append(running.engine.healthy)

    running.engine.on_health = answer
    async with asyncio.timeout(5):
        while len(checks) < 5:
            await asyncio.sleep(0)
    assert running.runner.state is ReplicaState.READY
    await running.runner.stop(0.0)


async def test_an_engine_that_cannot_be_started_leaves_nothing_but_the_page_which_stop_removes() -> None:
    running = Running()
    running.engine.start_error = OSError("no such program")
    with pytest.raises(OSError, match="no such program"):
        await running.runner.start(control())
    assert running.engine.events == ["start", "stop 0"]
    await running.runner.stop(0.0)
    assert running.page.removed


async def test_stopping_ends_the_engine_and_reports_it_once() -> None:
    running = await Running().ready()
    await running.runner.stop(3.0)
    await running.runner.stop(3.0)
    assert running.states == ["loading", "ready", "stopped"]
    assert running.engine.events[-1] == "stop 3"
    assert running.page.removed


async def test_an_older_control_state_that_arrives_late_is_dropped() -> None:
    running = await Running().ready()
    assert running.runner.write_control(control(version=5, epoch=2))
    assert not running.runner.write_control(control(version=4, epoch=1))
    assert [state.epoch for state in running.page.states] == [1, 2]
    await running.runner.stop(0.0)


async def test_the_watcher_ends_with_the_runner() -> None:
    running = await Running().ready()
    before = len(asyncio.all_tasks())
    await running.runner.stop(0.0)
    await settle()
    assert len(asyncio.all_tasks()) < before

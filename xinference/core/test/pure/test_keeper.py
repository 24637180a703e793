"""Keeping one replica alive."""

import asyncio

import pytest

from xinference.core.errors import ReplicaEnded, Unreachable
from xinference.core.keeper import ReplicaKeeper
from xinference.core.orders import ReplicaReport
from xinference.core.placement import Placement
from xinference.core.relaunch import RelaunchLimits
from xinference.core.states import ReplicaState
from xinference.core.test.fakes import FakeSurroundings, FakeWorkers, ManualClock, settle
from xinference.errors import InvalidRequest, NoReplicaAvailable

LIMITS = RelaunchLimits(max_restarts=2, window_seconds=600.0, first_wait_seconds=0.5, longest_wait_seconds=30.0)


class Kept:
    """A keeper with its fakes."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.surroundings = FakeSurroundings()
        self.workers = FakeWorkers()
        self.surroundings.claims.add("m-0")
        self.keeper = ReplicaKeeper(Placement("m-0", "w1"), self.surroundings, self.workers, self.clock, LIMITS)

    async def ready(self) -> "Kept":
        await self.keeper.start()
        return self

    def fails(self, cause: str = "killed", **more: object) -> None:
        report = ReplicaReport("m", "m-0", self.keeper.incarnation, "failed", cause=cause, **more)  # type: ignore[arg-type]
        self.keeper.take_report(report)

    async def fail_and_wait(self, seconds: float) -> None:
        self.fails()
        await self.clock.move(seconds)

    async def stop(self) -> None:
        await self.keeper.stop(drain_seconds=0.0, grace_seconds=1.0)

    def assert_nothing_is_held(self) -> None:
        assert self.workers.running == {}
        assert self.surroundings.claims == set()

    def state(self) -> ReplicaState:
        return self.keeper.state

    @property
    def states(self) -> list[str]:
        return [state for state, _ in self.surroundings.changes]


async def test_a_start_goes_through_the_states_and_a_stop_gives_everything_back() -> None:
    kept = await Kept().ready()
    assert kept.states == ["creating", "loading", "ready"]
    assert kept.surroundings.claims == {"m-0"}
    await kept.stop()
    assert kept.state() is ReplicaState.STOPPED
    assert kept.workers.removals == [("m-0", kept.keeper.incarnation, False)]
    kept.assert_nothing_is_held()


async def test_a_first_start_that_fails_is_an_error_and_is_not_tried_again() -> None:
    kept = Kept()
    kept.workers.ready_at_once = False
    first = kept.keeper.start()
    await settle()
    kept.fails("no such weights", log_tail=("a line",))
    with pytest.raises(ReplicaEnded, match="replica m-0: no such weights"):
        await first
    await kept.clock.move(100.0)
    assert kept.state() is ReplicaState.FAILED
    assert kept.keeper.log_tail == ("a line",)
    assert len(kept.workers.orders) == 1
    kept.assert_nothing_is_held()
    assert kept.workers.removals[0][2] is False


@pytest.mark.parametrize("step", ["reserve", "create", "load"])
async def test_a_failure_at_any_step_of_the_first_start_leaves_nothing(step: str) -> None:
    kept = Kept()
    if step == "reserve":
        kept.surroundings.refusal = InvalidRequest("no room")
    elif step == "create":
        kept.workers.fail = Unreachable("the worker is gone")
    else:
        kept.workers.ready_at_once = False
    first = kept.keeper.start()
    await settle()
    if step == "load":
        kept.fails("out of memory")
    with pytest.raises(ReplicaEnded):
        await first
    kept.assert_nothing_is_held()


@pytest.mark.parametrize("step", ["create", "load", "serve"])
async def test_a_stop_at_any_point_of_a_start_leaves_nothing(step: str) -> None:
    kept = Kept()
    kept.workers.hold = step == "create"
    kept.workers.ready_at_once = step == "serve"
    first = kept.keeper.start()
    await settle()
    await kept.stop()
    assert first.done()
    assert kept.state() is ReplicaState.STOPPED
    kept.assert_nothing_is_held()
    assert kept.workers.removals[-1][2] is False


async def test_a_replica_that_ends_is_started_again_after_the_wait_with_its_cache_and_a_new_incarnation() -> None:
    kept = await Kept().ready()
    before = kept.keeper.incarnation
    kept.fails("killed", log_next=12)
    await settle()
    assert kept.state() is ReplicaState.FAILED
    assert kept.workers.removals == [("m-0", before, True)]
    await kept.clock.move(0.4)
    assert kept.state() is ReplicaState.FAILED
    await kept.clock.move(0.2)
    assert kept.state() is ReplicaState.READY
    assert kept.keeper.incarnation != before
    assert kept.workers.orders[1].log_start == 12
    assert kept.keeper.restarts == 1
    await kept.stop()
    kept.assert_nothing_is_held()


async def test_a_replica_that_ends_too_often_is_given_up_with_both_reasons_and_a_restart_revives_it() -> None:
    kept = await Kept().ready()
    await kept.fail_and_wait(0.6)
    await kept.fail_and_wait(1.1)
    await kept.fail_and_wait(1000.0)
    assert kept.state() is ReplicaState.FAILED
    assert kept.keeper.cause is not None
    assert kept.keeper.cause.startswith("killed -- not started again: it ended 3 times")
    assert len(kept.workers.orders) == 3
    await kept.keeper.restart(0.0, 1.0)
    await settle()
    assert kept.state() is ReplicaState.READY
    await kept.stop()


async def test_a_relaunch_that_fails_counts_as_an_end() -> None:
    kept = await Kept().ready()
    kept.workers.fail = OSError("no more processes")
    await kept.fail_and_wait(0.6)
    await kept.clock.move(1.1)
    await kept.clock.move(1000.0)
    assert kept.state() is ReplicaState.FAILED
    assert "3 times" in (kept.keeper.cause or "")
    await kept.stop()
    kept.assert_nothing_is_held()


async def test_a_replica_without_a_place_waits_for_one_and_this_is_no_failure() -> None:
    kept = await Kept().ready()
    kept.surroundings.refusal = NoReplicaAvailable("no worker has joined")
    await kept.fail_and_wait(5000.0)
    assert kept.state() is ReplicaState.FAILED
    assert kept.surroundings.changes[-1] == ("failed", "waiting for a place: no worker has joined")
    assert len(kept.workers.orders) == 1
    kept.surroundings.refusal = None
    await kept.clock.move(0.6)
    assert kept.state() is ReplicaState.READY
    await kept.stop()
    kept.assert_nothing_is_held()


@pytest.mark.parametrize("given_up", [False, True])
async def test_a_replica_that_is_stopped_while_it_is_down_has_its_cache_removed(given_up: bool) -> None:
    kept = await Kept().ready()
    kept.fails()
    await settle()
    if given_up:
        await kept.clock.move(0.6)
        await kept.fail_and_wait(1.1)
        await kept.fail_and_wait(1000.0)
    assert kept.workers.removals[-1][2] is True
    await kept.stop()
    assert kept.workers.removals[-1] == ("m-0", kept.keeper.incarnation, False)
    kept.assert_nothing_is_held()


async def test_a_replica_that_moves_to_another_worker_has_its_cache_on_the_former_one_removed() -> None:
    kept = await Kept().ready()
    kept.surroundings.next_place = Placement("m-0", "w2")
    await kept.fail_and_wait(0.6)
    assert kept.state() is ReplicaState.READY
    assert [(worker, keep) for worker, (_, _, keep) in zip(kept.workers.asked, kept.workers.removals, strict=True)] == [
        ("w1", True),
        ("w1", False),
    ]
    await kept.stop()


async def test_a_replica_that_starts_again_where_it_was_keeps_its_cache() -> None:
    kept = await Kept().ready()
    await kept.fail_and_wait(0.6)
    assert [keep for _, _, keep in kept.workers.removals] == [True]
    await kept.stop()


async def test_an_engine_that_is_about_to_be_stopped_is_told_to_flush_and_its_successor_is_not() -> None:
    kept = await Kept().ready()
    kept.workers.idle = False
    restart = asyncio.create_task(kept.keeper.restart(10.0, 7.0))
    await kept.clock.move(1.0)
    assert kept.keeper.flushing
    kept.workers.idle = True
    await kept.clock.move(0.2)
    await restart
    await settle()
    assert kept.state() is ReplicaState.READY
    assert not kept.keeper.flushing
    await kept.stop()


async def test_a_lost_worker_makes_the_replica_lost_and_it_is_started_again() -> None:
    kept = await Kept().ready()
    kept.keeper.worker_lost("its worker is silent")
    await settle()
    assert (kept.state(), kept.keeper.cause) == (ReplicaState.LOST, "its worker is silent")
    await kept.clock.move(0.6)
    assert kept.state() is ReplicaState.READY
    await kept.stop()


async def test_reports_about_a_former_start_change_nothing() -> None:
    kept = await Kept().ready()
    kept.keeper.take_report(ReplicaReport("m", "m-0", kept.keeper.incarnation ^ 1, "failed", cause="old"))
    await settle()
    assert kept.state() is ReplicaState.READY
    await kept.stop()


async def test_a_drain_waits_for_open_requests_and_no_longer_than_allowed() -> None:
    kept = await Kept().ready()
    kept.workers.idle = False
    stopping = asyncio.create_task(kept.keeper.stop(drain_seconds=10.0, grace_seconds=1.0))
    await kept.clock.move(5.0)
    assert kept.state() is ReplicaState.DRAINING
    assert not stopping.done()
    await kept.clock.move(5.2)
    await stopping
    assert kept.state() is ReplicaState.STOPPED


async def test_a_drain_ends_with_the_last_request() -> None:
    kept = await Kept().ready()
    kept.workers.idle = False
    stopping = asyncio.create_task(kept.keeper.stop(drain_seconds=1000.0, grace_seconds=1.0))
    await kept.clock.move(5.0)
    kept.workers.idle = True
    await kept.clock.move(0.2)
    await stopping
    kept.assert_nothing_is_held()


async def test_a_replica_that_ends_while_it_is_drained_for_good_is_not_started_again() -> None:
    kept = await Kept().ready()
    kept.workers.asking_takes = kept.clock
    stopping = asyncio.create_task(kept.keeper.stop(drain_seconds=1000.0, grace_seconds=1.0))
    await kept.clock.move(1.0)
    kept.fails()
    await kept.clock.move(5.0)
    assert len(kept.workers.orders) == 1
    await kept.clock.move(10.0)
    await stopping
    kept.assert_nothing_is_held()


async def test_a_cancelled_drain_still_gives_everything_back() -> None:
    kept = await Kept().ready()
    kept.workers.idle = False
    stopping = asyncio.create_task(kept.keeper.stop(drain_seconds=1000.0, grace_seconds=1.0))
    await kept.clock.move(5.0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    kept.assert_nothing_is_held()


async def test_a_restart_drains_keeps_the_cache_and_is_not_counted_as_a_failure() -> None:
    kept = await Kept().ready()
    for _ in range(2):
        await kept.fail_and_wait(1.5)
    kept.workers.removals.clear()
    kept.workers.graces.clear()
    before = kept.keeper.incarnation
    restart = asyncio.create_task(kept.keeper.restart(10.0, 7.0))
    await kept.clock.move(0.2)
    await restart
    await settle()
    assert kept.state() is ReplicaState.READY
    assert kept.workers.removals == [("m-0", before, True)]
    assert "draining" in kept.states
    assert kept.workers.graces == [7.0]
    for _ in range(2):
        await kept.fail_and_wait(1.5)
    assert kept.state() is ReplicaState.READY
    await kept.stop()


async def test_a_replica_that_never_becomes_ready_is_failed_after_its_time() -> None:
    kept = Kept()
    kept.workers.ready_at_once = False
    kept.surroundings.order = lambda placement, incarnation, log_start: _quick(placement, incarnation)  # type: ignore[method-assign]
    first = kept.keeper.start()
    with pytest.raises(ReplicaEnded, match="not ready within"):
        await first
    kept.assert_nothing_is_held()


def _quick(placement: Placement, incarnation: int):  # type: ignore[no-untyped-def]
    from xinference.core.keeper import LOAD_SLACK_SECONDS
    from xinference.core.test.fakes import order

    return order(placement.replica_uid, incarnation, launch_seconds=0.001 - LOAD_SLACK_SECONDS)


async def test_a_keeper_that_is_stopped_before_it_began_answers_its_starter() -> None:
    kept = Kept()
    first = kept.keeper.start()
    await kept.stop()
    assert first.cancelled()
    kept.assert_nothing_is_held()


async def test_stopping_twice_is_stopping_once() -> None:
    kept = await Kept().ready()
    await asyncio.gather(kept.stop(), kept.stop())
    assert kept.states.count("stopped") == 1

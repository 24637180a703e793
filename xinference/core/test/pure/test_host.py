"""What a worker does with orders: whatever is interrupted at whatever step is taken back."""

import asyncio

import pytest

from xinference.core.errors import OrderWithdrawn
from xinference.core.host import WorkerHost
from xinference.core.orders import ReplicaReport
from xinference.core.test.fakes import FakeLeftovers, FakeProcesses, control, order, settle

STEPS = ["open", "engine"]


class Worker:
    """A host with its fakes."""

    def __init__(self) -> None:
        self.processes = FakeProcesses()
        self.leftovers = FakeLeftovers()
        self.changes = 0
        self.host = WorkerHost(self.processes, self.leftovers, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    async def remove(self, uid: str = "m-0", incarnation: int = 7, keep: bool = False) -> None:
        await self.host.remove_replica(uid, incarnation, keep_cache=keep, grace_seconds=2.0)

    def assert_nothing_is_held(self) -> None:
        assert self.processes.open_orders == set()
        assert self.host.reports() == []
        assert len(self.host._turns) == 0


async def test_a_start_makes_a_process_then_its_engine() -> None:
    worker = Worker()
    report = await worker.host.start_replica(order(), control())
    assert worker.processes.log == ["open", "engine"]
    assert (report.state, report.address) == ("loading", "address-of-m-0-7")
    await worker.host.stop(0.0)


async def test_a_removal_stops_the_engine_closes_the_process_and_removes_the_cache() -> None:
    worker = Worker()
    await worker.host.start_replica(order(), control())
    await worker.remove()
    assert worker.processes.log == ["open", "engine", "stop engine", "close"]
    assert worker.leftovers.removed == ["m-0"]
    worker.assert_nothing_is_held()


async def test_a_removal_for_a_successor_leaves_the_cache() -> None:
    worker = Worker()
    await worker.host.start_replica(order(), control())
    await worker.remove(keep=True)
    assert worker.leftovers.removed == []
    worker.assert_nothing_is_held()


@pytest.mark.parametrize("step", STEPS)
async def test_a_failure_at_any_step_leaves_nothing(step: str) -> None:
    worker = Worker()
    worker.processes.fail = step
    with pytest.raises(OSError, match=step):
        await worker.host.start_replica(order(), control())
    worker.assert_nothing_is_held()


@pytest.mark.parametrize("step", STEPS)
async def test_a_cancelled_call_at_any_step_leaves_nothing(step: str) -> None:
    worker = Worker()
    worker.processes.hold = step
    call = asyncio.create_task(worker.host.start_replica(order(), control()))
    await worker.processes.reached.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    worker.assert_nothing_is_held()


@pytest.mark.parametrize("step", STEPS)
async def test_a_removal_at_any_step_of_a_start_ends_it_and_is_no_cancellation_for_its_caller(step: str) -> None:
    worker = Worker()
    worker.processes.hold = step
    call = asyncio.create_task(worker.host.start_replica(order(), control()))
    await worker.processes.reached.wait()
    await worker.remove()
    with pytest.raises(OrderWithdrawn):
        await call
    worker.assert_nothing_is_held()
    assert worker.leftovers.removed == ["m-0"]


async def test_a_removal_that_overtakes_its_start_wins() -> None:
    worker = Worker()
    await worker.remove()
    with pytest.raises(OrderWithdrawn):
        await worker.host.start_replica(order(), control())
    assert worker.processes.log == []


async def test_the_same_order_twice_is_one_start() -> None:
    worker = Worker()
    first, second = await asyncio.gather(worker.host.start_replica(order(), control()), worker.host.start_replica(order(), control()))
    assert first == second
    assert worker.processes.log == ["open", "engine"]
    await worker.host.stop(0.0)


async def test_a_new_incarnation_replaces_the_old_one_and_its_cache_stays() -> None:
    worker = Worker()
    await worker.host.start_replica(order(incarnation=7), control(incarnation=7))
    await worker.host.start_replica(order(incarnation=8), control(incarnation=8))
    assert worker.processes.open_orders == {("m-0", 8)}
    assert worker.leftovers.removed == []
    await worker.host.stop(0.0)


async def test_removing_a_former_incarnation_does_not_touch_its_successor() -> None:
    worker = Worker()
    await worker.host.start_replica(order(incarnation=8), control(incarnation=8))
    await worker.remove(incarnation=7)
    assert worker.processes.open_orders == {("m-0", 8)}
    assert worker.leftovers.removed == []
    await worker.host.stop(0.0)


async def test_removing_twice_is_removing_once() -> None:
    worker = Worker()
    await worker.host.start_replica(order(), control())
    await asyncio.gather(worker.remove(), worker.remove())
    assert worker.processes.log.count("close") == 1
    worker.assert_nothing_is_held()


async def test_a_process_that_does_not_answer_is_removed_all_the_same() -> None:
    worker = Worker()
    await worker.host.start_replica(order(), control())
    worker.processes.made["m-0", 7].gone = True
    await worker.host.probe()
    await worker.remove()
    assert "stop engine" not in worker.processes.log
    assert (worker.leftovers.waited, worker.leftovers.sockets) == ([1], ["m-0"])
    worker.assert_nothing_is_held()


async def test_a_probe_finds_a_process_that_is_gone() -> None:
    worker = Worker()
    await worker.host.start_replica(order(), control())
    await worker.host.start_replica(order("m-1", 9), control("m-1", 9))
    worker.processes.made["m-0", 7].gone = True
    worker.processes.made["m-1", 9].state = "ready"
    before = worker.changes
    await worker.host.probe()
    assert [report.state for report in worker.host.reports()] == ["failed", "ready"]
    assert worker.changes == before + 2
    await worker.host.stop(0.0)


async def test_a_process_that_ended_fails_its_replica_only() -> None:
    worker = Worker()
    await worker.host.start_replica(order(), control())
    await worker.host.start_replica(order("m-1", 9), control("m-1", 9))
    worker.host.fail_at("address-of-m-1-9", "the process died")
    assert [(report.state, report.cause) for report in worker.host.reports()] == [("loading", None), ("failed", "the process died")]
    await worker.host.stop(0.0)


async def test_a_failed_report_is_final_and_one_about_another_start_is_dropped() -> None:
    worker = Worker()
    await worker.host.start_replica(order(), control())
    worker.host.take_report(ReplicaReport("m", "m-0", 6, "failed"))
    assert worker.host.reports()[0].state == "loading"
    worker.host.take_report(ReplicaReport("m", "m-0", 7, "failed", cause="x"))
    worker.host.take_report(ReplicaReport("m", "m-0", 7, "ready"))
    assert worker.host.reports()[0].state == "failed"
    await worker.host.stop(0.0)


async def test_control_states_go_to_the_start_they_name_and_only_forward() -> None:
    worker = Worker()
    await worker.host.start_replica(order(), control(version=1))
    await worker.host.apply_controls([control(version=3, epoch=3), control(version=2, epoch=2), control(incarnation=6, version=9)])
    await worker.host.apply_controls([control(version=2, epoch=2)])
    assert [state.epoch for state in worker.processes.made["m-0", 7].controls] == [1, 3]
    await worker.host.stop(0.0)


async def test_a_control_state_that_arrives_during_the_start_is_not_lost() -> None:
    worker = Worker()
    worker.processes.hold = "engine"
    call = asyncio.create_task(worker.host.start_replica(order(), control(version=1)))
    await worker.processes.reached.wait()
    await worker.host.apply_controls([control(version=2, epoch=5)])
    worker.processes.gate.set()
    await call
    assert [state.epoch for state in worker.processes.made["m-0", 7].controls] == [1, 5]
    await worker.host.stop(0.0)


async def test_a_stopping_worker_removes_everything_and_takes_no_more_orders() -> None:
    worker = Worker()
    await worker.host.start_replica(order(), control())
    worker.processes.hold = "open"
    starting = asyncio.create_task(worker.host.start_replica(order("m-1", 9), control("m-1", 9)))
    await worker.processes.reached.wait()
    await worker.host.stop(0.0)
    await settle()
    with pytest.raises(OrderWithdrawn):
        await starting
    with pytest.raises(OrderWithdrawn):
        await worker.host.start_replica(order("m-2", 1), control("m-2", 1))
    worker.assert_nothing_is_held()
    assert worker.leftovers.removed[-1] is None


async def test_a_replica_that_is_slow_to_answer_is_not_asked_twice_and_does_not_keep_others_waiting() -> None:
    worker = Worker()
    for uid in ("m-0", "m-1"):
        await worker.host.start_replica(order(uid), control(uid))
    asked: list[str] = []
    answer = asyncio.Event()

    async def slow(uid: str) -> ReplicaReport:
        asked.append(uid)
        if uid == "m-0":
            await answer.wait()
        return ReplicaReport("m", uid, 7, "ready", pid=1)

    for uid in ("m-0", "m-1"):
        worker.host._slots[uid].process.report = lambda uid=uid: slow(uid)  # type: ignore[union-attr, method-assign]
    rounds = [asyncio.create_task(worker.host.probe()) for _ in range(2)]
    await settle()
    assert sorted(asked) == ["m-0", "m-1", "m-1"]
    answer.set()
    await asyncio.gather(*rounds)
    await worker.host.probe()
    assert asked.count("m-0") == 2
    await worker.host.stop(0.0)

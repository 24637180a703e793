"""The event log and the long poll below it."""

import asyncio

from xinference.core.changes import Changes
from xinference.core.events import MAX_EVENTS, EventLog, Stage
from xinference.core.test.fakes import settle
from xinference.core.turns import Turns


def log_of(*messages: str) -> EventLog:
    log = EventLog()
    for message in messages:
        log.add(Stage.CREATING, message, state="launching", time=5.0, progress=0.5, replica_uid="m-0")
    return log


async def test_events_are_numbered_from_one_and_can_be_resumed() -> None:
    log = log_of("x", "y", "z")
    assert [event.message for event in await log.wait_after(1, 0.0)] == ["y", "z"]
    assert log.after(0)[0].to_wire() == {
        "seq": 1, "time": 5.0, "stage": "creating", "replica_uid": "m-0", "message": "x", "state": "launching", "progress": 0.5,
    }  # fmt: skip


async def test_a_waiting_reader_gets_the_next_event_at_once() -> None:
    log = log_of("x")
    reader = asyncio.create_task(log.wait_after(1, 60.0))
    await settle()
    assert not reader.done()
    log.add(Stage.READY, "y", state="ready", time=6.0, progress=1.0)
    assert [event.message for event in await reader] == ["y"]


async def test_nothing_new_is_an_empty_answer() -> None:
    assert await log_of("x").wait_after(1, 0.001) == []


async def test_a_log_is_bounded_and_keeps_its_numbers() -> None:
    log = log_of(*(str(number) for number in range(MAX_EVENTS + 5)))
    assert len(log.after(0)) == MAX_EVENTS
    assert log.after(0)[0].seq == 6


async def test_all_who_wait_for_a_change_are_woken_and_a_known_one_is_not_waited_for() -> None:
    changes = Changes()
    waiting = [asyncio.create_task(changes.wait_for_newer(1, 60.0)) for _ in range(3)]
    await settle()
    changes.bump()
    assert await asyncio.gather(*waiting) == [2, 2, 2]
    assert await changes.wait_for_newer(1, 60.0) == 2


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    changes = Changes()
    waiting = asyncio.create_task(changes.wait_for_newer(1, 60.0))
    await settle()
    waiting.cancel()
    await settle()
    assert changes._waiters == set()


async def test_turns_are_taken_one_at_a_time_for_each_name_and_forgotten() -> None:
    turns, log = Turns(), []

    async def work(name: str, tag: str) -> None:
        async with turns.of(name):
            log.append(f"{tag} in")
            await settle(3)
            log.append(f"{tag} out")

    await asyncio.gather(work("x", "1"), work("x", "2"), work("y", "3"))
    assert log.index("1 out") < log.index("2 in")
    assert log.index("3 in") < log.index("1 out")
    assert len(turns) == 0

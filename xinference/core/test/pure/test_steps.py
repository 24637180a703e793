"""Steps with undo: a failure or a cancellation at any of them gives everything back."""

import asyncio

import pytest

from xinference.core.steps import Step, Taken, finish
from xinference.core.test.fakes import settle

NAMES = ["a", "b", "c"]


class Recorder:
    """Makes steps that note what they do; one of them may fail or stop at a gate, and undoing one may fail."""

    def __init__(self, fail: str = "", hold: str = "", fail_undo: str = "", hold_undo: str = "") -> None:
        self.log: list[str] = []
        self.fail, self.hold, self.fail_undo, self.hold_undo = fail, hold, fail_undo, hold_undo
        self.gate = asyncio.Event()

    def step(self, name: str) -> Step:
        async def do() -> None:
            self.log.append(f"do {name}")
            if name == self.hold:
                await self.gate.wait()
            if name == self.fail:
                raise ValueError(name)

        async def undo() -> None:
            if name == self.hold_undo:
                await self.gate.wait()
            self.log.append(f"undo {name}")
            if name == self.fail_undo:
                raise RuntimeError(name)

        return Step(name, do, undo)

    def steps(self) -> list[Step]:
        return [self.step(name) for name in NAMES]


async def test_steps_are_done_in_order_and_released_in_reverse() -> None:
    recorder, taken = Recorder(), Taken()
    await taken.run(recorder.steps())
    assert taken.names == NAMES
    await taken.release()
    assert recorder.log == ["do a", "do b", "do c", "undo c", "undo b", "undo a"]


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("a", ["do a", "undo a"]),
        ("b", ["do a", "do b", "undo b", "undo a"]),
        ("c", ["do a", "do b", "do c", "undo c", "undo b", "undo a"]),
    ],
)
async def test_a_failure_at_any_step_takes_back_what_was_begun_and_is_raised(failing: str, expected: list[str]) -> None:
    recorder, taken = Recorder(fail=failing), Taken()
    with pytest.raises(ValueError, match=failing):
        await taken.run(recorder.steps())
    assert recorder.log == expected
    assert taken.names == []


@pytest.mark.parametrize("held", NAMES)
async def test_a_cancellation_at_any_step_takes_back_what_was_begun(held: str) -> None:
    recorder, taken = Recorder(hold=held), Taken()
    task = asyncio.create_task(taken.run(recorder.steps()))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    begun = NAMES[: NAMES.index(held) + 1]
    assert recorder.log == [f"do {name}" for name in begun] + [f"undo {name}" for name in reversed(begun)]


async def test_a_failing_undo_neither_stops_the_others_nor_hides_the_first_error() -> None:
    recorder, taken = Recorder(fail="c", fail_undo="b"), Taken()
    with pytest.raises(ValueError, match="c"):
        await taken.run(recorder.steps())
    assert recorder.log[-3:] == ["undo c", "undo b", "undo a"]


async def test_a_second_cancellation_does_not_interrupt_the_undoing() -> None:
    recorder, taken = Recorder(hold="c", hold_undo="b"), Taken()
    task = asyncio.create_task(taken.run(recorder.steps()))
    await settle()
    task.cancel()
    await settle()
    task.cancel()
    await settle()
    assert not task.done()
    recorder.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert recorder.log[-3:] == ["undo c", "undo b", "undo a"]


async def test_releasing_twice_undoes_once() -> None:
    recorder, taken = Recorder(), Taken()
    await taken.run(recorder.steps())
    await taken.release()
    await taken.release()
    assert recorder.log.count("undo a") == 1


async def test_finish_raises_what_the_work_raised() -> None:
    async def fails() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        await finish(fails())

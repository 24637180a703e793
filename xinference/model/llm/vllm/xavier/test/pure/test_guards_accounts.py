"""Guards of ends, preemptions and outcomes, told to the scheduler half by hand: each test is red without one of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.connector.metadata import RequestView, Scheduled, StepView
from xinference.model.llm.vllm.xavier.connector.scheduler import XavierScheduler
from xinference.model.llm.vllm.xavier.directory.control import ControlState
from xinference.model.llm.vllm.xavier.test.mini_engine import BLOCK, Clock, MiniEngine

BLOCKS = list(range(1, 9))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def a(tmp_path: Path, clock: Clock) -> MiniEngine:
    """Keeps a prompt of 30 tokens in its slab, and nothing of it in the engine's own cache."""
    engine = MiniEngine(tmp_path, "a", clock)
    engine.ask("r0", range(30))
    engine.reset()
    return engine


def admitted(engine: MiniEngine, tokens: range = range(100, 130)) -> RequestView:
    """A request "r1" that was just given its blocks."""
    view = engine._view(engine.add("r1", tokens))
    external, _ = engine.half.matched_tokens(view, 0, engine.clock())
    assert external is not None
    engine.half.allocated(view, BLOCKS, external, engine.clock())
    return view


# ---- admissions


def test_an_allocation_that_raised_after_its_load_was_opened_opens_no_second_one(a: MiniEngine, clock: Clock) -> None:
    admitted(a, range(30))
    a.half.allocation_failed("r1", BLOCKS, 28, clock())
    meta = a.half.build(StepView([Scheduled("r1", 30)]), clock())
    assert (len(meta.sync_loads), len(meta.async_loads)) == (1, 0)
    assert len(meta.sync_loads[0].pieces) == 7


def test_an_allocation_without_external_tokens_that_raised_is_no_load(a: MiniEngine, clock: Clock) -> None:
    admitted(a)
    a.half.allocation_failed("r1", BLOCKS, 0, clock())
    assert a.engine.state.open_loads == {}


def test_a_whole_table_is_not_taken_for_an_addition(a: MiniEngine, clock: Clock) -> None:
    admitted(a)
    a.half.build(StepView([Scheduled("r1", 30, [*BLOCKS, 9])]), clock())
    assert a.half._requests["r1"].block_ids == [*BLOCKS, 9]
    a.half.build(StepView([Scheduled("r1", 34, [10])]), clock())
    assert a.half._requests["r1"].block_ids == [*BLOCKS, 9, 10]


# ---- outcomes


def test_with_two_steps_in_flight_an_outcome_is_that_of_the_older(a: MiniEngine, clock: Clock) -> None:
    a.half = XavierScheduler(a.engine, a, steps_in_flight=2)
    admitted(a)
    before = a.counter("requests")
    a.half.build(StepView([Scheduled("r1", 16)]), clock())
    a.half.build(StepView([Scheduled("r1", 30)]), clock())
    a.half.output((), (), clock())  # of the first
    assert a.counter("requests") == before
    a.half.build(StepView([Scheduled("r1", 31)]), clock())
    a.half.output((), (), clock())
    assert a.counter("requests") == before + 1


def test_steps_that_decode_say_nothing_of_the_speed_of_prefill(a: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    amounts: list[int] = []
    monkeypatch.setattr(type(a.engine.state.rates), "observe_prefill", lambda self, amount, seconds: amounts.append(amount))
    a.ask("r1", range(100, 130), max_tokens=9)
    assert amounts
    assert min(amounts) >= 2 * BLOCK


# ---- ends and preemptions


def test_a_request_that_ended_is_forgotten(a: MiniEngine) -> None:
    a.ask("r1", range(100, 130), max_tokens=3)
    assert a.half._requests == {}
    assert a.half.wake_at == {}


def test_a_request_aborted_before_its_first_token_is_not_counted_as_completed(a: MiniEngine, clock: Clock) -> None:
    view = admitted(a)
    before = a.counter("requests")
    a.half.build(StepView([Scheduled("r1", 30)]), clock())
    a.half.finished("r1", "aborted", clock(), view)
    assert a.counter("requests") == before


def test_a_request_that_ends_with_its_first_token_is_counted(a: MiniEngine, clock: Clock) -> None:
    view = admitted(a)
    before = a.counter("requests")
    a.half.build(StepView([Scheduled("r1", 30)]), clock())
    a.half.finished("r1", "aborted", clock(), replace(view, num_tokens=31))
    assert a.counter("requests") == before + 1
    assert a.account("r1").output_tokens == 1


def test_a_request_has_never_less_than_no_output(a: MiniEngine, clock: Clock) -> None:
    a.half.finished("r1", "aborted", clock(), RequestView("r1", 5, 10, []))
    assert a.account("r1").output_tokens == 0


def test_a_load_of_a_request_that_is_preempted_before_its_outcome_is_counted(a: MiniEngine, clock: Clock) -> None:
    admitted(a, range(30))
    a.worker.start_loads(a.half.build(StepView([Scheduled("r1", 30)]), clock()))
    a.half.build(StepView([], preempted=["r1"]), clock())
    assert (a.counter("loads_sync"), a.counter("load_blocks")) == (1, 7)
    assert a.engine.state.open_loads == {}


def test_a_request_that_is_preempted_at_its_first_token_is_accounted_as_it_was_admitted(a: MiniEngine, clock: Clock) -> None:
    admitted(a)
    before = a.counter("requests")
    a.half.build(StepView([Scheduled("r1", 30)]), clock())
    a.half.build(StepView([], preempted=["r1"]), clock())
    assert a.counter("requests") == before + 1
    assert a.sources("r1") == {"computed": 30}


# ---- the engine's own cache


def test_the_engines_own_cache_is_kept_while_there_is_no_clear(a: MiniEngine) -> None:
    a.ask("r1", range(100, 130))
    a.ask("r2", range(100, 130))
    assert a.sources("r2") == {"local": 28, "computed": 2}


def test_a_reset_that_the_engine_refused_is_asked_for_again(a: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse() -> bool:
        asked.append("reset")
        return False

    monkeypatch.setattr(a, "reset", refuse)
    a.page.write(ControlState(epoch=2))
    a.poll()
    for number in range(3):
        a.ask(f"r{number}", range(100, 130))
    assert len(asked) >= 3

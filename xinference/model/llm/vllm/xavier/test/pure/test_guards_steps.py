"""Guards of every step of the engine that nothing else here would miss: each test is red without one of them."""

from pathlib import Path
from threading import Thread

import pytest

from xinference.model.llm.vllm.xavier.connector import saving as saving_module
from xinference.model.llm.vllm.xavier.connector.metadata import Scheduled, StepView
from xinference.model.llm.vllm.xavier.connector.requests import Phase
from xinference.model.llm.vllm.xavier.connector.worker import TAINTED_MAX
from xinference.model.llm.vllm.xavier.directory.control import ControlState
from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine
from xinference.model.llm.vllm.xavier.transfer.jobs import SaveJob


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


@pytest.fixture
def b(tmp_path: Path, clock: Clock, a: MiniEngine) -> MiniEngine:
    """Knows a; its copier runs when told."""
    engine = MiniEngine(tmp_path, "b", clock, num_blocks=41)
    engine.know(a)
    engine.copying = False
    return engine


def broken() -> None:
    raise OSError("the copy failed")


# ---- loads and their outcome


def test_what_served_a_request_again_is_touched_up_to_its_last_block(a: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    monkeypatch.setattr(a.engine.copier, "submit_touch", lambda key_at, last: touched.append(last))
    a.ask("r1", range(30))
    assert touched == [6]


def test_a_load_that_seems_to_end_before_it_began_took_no_time(b: MiniEngine, clock: Clock) -> None:
    b.add("r1", range(30))
    b.step()
    b.half._requests["r1"].load_started_at = clock.now + 100.0
    b.copying = True
    b.run()
    assert b.counter("load_wait_ns") == 0


def test_a_leader_whose_load_failed_is_waited_for_no_more(b: MiniEngine, clock: Clock) -> None:
    b.add("leader", range(30))
    b.step()
    b.mover.during = broken
    b.copy()
    b.mover.during = lambda: None
    b.half.output(b.worker.take_finished(), b.worker.take_invalid(), clock())
    assert b.half.matched_tokens(b._view(b.add("r1", range(30))), 0, clock()) == (28, True)


def test_a_load_of_which_nothing_was_good_is_settled_when_its_request_is_asked_about_again(b: MiniEngine, clock: Clock) -> None:
    request = b.add("r1", range(30))
    b.step()
    b.mover.during = broken
    b.copy()
    assert b.half.matched_tokens(b._view(request), 0, clock()) == (0, False)
    assert b.counter("failed_loads") == 1


def test_a_request_that_is_asked_about_while_it_runs_was_preempted(a: MiniEngine, clock: Clock) -> None:
    request = a.add("r1", range(100, 130), max_tokens=9)
    a.step()
    a.step()
    a.half.matched_tokens(a._view(request), 0, clock())
    state = a.half._requests["r1"]
    assert (state.phase, state.block_ids, state.computed_tokens) == (Phase.WAITING, [], 0)
    assert state.high_water_tokens >= 30


def test_a_preemption_that_was_taken_note_of_is_not_one_again(a: MiniEngine, clock: Clock) -> None:
    request = a.add("r1", range(100, 130), max_tokens=9)
    a.step()
    a.half.matched_tokens(a._view(request), 0, clock())
    state = a.half._requests["r1"]
    offer = state.offer = object()  # type: ignore[assignment]
    a.half.build(StepView([], preempted=["r1"]), clock())
    assert state.offer is offer


# ---- what is saved


def test_blocks_on_their_way_are_bounded_over_all_requests_and_the_rest_waits(a: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_module, "FILLING_MAX_BLOCKS", 3)
    a.copying = False
    a.budget = 100
    a.add("r1", range(100, 108), max_tokens=9)
    a.add("r2", range(200, 230), max_tokens=9)
    for _ in range(3):
        a.step()
        assert a.engine.state.open_saves == {1: 3}
    a.copying = True
    a.run()
    assert a.counter("drops_queue_full") == 0
    assert a.counter("saves_blocks") > 7 + 3
    a.check()


def test_the_first_refusal_ends_a_chain_and_each_block_is_counted_once(tmp_path: Path, clock: Clock) -> None:
    engine = MiniEngine(tmp_path, "a", clock, cache_blocks=3)
    engine.ask("r1", range(12))
    tier = engine.engine.state.tier
    tier.pin([key for place in range(3) if (key := engine.engine.state.segment.key_of(place)) is not None])
    engine.ask("r2", range(100, 130))
    assert engine.counter("drops_capacity") + engine.counter("drops_parent") == 7


def test_the_engines_null_block_is_not_saved_in_whatever_epoch(tmp_path: Path, clock: Clock) -> None:
    engine = MiniEngine(tmp_path, "a", clock, epoch=0)
    engine.add("r1", range(12))
    state = engine.half._requests["r1"]
    state.block_ids = [0, 1, 2]
    with engine.engine.state.lock:
        assert engine.half._saves.plan([(state, 3)]) is None
    assert engine.counter("drops_epoch") == 3


def test_no_saves_are_named_of_a_request_whose_load_within_a_step_failed(a: MiniEngine) -> None:
    a.budget = 3  # the step that loads fills no block
    a.mover.during = broken
    a.add("r1", [*range(28), *range(60, 90)], max_tokens=12)
    a.step()
    a.mover.during = lambda: None
    a.budget = 32
    a.run()
    assert a.counter("failed_loads") == 1
    assert (a.counter("saves_blocks"), a.counter("drops_tainted")) == (7, 0)  # those of r0; none was named in vain


# ---- accounts


def test_only_local_blocks_of_before_a_clear_count_as_such(a: MiniEngine) -> None:
    a.add("busy", range(200, 212), max_tokens=40)
    a.step()
    a.page.write(ControlState(epoch=2))
    a.poll()
    a.add("r1", range(100, 130), max_tokens=9)
    a.step()
    a.step()
    a.add("r2", range(100, 130))
    a.step()
    a.step()
    assert a.sources("r2") == {"local": 28, "computed": 2}
    assert a.account("r2").pre_clear_tokens == 0


def test_a_prefill_whose_load_failed_completes_when_it_was_computed_again(a: MiniEngine, clock: Clock) -> None:
    a.mover.during = broken
    a.copying = False
    a.add("r1", range(30), max_tokens=3)
    a.step()
    a.mover.during = lambda: None
    a.copying = True
    failed_at = clock.now
    a.run()
    assert a.counter("failed_loads") == 1
    assert a.account("r1").first_token_us > failed_at * 1e6
    assert a.counter("requests") == 2  # r0 and this one


def test_a_prefill_that_is_followed_by_a_step_before_its_outcome_is_known_is_counted_once(tmp_path: Path, clock: Clock) -> None:
    engine = MiniEngine(tmp_path, "a", clock)
    view = engine._view(engine.add("r1", range(10)))
    assert engine.half.matched_tokens(view, 0, clock()) == (0, False)
    engine.half.allocated(view, [1, 2, 3], 0, clock())
    engine.half.build(StepView([Scheduled("r1", 10)]), clock())
    engine.half.build(StepView([Scheduled("r1", 11)]), clock())
    for _ in range(3):
        engine.half.output((), (), clock())
    assert engine.counter("requests") == 1


# ---- the worker half


def test_saves_of_a_step_that_loaded_badly_hold_neither_places_nor_room(a: MiniEngine) -> None:
    a.mover.during = broken
    a.copying = False
    a.add("r1", [*range(28), *range(60, 90)])
    a.step()
    assert a.counter("drops_tainted") > 0
    assert a.engine.state.open_saves == {}
    assert a.engine.state.tier.used_blocks == 7  # those of r0


def test_requests_that_are_remembered_for_a_failed_load_are_bounded(a: MiniEngine) -> None:
    for number in range(TAINTED_MAX + 9):
        a.worker._tainted.append(str(number))
    assert len(a.worker._tainted) == TAINTED_MAX


def test_the_saves_of_a_step_are_handed_over_once(a: MiniEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[SaveJob] = []
    monkeypatch.setattr(a.engine.copier, "submit_saves", handed.append)
    view = a._view(a.add("r1", range(100, 130)))
    assert a.half.matched_tokens(view, 0, clock()) == (0, False)
    a.half.allocated(view, list(range(1, 9)), 0, clock())
    meta = a.half.build(StepView([Scheduled("r1", 30)]), clock())
    a.worker.after_forward(meta)
    a.worker.after_forward(meta)
    assert [len(job.pieces) for job in handed] == [7]


def test_a_load_that_had_ended_well_is_not_failed_with_those_that_were_not_started(a: MiniEngine, clock: Clock) -> None:
    view = a._view(a.add("r1", range(30)))
    assert a.half.matched_tokens(view, 0, clock()) == (28, False)
    a.half.allocated(view, list(range(1, 9)), 28, clock())
    meta = a.half.build(StepView([Scheduled("r1", 30)]), clock())
    a.worker.start_loads(meta)
    a.worker.fail_loads(meta)
    assert meta.sync_loads[0].failed_blocks == set()
    assert a.worker.take_invalid() == set()


def test_a_load_that_a_dead_copier_owes_is_not_taken_up_after_all(b: MiniEngine) -> None:
    b.add("r1", range(30))
    b.step()
    (job,) = b.engine.state.open_loads.values()
    dead = Thread(target=int)
    dead.start()
    dead.join()
    b.engine.copier._thread = dead
    assert b.worker.take_finished() == {"r1"}
    assert job.cancelled
    assert b.worker.take_invalid() == {piece.block for piece in job.pieces}

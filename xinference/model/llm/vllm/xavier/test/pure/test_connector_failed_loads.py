"""Loads that fail or come too late, and hooks that raise: a recompute, one report, an account that adds up."""

from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.connector.metadata import StepMeta
from xinference.model.llm.vllm.xavier.errors import BookImbalance
from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def a(tmp_path: Path, clock: Clock) -> MiniEngine:
    """Has computed a prompt of 30 tokens."""
    engine = MiniEngine(tmp_path, "a", clock)
    engine.ask("r0", range(30))
    return engine


@pytest.fixture
def b(tmp_path: Path, clock: Clock, a: MiniEngine) -> MiniEngine:
    """Knows a; its copier runs when told."""
    engine = MiniEngine(tmp_path, "b", clock)
    engine.know(a)
    engine.copying = False
    return engine


def go(engine: MiniEngine) -> None:
    engine.copying = True
    engine.run()
    engine.poll()
    engine.check()


# ---- loads that fail


def overwrite(a: MiniEngine) -> None:
    """The owner fills its slab anew: every place is withdrawn and written over."""
    for number in range(20):
        a.ask(f"new-{number}", [150 + number] * 30)
        a.ask(f"again-{number}", [150 + number] * 30)


def test_bytes_that_the_owner_rewrites_during_the_copy_are_recomputed(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock, cache_blocks=7)
    a.ask("r0", range(30))
    b = MiniEngine(tmp_path, "b", clock)
    b.know(a)
    b.copying = False
    request = b.add("r1", range(30), max_tokens=3)
    b.step()
    b.mover.during = lambda: overwrite(a)
    b.copy()
    b.mover.during = lambda: None
    go(b)
    assert request.text == MiniEngine(tmp_path, "d", clock).ask("x", range(30), max_tokens=3).text
    assert b.counter("invalid_blocks") > 0
    assert b.counter("failed_loads") == 1
    assert sum(b.account("r1").sources) == 30


def test_after_one_failed_load_a_request_is_offered_nothing_again(tmp_path: Path, clock: Clock, a: MiniEngine, b: MiniEngine) -> None:
    b.add("r1", range(30))
    b.step()
    b.mover.during = lambda: (_ for _ in ()).throw(OSError("the copy failed"))
    b.copy()
    b.mover.during = lambda: None
    go(b)
    assert b.sources("r1") == {"computed": 30}
    assert (b.counter("loads_async"), b.counter("failed_loads"), b.counter("invalid_blocks")) == (1, 1, 7)
    assert b.counter("load_blocks") == 0
    b.reset()
    b.ask("r2", range(30))  # another request is
    assert b.sources("r2") == {"peer_cpu": 28, "computed": 2}


def test_a_load_that_fails_in_the_middle_counts_what_came_before(b: MiniEngine, a: MiniEngine) -> None:
    b.add("r1", range(30))
    b.step()
    (job,) = b.engine.state.open_loads.values()
    lost = job.pieces[4]
    place = a.engine.state.segment.place_of(lost.key)
    assert place is not None
    a.engine.state.segment.invalidate(place)
    b.copying = True
    b.run()
    assert b.sources("r1") == {"peer_cpu": 16, "computed": 14}
    assert b.counter("invalid_blocks") == 1
    assert b.counter("load_blocks") == 6


def test_a_synchronous_load_that_fails_is_recomputed_and_nothing_of_that_request_is_kept(a: MiniEngine) -> None:
    a.reset()
    a.add("r1", [*range(28), *range(60, 90)], max_tokens=12)
    a.mover.during = lambda: (_ for _ in ()).throw(OSError("the copy failed"))
    a.copying = False
    a.step()
    a.mover.during = lambda: None
    a.copying = True
    a.run()
    assert a.sources("r1") == {"computed": 58}
    assert a.counter("failed_loads") == 1
    assert a.counter("saves_blocks") == 7  # those of r0
    assert a.counter("drops_tainted") == 7  # what the step of the failed load would have saved
    assert a.counter("drops_copy_failed") == 0
    a.check()


def test_a_peer_that_died_before_the_copy_is_a_failed_load(b: MiniEngine, a: MiniEngine) -> None:
    b.add("r1", range(30))
    b.step()
    b.know()
    assert b.counter("peer_detached") == 1
    go(b)
    assert b.sources("r1") == {"computed": 30}
    assert b.counter("failed_loads") == 1


def test_a_copier_that_died_leaves_no_request_waiting(b: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    b.add("r1", range(30))
    b.step()
    monkeypatch.setattr(type(b.engine.copier), "alive", property(lambda self: False))
    b.step()
    b.step()
    b.run()
    assert b.sources("r1") == {"computed": 30}
    assert b.reported == ["r1"]


def test_a_load_is_reported_once_although_the_copier_names_it_twice(b: MiniEngine) -> None:
    b.add("r1", range(30))
    b.step()
    b.copy()
    (job,) = b.engine.copier.take_finished()
    b.engine.copier._finished.extend([job, job])
    assert b.worker.take_finished() == {"r1"}
    b.engine.copier._finished.append(job)
    assert b.worker.take_finished() == set()


# ---- hooks that raise


def test_an_allocation_that_raised_ends_as_a_failed_load(b: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    half = b.half
    allocated = half.allocated

    def broken(*arguments: object) -> None:
        request, block_ids, external, now = arguments
        if external:
            half.allocation_failed(request.request_id, block_ids, external, now)  # type: ignore[attr-defined]
        else:
            allocated(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(half, "allocated", broken)
    b.add("r1", range(30))
    go(b)
    assert b.sources("r1") == {"computed": 30}
    assert b.reported == ["r1"]


def test_an_engine_that_counts_on_tokens_which_were_not_offered_is_told_that_they_failed(a: MiniEngine, clock: Clock) -> None:
    request = a.add("r1", range(50, 70))
    view = a._view(request)
    assert a.half.matched_tokens(view, 0, clock()) == (0, False)
    a.half.allocated(view, [1, 2, 3, 4, 5], 8, clock())
    meta = a.half.rescue()
    a.worker.start_loads(meta)
    assert a.worker.take_invalid() == {1, 2}


def test_a_build_that_raised_starts_the_loads_and_publishes_no_save_under_way(a: MiniEngine, b: MiniEngine) -> None:
    b.add("r1", range(60, 90))
    b.add("r2", range(30))
    b.step()
    assert b.engine.copier.busy
    meta = b.half.rescue()
    assert meta == StepMeta((), (), None)
    go(b)
    assert b.counter("drops_source_reused") == 7
    assert b.sources("r2") == {"peer_cpu": 28, "computed": 2}


def test_loads_whose_start_raised_fail_and_are_reported(b: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    b.add("r1", range(30))
    start = b.worker.start_loads

    def broken(meta: StepMeta) -> None:
        if meta.async_loads:
            b.worker.fail_loads(meta)
        else:
            start(meta)

    monkeypatch.setattr(b.worker, "start_loads", broken)
    go(b)
    assert b.sources("r1") == {"computed": 30}
    assert b.reported == ["r1"]


def test_a_replica_whose_books_are_corrupt_goes_on_without_the_cache(a: MiniEngine, b: MiniEngine) -> None:
    with pytest.raises(BookImbalance) as caught:
        a.engine.state.tier.unpin([0])  # pinned by nobody
    a.engine.state.report("a test", caught.value)
    a.reset()
    a.ask("r1", range(30), max_tokens=5)
    assert a.sources("r1") == {"computed": 30}
    assert a.counter("drops_copy_failed") == 0  # nothing more was reserved in such books
    b.copying = True
    b.ask("r2", range(30))
    assert b.sources("r2") == {"computed": 30}  # peers find nothing of it any more
    a.know(b)
    a.reset()
    a.ask("r3", range(30))
    assert a.sources("r3") == {"computed": 30}  # nor is it given anything of theirs


def test_an_error_is_logged_once_with_its_traceback_and_counted_every_time(a: MiniEngine, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        a.engine.state.report("a hook", OSError("broken"))
    assert a.counter("hook_errors") == 3
    assert len([record for record in caplog.records if record.exc_info]) == 1

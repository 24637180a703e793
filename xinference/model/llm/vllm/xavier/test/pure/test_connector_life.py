"""Aborts, preemptions and shutdowns: every request gets one report, the right bytes, and an account that adds up."""

from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.directory.control import ControlState
from xinference.model.llm.vllm.xavier.test.mini_engine import BLOCK, Clock, MiniEngine
from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy


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


# ---- aborts


def test_a_request_aborted_while_its_load_is_queued_keeps_its_blocks_until_the_one_report(b: MiniEngine) -> None:
    b.add("r1", range(30))
    b.step()
    b.abort("r1")
    b.step()
    assert len(b.free) < b.num_blocks - 1
    go(b)
    assert b.reported == ["r1"]
    assert b.counter("load_batches") == 0  # cut short: nothing was copied for it


def test_blocks_of_an_aborted_load_are_written_by_nobody_after_the_report(b: MiniEngine, a: MiniEngine) -> None:
    b.add("r1", range(30))
    b.step()
    b.mover.during = lambda: b.abort("r1") if "r1" in b.requests and b.requests["r1"].status == "loading" else None
    b.copy()
    b.mover.during = lambda: None
    before = bytes(b.memory)
    b.step()
    assert b.reported == ["r1"]
    b.copy()
    assert bytes(b.memory) == before
    b.check()
    assert b.account("r1").state == "aborted"
    assert sum(b.account("r1").sources) == 30


def test_a_request_aborted_before_it_was_ever_asked_about_has_a_record(b: MiniEngine) -> None:
    b.add("r1", range(30))
    b.abort("r1")
    entry = b.account("r1")
    assert (entry.state, entry.prompt_tokens, sum(entry.sources)) == ("aborted", 30, 30)
    b.check()


def test_a_request_that_the_half_never_heard_of_may_end(b: MiniEngine, clock: Clock) -> None:
    b.half.finished("unknown", "finished", clock())
    assert b.records() == []


def test_an_abort_between_two_steps_leaves_what_was_saved(a: MiniEngine, b: MiniEngine) -> None:
    a.add("r2", range(100, 180))
    a.step()
    a.abort("r2")
    a.run()
    b.copying = True
    b.ask("r3", range(100, 180))
    assert b.sources("r3") == {"peer_cpu": 32, "computed": 48}


# ---- preemption


def small(directory: Path, clock: Clock, name: str = "c") -> MiniEngine:
    """Eleven blocks of four tokens: two requests that grow get in each other's way."""
    return MiniEngine(directory, name, clock, num_blocks=12, budget=64)


def until_preempted(engine: MiniEngine, request_id: str) -> None:
    engine.step()
    assert engine.requests[request_id].status == "running"
    while engine.requests[request_id].status == "running":
        engine.step()


def test_a_preempted_request_gets_its_prefix_back_from_the_slab_and_counts_only_what_it_computes_again(
    tmp_path: Path, clock: Clock
) -> None:
    c = small(tmp_path, clock)
    c.add("r1", range(18), max_tokens=12)
    c.add("r2", range(100, 118), max_tokens=12)
    c.run()
    entry = c.account("r2")
    assert entry.sources[-1] == 18  # the account was fixed before the preemption
    assert entry.output_tokens == 12
    assert 0 < entry.recomputed_tokens <= 2 * BLOCK  # all but the block that was not full came back
    assert c.counter("recomputed_tokens") == entry.recomputed_tokens
    assert c.counter("prompt_tokens_computed") == 36
    c.check()


def test_a_request_preempted_before_its_first_token_is_accounted_by_its_last_admission(tmp_path: Path, clock: Clock) -> None:
    c = MiniEngine(tmp_path, "c", clock, num_blocks=12, budget=6)
    c.add("r1", range(24), max_tokens=14)
    for _ in range(4):
        c.step()
    c.add("r2", range(100, 130), max_tokens=1)
    c.run()
    entry = c.account("r2")
    assert sum(entry.sources) == 30
    assert entry.recomputed_tokens == 0
    assert c.counter("requests") == 2
    c.check()


def test_a_prefix_that_was_cleared_while_its_request_was_preempted_is_saved_again(tmp_path: Path, clock: Clock) -> None:
    c = small(tmp_path, clock)
    c.add("r1", range(18), max_tokens=12)
    c.add("r2", range(100, 118), max_tokens=12)
    until_preempted(c, "r2")
    c.reset()
    c.page.write(ControlState(epoch=2))
    c.poll()
    c.run()
    d = MiniEngine(tmp_path, "d", clock, epoch=2)
    d.know(c, epoch=2)
    d.ask("r3", range(100, 118))
    assert d.sources("r3") == {"peer_cpu": 16, "computed": 2}


def test_a_preempted_request_whose_reload_fails_counts_all_that_it_computes_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = small(tmp_path, clock)
    c.add("r1", range(18), max_tokens=12)
    c.add("r2", range(100, 118), max_tokens=12)
    until_preempted(c, "r2")
    c.reset()
    computed = len(c.requests["r2"].tokens) - 1
    monkeypatch.setattr(c.mover, "load", lambda slab, copies: (_ for _ in ()).throw(OSError("the copy failed")))
    c.run()
    assert c.counter("failed_loads") == 1
    assert c.account("r2").recomputed_tokens == computed + 4  # the four of the step whose load failed were computed for nothing
    assert c.account("r2").sources[-1] == 18


def test_times_of_a_request_are_in_order_and_of_one_clock(b: MiniEngine, clock: Clock) -> None:
    began = clock.now
    b.copying = True
    b.ask("r1", range(30), max_tokens=3)
    entry = b.account("r1")
    times = [entry.queued_us, entry.scheduled_us, entry.load_started_us, entry.loaded_us, entry.first_token_us, entry.finished_us]
    assert times == sorted(times)
    assert int(began * 1e6) <= times[0]
    assert times[-2] < times[-1] <= int(clock.now * 1e6)
    assert (entry.state, entry.output_tokens) == ("finished", 3)


def test_a_block_handed_to_somebody_else_while_it_is_saved_is_not_published(tmp_path: Path, clock: Clock) -> None:
    c = MiniEngine(tmp_path, "c", clock, num_blocks=8)
    c.copying = False
    c.ask("r1", range(20))
    c.add("r2", range(100, 120))
    c.mover.during = c.step  # r2 takes the blocks of r1 in the middle of the copy
    c.copy()
    c.mover.during = lambda: None
    assert c.counter("drops_source_reused") > 0
    c.copying = True
    c.run()
    c.reset()
    c.ask("r3", range(20))
    c.check()


# ---- the end


def test_closing_drains_what_is_queued_and_leaves_the_segment_to_a_successor(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock)
    a.copying = False
    a.ask("r1", range(30))
    a.engine.close()
    a.engine.close()
    successor = MiniEngine(tmp_path, "a2", clock)
    successor.page.close()
    again = reopen(a, incarnation=2)
    assert again.counter("adopted_blocks") == 7
    again.ask("r2", range(30))
    assert again.sources("r2") == {"cpu_tier": 28, "computed": 2}
    again.check()


def reopen(engine: MiniEngine, incarnation: int) -> MiniEngine:
    engine.page.close()
    return MiniEngine(Path(engine.config.shm_dir), engine.config.replica_uid, engine.clock, incarnation=incarnation)


def test_nothing_is_reserved_once_the_copier_is_closing(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock)
    a.engine.copier.close(0.0)
    a.ask("r1", range(30))
    assert a.counter("saves_blocks") == 0
    assert a.counter("drops_closing") == 7
    a.check()


def test_a_batch_that_names_a_block_the_engine_does_not_have_moves_nothing(a: MiniEngine) -> None:
    before = bytes(a.memory)
    with pytest.raises(ValueError, match="block 40 is not one of 40"):
        a.mover.load(a.engine.state.slab, [BlockCopy(1, 0), BlockCopy(40, 1)])
    assert bytes(a.memory) == before

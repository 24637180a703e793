"""A clear: nothing older is served, saved or loaded anywhere, and that it is so is confirmed only when it is."""

from pathlib import Path
from typing import Any

import pytest

from xinference.model.llm.vllm.xavier.directory.control import ControlState
from xinference.model.llm.vllm.xavier.test.mini_engine import BLOCK, Clock, MiniEngine


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pair(directory: Path, clock: Clock, **kinds: Any) -> tuple[MiniEngine, MiniEngine]:
    a, b = MiniEngine(directory, "a", clock, **kinds), MiniEngine(directory, "b", clock, **kinds)
    for engine in (a, b):
        engine.know(a, b)
    return a, b


def clear(epoch: int, *engines: MiniEngine) -> None:
    """What the supervisor does: the same number on every control page."""
    for engine in engines:
        engine.page.write(ControlState(epoch=epoch, peers=tuple(other.entry for other in engines)))


def confirmed(engine: MiniEngine) -> int:
    return engine.header()["epoch_confirmed"]


def test_after_a_clear_nothing_is_found_and_the_bytes_are_free(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", range(30))
    clear(2, a, b)
    a.poll()
    b.poll()
    assert (confirmed(a), confirmed(b)) == (2, 2)
    assert a.header()["used_bytes"] == 0
    a.ask("r2", range(30))
    b.ask("r3", range(60, 90))
    assert a.sources("r2") == {"computed": 30}
    a.check()


def test_a_replica_that_knows_of_the_clear_finds_nothing_at_one_that_does_not_yet(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", range(30))
    clear(2, a, b)
    b.poll()
    b.ask("r2", range(30))
    assert b.sources("r2") == {"computed": 30}
    assert (confirmed(a), confirmed(b)) == (1, 2)


def test_a_replica_that_does_not_know_yet_finds_nothing_newer(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    clear(2, a, b)
    a.poll()
    a.ask("r1", range(30))
    b.ask("r2", range(30))
    assert b.sources("r2") == {"computed": 30}


def test_what_is_saved_after_a_clear_is_shared_again(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", range(30))
    clear(2, a, b)
    a.poll()
    b.poll()
    a.ask("r2", range(30))
    b.ask("r3", range(30))
    assert b.sources("r3") == {"peer_cpu": 28, "computed": 2}


def test_the_engines_own_cache_is_reset_when_a_request_comes_to_an_idle_engine(tmp_path: Path, clock: Clock) -> None:
    a, _ = pair(tmp_path, clock)
    a.ask("r1", range(30))
    clear(2, a)
    a.poll()
    a.ask("r2", range(30))
    assert a.sources("r2") == {"computed": 30}
    assert a.account("r2").pre_clear_tokens == 0


def test_local_hits_before_the_engines_cache_could_be_reset_are_reported_as_pre_clear(tmp_path: Path, clock: Clock) -> None:
    a, _ = pair(tmp_path, clock)
    a.add("busy", range(100, 112), max_tokens=30)
    a.step()
    a.add("r1", range(30))
    a.step()
    clear(2, a)
    a.poll()
    a.add("r2", range(30))
    a.step()
    a.step()
    assert a.sources("r2") == {"local": 28, "computed": 2}
    assert a.account("r2").pre_clear_tokens == 28
    assert a.counter("pre_clear_tokens") == 28
    a.run()
    a.ask("r3", range(30))
    assert a.sources("r3") == {"computed": 30}


def test_blocks_written_before_a_clear_are_not_saved_after_it(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.copying = False
    a.add("r1", range(30), max_tokens=12)
    a.step()
    a.copy()
    before = a.counter("saves_blocks")
    clear(2, a, b)
    a.poll()
    b.poll()
    a.copying = True
    a.run()
    assert a.counter("saves_blocks") == before  # the prompt's blocks are old, and what follows them has no parent
    assert a.counter("drops_epoch") + a.counter("drops_parent") > 0
    b.ask("r2", range(30))
    assert b.sources("r2") == {"computed": 30}
    a.check()


def test_a_prefix_that_was_local_before_the_clear_is_not_saved_under_a_new_request(tmp_path: Path, clock: Clock) -> None:
    a, _ = pair(tmp_path, clock)
    a.add("busy", range(100, 112), max_tokens=40)
    a.step()
    a.add("r1", range(30))
    a.step()
    clear(2, a)
    a.poll()
    saved = a.counter("saves_blocks")
    a.add("r2", range(30))
    a.step()
    a.step()
    assert a.counter("saves_blocks") == saved
    a.run()


def test_a_save_under_way_at_the_clear_is_given_back_and_confirmed_after(tmp_path: Path, clock: Clock) -> None:
    a, _ = pair(tmp_path, clock)
    a.copying = False
    a.ask("r1", range(30))
    clear(2, a)
    a.poll()
    assert confirmed(a) == 1
    a.copy()
    a.poll()
    assert confirmed(a) == 2
    assert a.counter("saves_blocks") == 0
    assert a.counter("drops_epoch") == 7
    assert a.header()["used_bytes"] == 0
    a.check()


def test_a_load_under_way_at_the_clear_is_recomputed(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", range(30))
    b.copying = False
    b.add("r2", range(30))
    b.step()
    clear(2, a, b)
    b.mover.during = b.poll
    b.copy()
    b.mover.during = lambda: None
    b.copying = True
    b.run()
    assert b.sources("r2") == {"computed": 30}
    b.poll()
    assert confirmed(b) == 2


def test_a_clear_waits_until_a_promised_synchronous_load_is_committed(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock)
    a.know()
    a.ask("r1", range(30))
    a.reset()
    request = a.add("r2", range(30))
    view = a._view(request)
    assert a.half.matched_tokens(view, 0, clock()) == (28, False)
    clear(2, a)
    a.poll()  # between the answer and the allocation
    assert a.counter("clears") == 0
    a.half.allocated(view, list(range(1, 9)), 28, clock())
    assert all(piece.place >= 0 for piece in a.engine.state.open_loads["r2"].pieces)
    a.half.rescue()
    a.poll()
    assert a.counter("clears") == 1
    assert confirmed(a) == 1  # the pinned places are still held


def test_no_synchronous_load_is_promised_once_a_clear_is_wanted(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock)
    a.ask("r1", range(30))
    a.reset()
    a.engine.state.epoch.ask(2)
    request = a.add("r2", range(30))
    assert a.half.matched_tokens(a._view(request), 0, clock()) == (0, False)


def test_a_busy_engine_clears_at_its_next_step_without_the_copier(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock)
    a.ask("r1", range(30))
    a.engine.state.epoch.ask(2)
    a.step()
    assert a.counter("clears") == 1


def test_an_older_epoch_is_never_gone_back_to(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock)
    clear(5, a)
    a.poll()
    clear(4, a)
    a.poll()
    assert a.engine.state.epoch.current == 5


def test_an_engine_that_starts_after_a_clear_starts_in_its_epoch(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock)
    a.ask("r1", range(30))
    clear(3, a)
    a.engine.close()
    a.page.close()
    again = MiniEngine(tmp_path, "a", clock, incarnation=2, epoch=3)
    assert again.counter("adopted_blocks") == 0
    again.ask("r2", range(2 * BLOCK))
    assert again.sources("r2") == {"computed": 8}

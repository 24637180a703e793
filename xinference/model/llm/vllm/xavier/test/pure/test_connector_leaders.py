"""Requests that miss the same prefix share one load: a leader loads, followers find a local hit."""

from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def b(tmp_path: Path, clock: Clock) -> MiniEngine:
    a = MiniEngine(tmp_path, "a", clock)
    a.ask("r0", range(30))
    b = MiniEngine(tmp_path, "b", clock, num_blocks=100, followers_max=2)
    b.know(a)
    b.copying = False
    return b


def test_a_burst_of_identical_prompts_is_fetched_once(b: MiniEngine) -> None:
    for name in ("r1", "r2", "r3"):
        b.add(name, range(30))
    b.step()
    assert [request.status for request in b.requests.values()] == ["loading", "waiting", "waiting"]
    b.copying = True
    b.run()
    assert b.counter("loads_async") == 1
    assert b.sources("r1") == {"peer_cpu": 28, "computed": 2}
    assert b.sources("r2") == b.sources("r3") == {"local": 28, "computed": 2}
    assert (b.counter("followers_waited"), b.counter("followers_gave_up")) == (2, 0)
    b.check()


def test_a_follower_whose_prompt_goes_on_loads_only_the_rest(b: MiniEngine, tmp_path: Path, clock: Clock) -> None:
    other = MiniEngine(tmp_path, "c", clock)
    other.ask("x", [*range(30), *range(60, 80)])
    b.know(*(engine for engine in (other,)))
    b.add("r1", range(29))
    b.add("r2", [*range(30), *range(60, 80)])
    b.step()
    b.copying = True
    b.run()
    assert b.sources("r1") == {"peer_cpu": 28, "computed": 1}
    assert b.sources("r2") == {"local": 28, "peer_cpu": 20, "computed": 2}


def test_no_more_than_a_few_wait_for_one_load(b: MiniEngine) -> None:
    for number in range(4):
        b.add(f"r{number}", range(30))
    b.step()
    assert b.counter("followers_waited") == 2
    assert sum(request.status == "loading" for request in b.requests.values()) == 2
    b.copying = True
    b.run()
    assert b.counter("loads_async") == 2
    b.check()


def test_the_next_asker_leads_when_the_leader_is_aborted(b: MiniEngine) -> None:
    b.add("r1", range(30))
    b.add("r2", range(30))
    b.step()
    b.abort("r1")
    b.step()
    assert b.requests["r2"].status == "loading"
    b.copying = True
    b.run()
    assert b.sources("r2") == {"peer_cpu": 28, "computed": 2}


def test_a_follower_waits_no_longer_than_a_late_leader_is_given(b: MiniEngine, clock: Clock) -> None:
    b.add("r1", range(30))
    b.add("r2", range(30))
    b.step()
    clock.now += 10.0
    b.step()
    assert b.requests["r2"].status == "loading"
    assert b.counter("followers_gave_up") == 1
    b.copying = True
    b.run()
    assert sum(b.account("r2").sources) == 30


def test_a_follower_of_a_load_that_fails_finds_its_own_way(b: MiniEngine) -> None:
    b.add("r1", range(30))
    b.add("r2", range(30))
    b.step()
    b.mover.during = lambda: (_ for _ in ()).throw(OSError("the copy failed"))
    b.copy()
    b.mover.during = lambda: None
    b.copying = True
    b.run()
    assert sum(b.account("r1").sources) == sum(b.account("r2").sources) == 30
    b.check()


def test_a_prompt_that_shares_nothing_does_not_wait(b: MiniEngine) -> None:
    b.add("r1", range(30))
    b.add("r2", range(200, 230))
    b.step()
    assert b.requests.get("r2") is None  # computed in that very step
    b.copying = True
    b.run()

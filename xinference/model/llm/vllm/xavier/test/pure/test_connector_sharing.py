"""Two engines in small on one directory: what one has saved the other loads, and nobody computes on a wrong byte."""

from pathlib import Path
from typing import Any

import pytest

from xinference.model.llm.vllm.xavier.test.mini_engine import BLOCK, Clock, MiniEngine


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pair(directory: Path, clock: Clock, **kinds: Any) -> tuple[MiniEngine, MiniEngine]:
    a, b = MiniEngine(directory, "a", clock, **kinds), MiniEngine(directory, "b", clock, **kinds)
    a.know(b)
    b.know(a)
    return a, b


def test_what_one_replica_computed_another_loads(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    first = a.ask("r1", range(30), max_tokens=3)
    assert a.sources("r1") == {"computed": 30}
    assert a.counter("saves_blocks") == 8  # 30 + 2 tokens were computed
    second = b.ask("r2", range(30), max_tokens=3)
    assert second.text == first.text
    assert b.sources("r2") == {"peer_cpu": 28, "computed": 2}
    assert (b.counter("loads_async"), b.counter("load_blocks"), b.counter("load_bytes")) == (1, 7, 7 * 64)
    assert b.counter("drops_peer_has") == 1  # the block it computed; those it loaded were no candidates
    a.check()
    b.check()


@pytest.mark.parametrize(
    ("num_tokens", "loaded"),
    [
        (1, 0),
        (BLOCK - 1, 0),
        (BLOCK, 0),
        (BLOCK + 1, BLOCK),
        (5 * BLOCK, 4 * BLOCK),
        (5 * BLOCK + 1, 5 * BLOCK),
        (5 * BLOCK - 1, 4 * BLOCK),
    ],
)
def test_never_the_last_prompt_token_and_never_a_partial_block(tmp_path: Path, clock: Clock, num_tokens: int, loaded: int) -> None:
    a, b = pair(tmp_path, clock)
    first = a.ask("r1", range(num_tokens), max_tokens=6)
    second = b.ask("r2", range(num_tokens), max_tokens=6)
    assert second.text == first.text
    assert b.sources("r2").get("peer_cpu", 0) == loaded
    assert sum(b.account("r2").sources) == num_tokens


def test_blocks_become_sharable_while_the_prompt_is_still_being_computed(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock, budget=8)
    a.add("r1", range(40))
    a.step()
    a.step()
    b.ask("r2", range(40))
    assert b.sources("r2") == {"peer_cpu": 16, "computed": 24}
    a.run()


def test_a_prefix_ends_where_prompts_fork(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", [*range(20), *range(100, 120)])
    b.ask("r2", [*range(20), *range(150, 170)])
    assert b.sources("r2") == {"peer_cpu": 20, "computed": 20}


def test_salts_do_not_meet_and_equal_salts_do(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", range(20), salt=b"tenant one")
    for name, salt, expected in (("r2", b"", 0), ("r3", b"tenant two", 0), ("r4", b"tenant one", 16)):
        b.ask(name, range(20), salt=salt)
        assert b.sources(name).get("peer_cpu", 0) == expected


def test_adapters_do_not_meet_although_the_engine_gives_them_equal_hashes(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", range(20), adapter=b"weights one")
    for name, adapter, expected in (("r2", b"", 0), ("r3", b"weights two", 0), ("r4", b"weights one", 16)):
        b.reset()
        b.ask(name, range(20), adapter=adapter)
        assert b.sources(name).get("peer_cpu", 0) == expected


def test_a_request_for_prompt_logprobs_is_given_nothing_and_still_saved(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", range(20))
    b.ask("r2", range(20), prompt_logprobs=True)
    assert b.sources("r2") == {"computed": 20}
    b.ask("r3", range(60, 80), prompt_logprobs=True)
    a.ask("r4", range(60, 80))
    assert a.sources("r4") == {"peer_cpu": 16, "computed": 4}


def test_a_short_prefix_comes_back_from_the_own_slab_within_the_step(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock)
    first = a.ask("r1", range(30))
    a.reset()
    second = a.ask("r2", range(30))
    assert second.text == first.text
    assert a.sources("r2") == {"cpu_tier": 28, "computed": 2}
    assert (a.counter("loads_sync"), a.counter("loads_async")) == (1, 0)
    a.check()


def test_a_long_prefix_comes_back_from_the_own_slab_beside_the_steps(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock, sync_load_max_blocks=6)
    a.ask("r1", range(30))
    a.reset()
    a.ask("r2", range(30))
    assert a.sources("r2") == {"cpu_tier": 28, "computed": 2}
    assert (a.counter("loads_sync"), a.counter("loads_async")) == (0, 1)
    a.check()


def test_the_engines_own_hit_comes_first_and_only_the_rest_is_loaded(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", range(40))
    b.ask("r2", range(13))
    b.ask("r3", range(40))
    assert b.sources("r3") == {"local": 12, "peer_cpu": 24, "computed": 4}


def test_a_local_hit_that_covers_all_full_blocks_asks_nobody(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", range(40))
    b.ask("r2", range(40))
    b.ask("r3", range(40))
    assert b.sources("r3") == {"local": 36, "computed": 4}
    assert b.counter("loads_async") == 1


def test_what_a_peer_keeps_is_not_kept_again(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", range(24))
    b.ask("r2", range(24), prompt_logprobs=True)  # computes all of it
    assert b.counter("saves_blocks") == 0
    assert b.counter("drops_peer_has") == 6


def test_a_conversation_that_changes_replicas_is_found_whole_although_each_keeps_a_part(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock, num_blocks=80)
    a.ask("r1", range(20))
    b.ask("r2", range(40))
    a.ask("r3", range(60))
    b.ask("r4", range(80))
    assert a.sources("r3") == {"local": 20, "peer_cpu": 20, "computed": 20}
    c = MiniEngine(tmp_path, "c", clock, num_blocks=80)
    c.know(a, b)
    c.ask("r5", range(80))
    assert c.sources("r5") == {"peer_cpu": 76, "computed": 4}
    assert c.counter("failed_loads") == 0
    a.reset()
    a.ask("r6", range(80))  # a search in halves over a's own slab steps over the gaps that b fills
    assert a.sources("r6") == {"cpu_tier": 40, "peer_cpu": 36, "computed": 4}
    assert a.counter("failed_loads") == 0
    for engine in (a, b, c):
        engine.check()


def test_a_gap_in_a_peers_chain_is_filled_from_wherever_the_block_is(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock, num_blocks=80)
    a.ask("r1", range(16))  # a keeps [0, 4)
    b.ask("r2", range(20))  # b keeps block 4 only, which a search in halves over [0, 16) does not look at
    a.ask("r3", range(64))  # a keeps [5, 16)
    c = MiniEngine(tmp_path, "c", clock, num_blocks=80)
    c.know(a, b)
    c.ask("r4", range(64))
    assert c.sources("r4") == {"peer_cpu": 60, "computed": 4}
    assert c.counter("invalid_blocks") == 0


def test_a_synchronous_load_stops_before_a_gap_in_the_own_chain(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock, num_blocks=80)
    a.ask("r1", range(16))
    b.ask("r2", range(20))
    a.ask("r3", range(64))
    a.know()  # b is no peer any more
    a.reset()
    a.ask("r4", range(64))
    assert a.sources("r4") == {"cpu_tier": 16, "computed": 48}
    assert (a.counter("loads_sync"), a.counter("failed_loads")) == (1, 0)


def test_asynchronous_loads_hold_no_more_than_their_share_of_the_engines_blocks(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock, num_blocks=41, async_load_max_share=0.25)
    a.ask("r1", range(36))
    a.ask("r2", range(100, 136))
    b.copying = False
    b.add("r3", range(36))
    b.add("r4", range(100, 136))
    b.step()
    held = sum(len(job.pieces) for job in b.engine.state.open_loads.values())
    assert held == 10
    assert b.counter("async_share_refused") == 0  # the second one was cut to what was left
    b.copying = True
    b.run()
    assert b.sources("r3") == {"peer_cpu": 32, "computed": 4}
    assert b.sources("r4") == {"peer_cpu": 8, "computed": 28}


def test_a_load_that_is_alone_may_be_larger_than_the_share(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock, num_blocks=41, async_load_max_share=0.1)
    a.ask("r1", range(36))
    b.ask("r2", range(36))
    assert b.sources("r2") == {"peer_cpu": 32, "computed": 4}


def test_a_load_without_a_share_left_is_refused_and_counted_once(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock, num_blocks=41, async_load_max_share=0.2)
    a.ask("r1", range(36))
    a.ask("r2", range(100, 136))
    b.copying = False
    b.add("r3", range(36))
    b.add("r4", range(100, 136))
    b.step()
    b.step()
    b.copying = True
    b.run()
    assert b.sources("r4") == {"computed": 36}
    assert b.counter("async_share_refused") == 1


def test_a_hit_that_is_slower_than_computing_is_not_loaded(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    a.ask("r1", range(30))
    b.engine.state.rates.observe_prefill(10**9, 1.0)
    b.ask("r2", range(30))
    assert b.sources("r2") == {"computed": 30}
    assert b.counter("not_worth_loading") == 1


def test_one_replica_alone_shares_with_nobody_and_serves(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock)
    a.know()
    a.ask("r1", range(30), max_tokens=9)
    a.ask("r2", range(30), max_tokens=9)
    assert a.sources("r2") == {"local": 28, "computed": 2}
    assert a.counter("peer_attach_refused") == 0


def test_the_tier_under_pressure_keeps_its_budget_and_whole_chains(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock, cache_blocks=10)
    for number in range(12):
        a.ask(f"r{number}", range(number * 20, number * 20 + 20))
        assert a.engine.state.tier.used_blocks <= 10
        a.check()
    assert a.counter("evictions") + a.counter("drops_admission") > 0
    b.ask("last", range(220, 240))
    assert sum(b.account("last").sources) == 20
    b.check()


def test_an_engine_without_anything_to_do_returns_the_same_empty_metadata_every_step(tmp_path: Path, clock: Clock) -> None:
    from xinference.model.llm.vllm.xavier.connector.metadata import EMPTY, StepView

    a = MiniEngine(tmp_path, "a", clock)
    assert a.half.build(StepView(()), clock()) is EMPTY


def test_a_running_request_wakes_the_half_only_at_the_end_of_a_block(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock)
    a.add("r1", range(9), max_tokens=8)
    a.step()
    assert a.half.wake_at == {"r1": 12}
    a.step()
    a.step()
    a.step()
    assert a.half.wake_at == {"r1": 16}
    a.run()
    assert a.half.wake_at == {}

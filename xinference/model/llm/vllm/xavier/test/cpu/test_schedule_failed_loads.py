"""Loads that fail under vLLM's real schedulers: no token that depends on one is ever delivered, saved, or found by another request."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from xinference.model.llm.vllm.xavier.connector.connector import XavierConnector
from xinference.model.llm.vllm.xavier.errors import ConfigRefused
from xinference.model.llm.vllm.xavier.test.vllm_schedule import LAYERS, KVConnectorRole, Replica
from xinference.model.llm.vllm.xavier.test.vllm_worker import BLOCK

Make = Callable[..., Replica]
LENGTH = 200


def prompt(number: int, length: int = LENGTH) -> list[int]:
    return [(number * 131 + index * 7) % 499 for index in range(length)]


def only_in_the_slab(make: Make, **kinds: Any) -> Replica:
    """A replica whose slab holds prompt 1, and whose engine does not."""
    a = make("a", **kinds)
    a.ask("r1", prompt(1), max_tokens=2)
    assert a.scheduler.reset_prefix_cache()
    return a


@pytest.mark.parametrize("good_batches", [0, 1, 2])
def test_a_copy_that_fails_is_computed_again_from_there(make: Make, good_batches: int) -> None:
    a = only_in_the_slab(make, batch_max_blocks=2)
    a.mover.load_fails.extend([False] * good_batches + [True])
    a.ask("r2", prompt(1), max_tokens=6)
    loaded = 2 * good_batches * BLOCK
    assert a.sources("r2") == {"computed": LENGTH - loaded} | ({"cpu_tier": loaded} if loaded else {})
    a.check()


def test_with_two_steps_in_flight_nothing_is_loaded_within_a_step(make: Make) -> None:
    """The second step is dispatched, and its token delivered, before the engine hears that the first one's load failed."""
    a = only_in_the_slab(make)
    a.ask("r2", prompt(1))
    assert (a.counter("loads_sync"), a.counter("loads_async")) == ((1, 0) if a.depth == 1 else (0, 1))


def test_two_requests_of_one_prefix_whose_load_fails_are_both_right_and_so_is_what_they_leave(make: Make) -> None:
    a, b = only_in_the_slab(make), make("b")
    b.know(a)
    a.mover.load_fails.append(True)
    a.add("r2", prompt(1), max_tokens=6)
    a.add("r3", prompt(1) + prompt(2), max_tokens=6)
    a.run()
    b.ask("r4", prompt(1) + prompt(2), max_tokens=6)
    assert b.sources("r4")["peer_cpu"] == (2 * LENGTH - 1) // BLOCK * BLOCK
    a.check()
    b.check()


def test_what_is_loaded_within_a_step_is_no_hit_for_others_in_the_same_step(make: Make) -> None:
    a = only_in_the_slab(make)
    a.add("r2", prompt(1), max_tokens=3)
    a.add("r3", prompt(1) + prompt(2, 20), max_tokens=3)
    scheduled = a.dispatch().num_scheduled_tokens
    assert set(scheduled) == ({"r2"} if a.depth == 1 else set())
    a.run()
    assert a.sources("r3")["local"] == LENGTH // BLOCK * BLOCK
    a.check()


@pytest.mark.parametrize("before_the_outcome", [True, False])
def test_a_request_aborted_on_a_failed_load_leaves_no_block_that_others_find(make: Make, before_the_outcome: bool) -> None:
    a = only_in_the_slab(make)
    a.mover.load_fails.append(True)
    a.add("r2", prompt(1), max_tokens=6)
    a.dispatch()
    if not before_the_outcome:
        a.outcome()
    a.abort("r2")
    a.outcome()
    a.ask("r3", prompt(1), max_tokens=6)
    assert sum(a.record("r2").sources) == LENGTH
    a.check()


def test_after_a_failed_load_a_request_is_offered_nothing_even_if_it_is_preempted(make: Make) -> None:
    a = only_in_the_slab(make, num_blocks=17)
    a.mover.load_fails.append(True)
    a.add("r2", prompt(1), max_tokens=60)
    a.add("r3", prompt(2), max_tokens=60)
    a.run(2000)
    assert a.counter("recomputed_tokens") > 0
    assert a.counter("failed_loads") == 1
    a.check()


def test_a_load_that_never_ends_because_the_helper_thread_died_is_computed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    a.ask("r1", prompt(1))
    b.copying = False
    b.add("r2", prompt(1), max_tokens=4)
    b.step()
    monkeypatch.setattr(type(b.engine.copier), "alive", False)
    b.run()
    assert b.sources("r2") == {"computed": LENGTH}
    monkeypatch.undo()
    b.engine.copier.run_pending()  # a late completion is of no consequence
    b.ask("r3", prompt(1), max_tokens=4)
    b.check()


def test_layers_of_two_kinds_are_refused_because_a_failed_block_of_theirs_would_kill_the_engine(make: Make) -> None:
    a = make("a")
    spec = a.kv_config.kv_cache_groups[0].kv_cache_spec
    groups = [KVCacheGroupSpec([name], spec) for name in LAYERS]
    with pytest.raises(ConfigRefused, match="2 KV groups"):
        XavierConnector(a.vllm_config, KVConnectorRole.WORKER, KVCacheConfig(64, a.kv_config.kv_cache_tensors, groups))

"""vLLM's real scheduler, synchronous and asynchronous, with the real connector: the main flows, byte for byte."""

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from xinference.model.llm.vllm.xavier.connector import guard
from xinference.model.llm.vllm.xavier.test.vllm_schedule import BLOCK, Replica

Make = Callable[..., Replica]


def prompt(number: int, length: int) -> list[int]:
    return [(number * 131 + index * 7) % 499 for index in range(length)]


def test_what_one_replica_computed_another_loads(make: Make) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    first = a.ask("r1", prompt(1, 200), max_tokens=5)
    second = b.ask("r2", prompt(1, 200), max_tokens=5)
    assert first == second
    assert len(first) == 5
    assert b.sources("r2") == {"peer_cpu": 192, "computed": 8}
    a.check()
    b.check()


def test_the_time_of_the_worker_halfs_hooks_is_counted_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a = make("a")
    monkeypatch.setattr(a.scheduler.connector._guard, "flush", lambda: None)
    monkeypatch.setattr(guard, "FLUSH_CALLS", 1)
    a.ask("r1", prompt(1, 100))
    assert a.counter("hook_calls") > 0
    assert a.counter("hook_ns_total") > 0


def test_every_length_around_a_block(make: Make) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1):
        first = a.ask(f"a{length}", prompt(length, length), max_tokens=3)
        assert b.ask(f"b{length}", prompt(length, length), max_tokens=3) == first
        expected = (length - 1) // BLOCK * BLOCK
        assert b.sources(f"b{length}").get("peer_cpu", 0) == expected
    b.check()


def test_a_full_repeat_is_served_locally_and_after_a_reset_from_the_own_slab(make: Make) -> None:
    a = make("a")
    first = a.ask("r1", prompt(1, 4 * BLOCK), max_tokens=4)
    assert a.ask("r2", prompt(1, 4 * BLOCK), max_tokens=4) == first
    assert a.sources("r2") == {"local": 96, "computed": 32}
    assert a.scheduler.reset_prefix_cache()
    assert a.ask("r3", prompt(1, 4 * BLOCK), max_tokens=4) == first
    assert a.sources("r3") == {"cpu_tier": 96, "computed": 32}
    assert (a.counter("loads_sync"), a.counter("loads_async")) == ((1, 0) if a.depth == 1 else (0, 1))
    a.check()


def test_salts_do_not_meet_and_equal_salts_do(make: Make) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    a.ask("r1", prompt(1, 100), salt="one")
    b.ask("r2", prompt(1, 100), salt="two")
    b.ask("r3", prompt(1, 100))
    b.ask("r4", prompt(1, 100), salt="one")
    assert [b.sources(name).get("peer_cpu", 0) for name in ("r2", "r3", "r4")] == [0, 0, 96]


def test_a_request_for_prompt_logprobs_is_given_nothing(make: Make) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    a.ask("r1", prompt(1, 100))
    request = b.add("r2", prompt(1, 100), prompt_logprobs=1)
    assert request.skip_reading_prefix_cache
    b.run()
    assert b.sources("r2") == {"computed": 100}


def test_a_request_aborted_while_loading_gives_its_blocks_back_once(make: Make) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    a.ask("r1", prompt(1, 200))
    b.copying = False
    b.add("r2", prompt(1, 200))
    b.step()
    assert b.scheduler.requests["r2"].status.name == "WAITING_FOR_REMOTE_KVS"
    b.abort("r2")
    b.step()
    b.copying = True
    b.run()
    b.check()
    assert sum(b.sources("r2").values()) == 200


def test_a_failed_load_is_recomputed_and_not_tried_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    first = a.ask("r1", prompt(1, 200), max_tokens=4)
    (peer,) = b.engine.state.peers.attached
    lost = iter(range(100))
    still = peer.reader.still
    monkeypatch.setattr(type(peer.reader), "still", lambda self, place, generation: next(lost) != 3 and still(place, generation))
    assert b.ask("r2", prompt(1, 200), max_tokens=4) == first
    assert b.sources("r2") == {"peer_cpu": 96, "computed": 104}
    assert (b.counter("loads_async"), b.counter("failed_loads"), b.counter("invalid_blocks")) == (1, 1, 1)


def test_a_load_of_which_nothing_is_good_is_recomputed_from_the_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    first = a.ask("r1", prompt(1, 200), max_tokens=4)
    (peer,) = b.engine.state.peers.attached
    monkeypatch.setattr(type(peer.reader), "still", lambda self, place, generation: False)
    assert b.ask("r2", prompt(1, 200), max_tokens=4) == first
    assert b.sources("r2") == {"computed": 200}
    b.engine.copier.poll()


def test_a_burst_of_identical_prompts_is_fetched_once(make: Make) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    a.ask("r0", prompt(1, 200))
    for number in range(4):
        b.add(f"r{number + 1}", prompt(1, 200), max_tokens=3)
    b.run()
    assert b.counter("loads_async") == 1
    assert b.counter("followers_waited") == 3
    assert len({tuple(b.text[f"r{number + 1}"]) for number in range(4)}) == 1
    assert [b.sources(f"r{number + 1}").get("local", 0) for number in range(4)] == [0, 192, 192, 192]
    b.check()


def test_preempted_requests_come_back_from_the_slab_with_the_same_text(make: Make) -> None:
    wide, tight = make("wide"), make("tight", num_blocks=17)
    for number in range(4):
        wide.add(f"r{number}", prompt(number, 90), max_tokens=50)
        tight.add(f"r{number}", prompt(number, 90), max_tokens=50)
    wide.run()
    tight.run(2000)
    assert {name: tight.text[name] for name in wide.text} == wide.text
    assert tight.counter("recomputed_tokens") > 0
    assert tight.counter("loads_sync") + tight.counter("loads_async") > 0
    for number in range(4):
        assert sum(tight.sources(f"r{number}").values()) == 90
    tight.check()


def test_a_clear_resets_the_engines_own_cache_too(make: Make) -> None:
    a = make("a")
    a.ask("r1", prompt(1, 100))
    a.know(epoch=2)
    a.ask("r2", prompt(1, 100))
    assert a.sources("r2") == {"computed": 100}
    assert a.engine.state.segment.counters.value("pre_clear_tokens") == 0
    a.ask("r3", prompt(1, 100))
    assert a.sources("r3") == {"local": 96, "computed": 4}
    a.check()


def test_a_hook_that_raises_costs_the_hit_and_not_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    first = a.ask("r1", prompt(1, 200), max_tokens=4)
    for hook in ("arrived", "matched_tokens", "allocated", "build", "output", "finished"):
        with monkeypatch.context() as patch:
            patch.setattr(type(b.scheduler.connector._half), hook, _broken)
            assert b.ask(f"r-{hook}", prompt(1, 200), max_tokens=4) == first
            b.scheduler.reset_prefix_cache()
    assert b.counter("hook_errors") > 6
    pool = b.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def _broken(*arguments: object) -> None:
    raise RuntimeError("broken on purpose")


def test_after_a_shutdown_hooks_answer_without_the_cache(make: Make) -> None:
    a = make("a")
    a.add("r1", prompt(1, 100))
    a.connector.shutdown()
    request = a.scheduler.requests["r1"]
    assert a.scheduler.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    a.scheduler.finish_requests("r1", request.status.FINISHED_ABORTED)
    a.scheduler.shutdown()

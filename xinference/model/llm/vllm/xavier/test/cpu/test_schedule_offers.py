"""What requests are offered under vLLM's real schedulers: never too much, never for ever, and not at others' expense."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from xinference.model.llm.vllm.xavier.directory.geometry import segment_geometry, total_bytes
from xinference.model.llm.vllm.xavier.test.schedule_world import BLOCK_BYTES
from xinference.model.llm.vllm.xavier.test.vllm_schedule import Replica
from xinference.model.llm.vllm.xavier.test.vllm_worker import BLOCK

Make = Callable[..., Replica]
LENGTH = 200
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1]


def prompt(number: int, length: int = LENGTH) -> list[int]:
    return [(number * 131 + index * 7) % 499 for index in range(length)]


def budget_of(places: int) -> int:
    return total_bytes(segment_geometry(places, BLOCK_BYTES, 64))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("local", [0, 1, 3])
def test_an_offer_never_covers_the_last_token_nor_part_of_a_block(make: Make, length: int, local: int) -> None:
    """Whole repeats, at every length around a block, and with part of it in the engine's own cache: an over-count kills the engine."""
    a, b = make("a"), make("b")
    b.know(a)
    a.ask("r1", prompt(1, length), max_tokens=3)
    b.ask("r2", prompt(1, local * BLOCK + 1))
    b.ask("r3", prompt(1, length), max_tokens=3)
    found = (length - 1) // BLOCK * BLOCK
    assert b.sources("r3").get("computed") == length - found
    assert b.sources("r3").get("peer_cpu", 0) == max(0, found - local * BLOCK)
    b.check()


def test_an_own_hit_in_the_middle_of_a_block_is_never_mixed_with_a_stored_one(make: Make) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    a.ask("r1", prompt(1, 4 * BLOCK + 5) + prompt(2, 3 * BLOCK))
    b.ask("r2", prompt(1, BLOCK + 26))
    b.ask("r3", prompt(1, 4 * BLOCK + 5) + prompt(2, 3 * BLOCK), max_tokens=4)
    assert b.sources("r3") == {"local": BLOCK, "peer_cpu": 6 * BLOCK, "computed": 5}
    b.check()


def test_ask_again_costs_the_same_at_every_one_of_thousands_of_attempts(make: Make) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    a.ask("r1", prompt(1))
    b.copying = False
    b.add("r2", prompt(1), max_tokens=3)
    b.add("r3", prompt(1), max_tokens=3)
    b.step()
    half, state = b.scheduler.connector._half, b.engine.state
    counts: list[int] = []
    reads = 0
    find = type(state.peers.attached[0].reader).longest_prefix

    def counted(*arguments: Any) -> int:
        nonlocal reads
        reads += 1
        return find(*arguments)

    for _ in range(3000):
        before = reads
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(state.peers.attached[0].reader), "longest_prefix", counted)
            answer = b.scheduler.connector.get_num_new_matched_tokens(b.requests["r3"], 0)
        counts.append(reads - before)
        assert answer == (None, False) or half._requests["r3"].offer is not None
    assert max(counts) <= 1
    assert state.open_saves == {}
    b.copying = True
    b.run()
    assert b.counter("followers_waited") == 1
    b.check()


def test_asynchronous_loads_leave_running_requests_their_blocks(make: Make) -> None:
    a, b = make("a", num_blocks=100), make("b", num_blocks=21)
    b.know(a)
    for number in range(8):
        a.ask(f"a{number}", prompt(number, 4 * BLOCK + 1))
    b.copying = False
    b.add("running", prompt(50, BLOCK), max_tokens=3 * BLOCK)
    b.step()
    for number in range(8):
        b.add(f"b{number}", prompt(number, 4 * BLOCK + 1), max_tokens=2)
    for _ in range(2 * 3 * BLOCK + 20):
        b.step()
    held = sum(len(job.pieces) for job in b.engine.state.open_loads.values())
    assert 0 < held <= 5
    assert b.text["running"] == b.expected["running"]
    assert b.requests["running"].num_preemptions == 0
    b.copying = True
    b.run(1000)
    assert b.counter("async_share_refused") > 0
    b.check()


def test_a_hit_that_fails_whenever_it_is_tried_delays_a_request_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make("a"), make("b", num_blocks=17)
    b.know(a)
    a.ask("r1", prompt(1))
    (peer,) = b.engine.state.peers.attached
    monkeypatch.setattr(type(peer.reader), "still", lambda self, place, generation: False)
    b.add("r2", prompt(1), max_tokens=70)
    b.add("r3", prompt(2), max_tokens=70)
    b.run(600)
    assert b.counter("loads_async") == 1
    assert b.counter("failed_loads") == 1
    monkeypatch.undo()
    b.check()


@pytest.mark.parametrize("copying", [True, False])
def test_identical_prompts_at_once_are_fetched_once(make: Make, copying: bool) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    a.ask("r0", prompt(1))
    b.copying = copying
    for number in range(1, 6):
        b.add(f"r{number}", prompt(1), max_tokens=3)
    for _ in range(6):
        b.step()
    b.copying = True
    b.run()
    assert (b.counter("loads_async"), b.counter("followers_waited")) == (1, 4)
    assert [b.sources(f"r{number}").get("local", 0) for number in range(1, 6)] == [0, 192, 192, 192, 192]
    b.check()


def test_a_leader_that_is_aborted_leaves_its_followers_to_themselves(make: Make) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    a.ask("r0", prompt(1))
    b.copying = False
    for number in range(1, 4):
        b.add(f"r{number}", prompt(1), max_tokens=3)
    b.step()
    b.abort("r1")
    b.copying = True
    b.run()
    assert [b.text[f"r{number}"] for number in (2, 3)] == [b.expected["r2"], b.expected["r3"]]
    b.check()


def test_a_tier_of_which_every_block_is_being_read_drops_saves_and_serves_requests(make: Make) -> None:
    a = make("a", cpu_cache_bytes=budget_of(6), request_ring_records=64, sync_load_max_blocks=1)
    a.ask("r1", prompt(1))
    assert a.scheduler.reset_prefix_cache()
    a.copying = False
    a.add("r2", prompt(1), max_tokens=3)
    a.step()
    assert a.engine.state.tier._book.counts().pinned == 6
    a.copying = True
    loads = a.engine.copier._run_loads
    a.engine.copier._run_loads = lambda: None  # type: ignore[method-assign]
    a.engine.copier._loads, held = type(a.engine.copier._loads)(), a.engine.copier._loads
    for number in range(2, 12):
        a.add(f"x{number}", prompt(number), max_tokens=2)
    for _ in range(40):
        a.step()
    assert a.counter("drops_capacity") > 0
    assert all(a.text[f"x{number}"] == a.expected[f"x{number}"] for number in range(2, 12))
    a.engine.copier._loads, a.engine.copier._run_loads = held, loads  # type: ignore[method-assign]
    a.run()
    assert a.sources("r2") == {"cpu_tier": 192, "computed": 8}
    assert a.engine.state.tier._book.counts().pinned == 0
    a.check()


def test_a_request_for_prompt_logprobs_is_given_nothing_while_its_neighbours_load(make: Make) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    a.ask("r1", prompt(1))
    b.add("r2", prompt(1), max_tokens=2)
    b.add("r3", prompt(1), max_tokens=2, prompt_logprobs=1)
    b.run()
    assert b.sources("r2") == {"peer_cpu": 192, "computed": 8}
    assert b.sources("r3") == {"computed": LENGTH}
    b.check()


def test_a_request_that_never_fits_takes_nothing_from_the_cache(make: Make) -> None:
    """A prompt that the model takes and the pool does not: vLLM lets it wait at the head of its queue, and it may be aborted."""
    a, b = make("a"), make("b", num_blocks=6)
    b.know(a)
    a.ask("r1", prompt(1))
    b.add("r2", prompt(1), max_tokens=2)
    for _ in range(50):
        b.step()
    assert b.status("r2") == "WAITING"
    assert b.engine.state.open_loads == {}
    b.abort("r2")
    b.ask("r3", prompt(1, 3 * BLOCK), max_tokens=2)
    assert b.sources("r3") == {"peer_cpu": 2 * BLOCK, "computed": BLOCK}
    b.check()


@pytest.mark.parametrize("shared", [True, False])
def test_tokens_are_those_of_an_engine_that_has_nothing_to_share(make: Make, shared: bool) -> None:
    """The text that every scenario is compared with, from the same schedulers with no peer and a slab for one block."""
    a = make("a", **({} if shared else {"cpu_cache_bytes": budget_of(1), "request_ring_records": 64}))
    for number in range(4):
        a.add(f"r{number}", prompt(number % 2), max_tokens=20)
    a.run()
    a.check()

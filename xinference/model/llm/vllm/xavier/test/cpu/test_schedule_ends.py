"""Requests that end, are aborted or are preempted at every stage of a load or a save, under vLLM's real schedulers."""

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from xinference.model.llm.vllm.xavier.test.vllm_schedule import Replica
from xinference.model.llm.vllm.xavier.test.vllm_worker import BLOCK, true_text

Make = Callable[..., Replica]
LENGTH = 200
STAGES = ("waiting", "queued", "copied", "reported", "heard", "running")


def prompt(number: int, length: int = LENGTH) -> list[int]:
    return [(number * 131 + index * 7) % 499 for index in range(length)]


def two(make: Make, **kinds: int) -> tuple[Replica, Replica]:
    """One replica that has computed prompt 1, and one whose helper thread does nothing by itself."""
    a, b = make("a"), make("b", **kinds)
    b.know(a)
    a.ask("r1", prompt(1), max_tokens=2)
    b.copying = False
    return a, b


def advance(b: Replica, stage: str) -> None:
    """Bring the load of the one request to this stage."""
    steps: dict[str, Callable[[], object]] = {
        "queued": lambda: in_turn(b),
        "copied": b.engine.copier.run_pending,
        "reported": lambda: in_turn(b),
        "heard": lambda: drain(b),
        "running": lambda: in_turn(b),
    }
    for name in STAGES[1 : STAGES.index(stage) + 1]:
        steps[name]()


def in_turn(b: Replica) -> None:
    """Dispatch the next step; outcomes that stand in the way are reported first."""
    while len(b.in_flight) >= b.depth:
        b.outcome()
    b.dispatch()


def drain(b: Replica) -> None:
    while b.in_flight:
        b.outcome()


def finish(b: Replica) -> None:
    b.copying = True
    b.engine.copier.run_pending()
    b.run()
    b.engine.copier.run_pending()


@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_at_any_stage_of_a_load_frees_each_block_once_and_spoils_nothing(make: Make, stage: str) -> None:
    _, b = two(make)
    b.add("r2", prompt(1), max_tokens=5)
    advance(b, stage)
    b.abort("r2")
    b.add("r3", prompt(1), max_tokens=5)
    b.add("r4", prompt(2), max_tokens=5)
    finish(b)
    assert sum(b.record("r2").sources) == LENGTH
    assert b.record("r2").state == "aborted"
    assert b.text["r3"] == b.expected["r3"]
    b.check()


@pytest.mark.parametrize("stage", STAGES[1:])
def test_blocks_of_an_aborted_load_go_to_nobody_until_the_load_has_ended(make: Make, stage: str) -> None:
    """A pool that is just large enough: the next request needs the very blocks that the load fills."""
    _, b = two(make, num_blocks=9)
    b.add("r2", prompt(1), max_tokens=5)
    advance(b, stage)
    b.abort("r2")
    b.add("r3", prompt(3), max_tokens=5)
    for _ in range(4):
        b.step()
    if stage == "queued":
        assert "r3" not in b.text
        assert b.status("r2") == "FINISHED_ABORTED"
    finish(b)
    assert b.text["r3"] == b.expected["r3"]
    b.check()


@pytest.mark.parametrize("max_tokens", [1, 2, BLOCK])
@pytest.mark.parametrize("kind", ["length", "stop"])
def test_a_request_that_ends_while_its_saves_are_under_way_leaves_right_blocks(make: Make, max_tokens: int, kind: str) -> None:
    """With two steps in flight the one after a stop has computed a token that nobody asked for."""
    a, b = make("a"), make("b")
    b.know(a)
    a.copying = False
    tokens = prompt(1, 7 * BLOCK - 2)
    stops = true_text(tokens, "", max_tokens)[-1:] if kind == "stop" else []
    a.add("r1", tokens, max_tokens if kind == "length" else 500, stop_token_ids=stops)
    a.run()
    assert len(a.text["r1"]) == max_tokens
    a.add("r2", prompt(2), max_tokens=5)
    a.run()
    a.engine.copier.run_pending()
    b.ask("r3", tokens + a.text["r1"], max_tokens=2)
    assert b.sources("r3")["peer_cpu"] >= 6 * BLOCK
    a.check()
    b.check()


@pytest.mark.parametrize("event", ["abort", "finish", "preempt"])
def test_blocks_that_are_handed_out_again_in_the_middle_of_their_save_are_not_published(make: Make, event: str) -> None:
    a, b = make("a", num_blocks=10, budget=256), make("b")
    b.know(a)
    a.copying = False
    if event == "preempt":  # grows, and the younger one gives way
        a.add("w", prompt(7, BLOCK), max_tokens=7 * BLOCK)
    a.add("r1", prompt(1), max_tokens=1 if event == "finish" else 80)
    in_turn(a)

    def others_take_the_blocks() -> None:
        if event == "abort":
            a.abort("r1")
        for name in () if event == "preempt" else ("x", "y"):
            a.add(name, prompt(ord(name)))
        for _ in range(300 if event == "preempt" else 8):
            a.step()

    a.mover.during_save = others_take_the_blocks
    a.engine.copier.run_one()
    finish(a)
    assert a.counter("drops_source_reused") + a.counter("drops_parent") > 0
    b.ask("r2", prompt(1), max_tokens=3)
    a.check()
    b.check()


def test_a_request_preempted_with_saves_under_way_is_admitted_again_with_a_hit(make: Make) -> None:
    a = make("a", num_blocks=9)
    a.copying = False
    for name in ("r1", "r2"):
        a.add(name, prompt(ord(name[1]), 3 * BLOCK), max_tokens=70)
    for _ in range(60):
        a.step()
    assert a.engine.copier.busy
    finish(a)
    for name in ("r1", "r2"):
        assert a.text[name] == a.expected[name]
    assert a.counter("recomputed_tokens") > 0
    a.check()


def test_a_preempted_request_gets_its_prefix_from_the_tier_when_it_resumes(make: Make) -> None:
    """Two prompts of two blocks and two tokens in a pool of seven blocks, all of which the older one takes in the end."""
    a = make("a", num_blocks=8)
    a.add("r1", prompt(1, 2 * BLOCK + 2), max_tokens=5 * BLOCK - 2)
    a.add("r2", prompt(2, 2 * BLOCK + 2), max_tokens=2 * BLOCK)
    a.run(2000)
    assert a.counter("loads_sync") + a.counter("loads_async") == 1
    assert a.counter("load_blocks") == 2
    assert 0 < a.counter("recomputed_tokens") <= BLOCK
    a.check()


def test_after_a_load_that_no_block_is_left_for_the_request_waits_and_is_right(make: Make) -> None:
    """The load brings all whole blocks; the one for the rest of the prompt is not free in the step that goes on with it."""
    _, b = two(make, num_blocks=12)
    b.add("busy", prompt(5, BLOCK), max_tokens=3 * BLOCK)
    in_turn(b)
    b.add("r2", prompt(1), max_tokens=5)
    advance(b, "copied")
    b.add("r3", prompt(6, 2 * BLOCK), max_tokens=2 * BLOCK)
    finish(b)
    for name in ("busy", "r2", "r3"):
        assert b.text[name] == b.expected[name]
    b.check()


def test_the_one_step_after_the_last_request_publishes_what_is_left(make: Make) -> None:
    a, b = make("a"), make("b")
    b.know(a)
    a.add("r1", prompt(1, 3 * BLOCK))
    steps = 0
    while a.scheduler.has_requests() or a.in_flight:
        a.step()
        steps += 1
    assert steps <= 4
    assert a.counter("saves_blocks") == 3
    assert b.ask("r2", prompt(1, 3 * BLOCK)) == a.text["r1"]
    assert b.sources("r2") == {"peer_cpu": 2 * BLOCK, "computed": BLOCK}
    a.check()


def test_a_blocks_hash_is_no_proof_of_its_bytes(make: Make) -> None:
    """vLLM hashes what it schedules. What is aborted before its outcome was written all the same, and found again with right bytes."""
    a = make("a", budget=64)
    a.add("r1", prompt(1), max_tokens=5)
    in_turn(a)
    a.abort("r1")
    a.add("r2", prompt(1), max_tokens=5)
    a.add("r3", prompt(1) + prompt(2), max_tokens=5)
    a.run()
    a.check()


def test_a_load_whose_peer_gives_up_the_blocks_meanwhile_is_computed_instead(make: Make) -> None:
    a, b = two(make, num_blocks=64)
    places = a.engine.state.segment.geometry.num_places

    def peer_fills_up() -> None:
        for number in range(places // 20 + 2):
            a.ask(f"x{number}", [(number * 31 + index * 11) % 997 + 500 for index in range(24 * BLOCK)])

    b.mover.during_load = peer_fills_up
    b.add("r2", prompt(1), max_tokens=5)
    advance(b, "queued")
    finish(b)
    assert a.counter("evictions") > 0
    assert b.counter("failed_loads") == 1
    assert b.text["r2"] == b.expected["r2"]
    a.check()
    b.check()


def test_a_clear_in_the_middle_of_a_load_leaves_nothing_of_it(make: Make) -> None:
    a, b = two(make)
    b.mover.during_load = lambda: (a.know(epoch=2), b.know(a, epoch=2))  # type: ignore[assignment, return-value]
    b.add("r2", prompt(1), max_tokens=5)
    advance(b, "queued")
    finish(b)
    assert b.sources("r2") == {"computed": LENGTH}
    b.check()


def test_a_peer_killed_in_the_middle_of_a_load_costs_at_most_the_load(make: Make) -> None:
    a, b = two(make)
    b.mover.during_load = a.kill
    b.add("r2", prompt(1), max_tokens=5)
    advance(b, "queued")
    finish(b)
    assert b.text["r2"] == b.expected["r2"]
    b.check()

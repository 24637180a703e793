"""Guards of offers, waits and commits that nothing else here would miss: each test is red without one of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.connector import lookup as lookup_module
from xinference.model.llm.vllm.xavier.connector.lookup import Lookup
from xinference.model.llm.vllm.xavier.connector.requests import Hit, KeyChain
from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine
from xinference.model.llm.vllm.xavier.transfer.jobs import OWN_SLAB, UNPINNED, LoadJob, LoadPiece


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


def question(engine: MiniEngine, request_id: str, tokens: Sequence[int] = range(30), local_tokens: int = 0) -> tuple[int | None, bool]:
    """What the half answers to a request that arrives now."""
    return engine.half.matched_tokens(engine._view(engine.add(request_id, tokens)), local_tokens, engine.clock())


# ---- what is offered


def test_to_a_local_hit_that_ends_within_a_block_nothing_is_offered(a: MiniEngine) -> None:
    assert question(a, "r1", local_tokens=2) == (0, False)


def test_blocks_whose_hash_is_not_known_are_not_looked_for(a: MiniEngine, clock: Clock) -> None:
    view = a._view(a.add("r1", range(30)))
    assert a.half.matched_tokens(replace(view, request_id="r2", block_hashes=view.block_hashes[:3]), 0, clock()) == (12, False)


def test_what_was_found_before_a_clear_is_not_promised_after_it(a: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Lookup.hits

    def and_then_a_clear(self: Lookup, chain: KeyChain, start: int, stop: int) -> tuple[Hit, ...]:
        hits = found(self, chain, start, stop)
        a.engine.state.epoch.ask(2)
        assert a.engine.state.epoch.apply()
        return hits

    monkeypatch.setattr(Lookup, "hits", and_then_a_clear)
    assert question(a, "r1") == (0, False)
    assert not a.engine.state.epoch.promised


def test_loads_within_a_step_take_no_share_from_those_beside_the_steps(tmp_path: Path, clock: Clock, a: MiniEngine, b: MiniEngine) -> None:
    a.ask("r1", range(100, 136))
    b.copying = True
    b.ask("own", range(200, 230))
    b.reset()
    b.copying = False
    b.budget = 64
    b.add("within", range(200, 230))
    b.add("beside", range(100, 136))
    b.step()
    assert b.counter("loads_sync") + len(b.engine.state.open_loads) >= 1
    b.copying = True
    b.run()
    assert b.sources("within") == {"cpu_tier": 28, "computed": 2}
    assert b.sources("beside") == {"peer_cpu": 32, "computed": 4}


def test_a_refusal_that_no_longer_holds_is_not_counted(b: MiniEngine, clock: Clock) -> None:
    shared = b.engine.state
    piece = LoadPiece(1, shared.segment.key_of(0) or KeyChain([bytes(16)], b"")[0], "a", UNPINNED)
    shared.open_loads["other"] = LoadJob("other", 1, [piece] * 10, True)
    assert question(b, "r1") == (0, False)
    del shared.open_loads["other"]
    view = b._view(b.requests["r1"])
    assert b.half.matched_tokens(view, 0, clock()) == (28, True)
    b.half.allocated(view, list(range(1, 8)), 28, clock())
    assert b.counter("async_share_refused") == 0


def test_a_prefix_broken_into_many_pieces_is_cut(a: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = Lookup(a.engine)
    monkeypatch.setattr(lookup, "_own", lambda chain, start, stop: Hit("cpu_tier", OWN_SLAB, start, start + 1))
    assert len(lookup.hits(KeyChain([bytes(16)] * 40, b""), 0, 40)) == lookup_module.MAX_RUNS


# ---- who waits


def test_a_request_that_may_not_load_waits_for_nobodys_load(b: MiniEngine, clock: Clock) -> None:
    b.add("leader", range(30))
    b.step()
    assert question(b, "r1") == (None, False)
    b.half._requests["r1"].barred = True
    assert b.half.matched_tokens(b._view(b.requests["r1"]), 0, clock()) == (0, False)


def test_a_prompt_without_a_full_block_waits_for_nobody(b: MiniEngine) -> None:
    b.add("leader", range(30))
    b.step()
    assert question(b, "short", range(3)) == (0, False)


def test_a_leader_that_has_its_blocks_is_waited_for_no_more(b: MiniEngine) -> None:
    b.copying = True
    b.add("leader", range(30), max_tokens=9)
    for _ in range(3):
        b.step()
    assert b.requests["leader"].status == "running"
    assert question(b, "r1") == (28, True)


def test_who_got_its_blocks_is_remembered_neither_as_leader_nor_as_follower(b: MiniEngine) -> None:
    b.add("leader", range(30), max_tokens=9)
    b.add("follower", range(30), max_tokens=9)
    b.step()
    b.copying = True
    for _ in range(4):
        b.step()
    assert {request.status for request in b.requests.values()} == {"running"}
    board = b.half._loads._board
    assert (board._key_by_leader, board._key_by_follower, board._deadline_by_follower) == ({}, {}, {})


# ---- what is committed


def test_another_count_than_was_offered_is_reported_as_a_load_that_failed(a: MiniEngine, clock: Clock) -> None:
    view = a._view(a.add("r1", range(30)))
    assert a.half.matched_tokens(view, 0, clock()) == (28, False)
    a.half.allocated(view, list(range(1, 9)), 24, clock())
    job = a.engine.state.open_loads["r1"]
    assert (list(job.pieces), job.failed_blocks) == ([], set(range(1, 7)))

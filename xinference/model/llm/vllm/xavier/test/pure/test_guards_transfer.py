"""Guards of copies, the helper thread and peers that nothing else here would miss: each test is red without one of them."""

import logging
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.connector.metadata import StepView
from xinference.model.llm.vllm.xavier.directory.control import ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine
from xinference.model.llm.vllm.xavier.test.pure.test_tier import CHAIN, save
from xinference.model.llm.vllm.xavier.transfer.copier import TOUCH_QUEUE
from xinference.model.llm.vllm.xavier.transfer.jobs import OWN_SLAB, LoadJob, LoadPiece


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def a(tmp_path: Path, clock: Clock) -> MiniEngine:
    return MiniEngine(tmp_path, "a", clock, num_blocks=80)


def broken() -> None:
    raise OSError("the copy failed")


# ---- loads


def test_a_load_whose_mark_cannot_be_followed_is_recomputed(
    tmp_path: Path, clock: Clock, a: MiniEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    a.ask("r1", range(30))
    b = MiniEngine(tmp_path, "b", clock)
    b.know(a)
    monkeypatch.setattr(b.mover, "mark", lambda: 1)
    monkeypatch.setattr(b.mover, "follow", lambda mark: broken())
    b.ask("r2", range(30))
    assert b.sources("r2") == {"computed": 30}
    assert b.counter("failed_loads") == 1
    b.check()


def test_a_gap_in_the_own_chain_is_filled_by_a_peer_and_counted_for_it(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock, num_blocks=80, sync_load_max_blocks=1)
    b = MiniEngine(tmp_path, "b", clock, num_blocks=80)
    a.know(b)
    b.know(a)
    a.ask("r1", range(16))
    b.ask("r2", range(20))  # b keeps block 4 only, which a search in halves over [0, 16) does not look at
    a.ask("r3", range(64))
    a.reset()
    a.ask("r4", range(64))
    assert a.sources("r4") == {"cpu_tier": 56, "peer_cpu": 4, "computed": 4}
    assert a.counter("hook_errors") == 0
    a.check()  # what was pinned for its copy is pinned no more


def test_what_a_peer_wrote_after_a_clear_is_not_loaded_by_who_has_not_heard_of_it(tmp_path: Path, clock: Clock, a: MiniEngine) -> None:
    a.ask("r1", range(30))
    b = MiniEngine(tmp_path, "b", clock)
    b.know(a)
    b.copying = False
    b.add("r2", range(30))
    b.step()
    a.page.write(ControlState(epoch=2))
    a.poll()
    a.reset()
    a.ask("r3", range(30))
    b.copying = True
    b.run()
    assert b.sources("r2") == {"computed": 30}
    assert b.counter("invalid_blocks") == 7


def test_a_load_lets_its_places_go_once(a: MiniEngine) -> None:
    a.ask("r1", range(30))
    state = a.engine.state
    (place,) = state.tier.pin([(key := state.segment.key_of(0)) or BlockKey(0, 0)])
    job = LoadJob("r2", 1, [LoadPiece(1, key or BlockKey(0, 0), OWN_SLAB, place)], True)
    state.end_load(job, 1.0, 2.0)
    state.end_load(job, 3.0, 4.0)
    assert (job.started, job.ended) == (1.0, 2.0)
    state.tier.check()


def test_after_the_end_there_is_nothing_to_count_in(a: MiniEngine) -> None:
    a.engine.close()
    a.engine.state.count("requests")
    a.engine.state.report("a hook", RuntimeError("too late"))


# ---- saves


def test_saves_are_copied_in_bounded_batches(tmp_path: Path, clock: Clock) -> None:
    engine = MiniEngine(tmp_path, "a", clock, batch_max_blocks=2)
    engine.ask("r1", range(28))
    assert (engine.counter("saves_blocks"), engine.counter("save_batches")) == (7, 4)


def test_a_save_that_raised_publishes_nothing_and_frees_its_places(a: MiniEngine) -> None:
    a.mover.during = broken
    a.ask("r1", range(30))
    assert (a.counter("saves_blocks"), a.counter("drops_copy_failed")) == (0, 7)
    assert a.header()["used_bytes"] == 0
    a.check()


def test_nothing_is_published_once_the_books_were_found_corrupt(a: MiniEngine) -> None:
    def notice() -> None:
        a.engine.state.corrupted = True

    a.mover.during = notice
    a.ask("r1", range(30))
    assert a.counter("saves_blocks") == 0
    assert a.counter("drops_copy_failed") == 7


def test_a_load_does_not_wait_for_the_end_of_a_long_save(
    tmp_path: Path, clock: Clock, a: MiniEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    a.ask("r0", range(30))
    b = MiniEngine(tmp_path, "b", clock, batch_max_blocks=1)
    b.know(a)
    b.copying = False
    b.ask("r1", range(100, 130))
    order: list[str] = []
    save_batch, load_batch = b.mover.save, b.mover.load

    def saving(*arguments: object) -> None:
        order.append("save")
        save_batch(*arguments)  # type: ignore[arg-type]
        if len(order) == 1:
            b.add("r2", range(30))
            b.step()

    monkeypatch.setattr(b.mover, "save", saving)
    monkeypatch.setattr(b.mover, "load", lambda *arguments: (order.append("load"), load_batch(*arguments))[1])
    b.copy()
    assert order[:9] == ["save", *["load"] * 7, "save"]


def test_saves_that_are_dropped_at_the_end_hold_neither_places_nor_room(a: MiniEngine) -> None:
    a.copying = False
    a.ask("r1", range(30))
    assert a.engine.state.open_saves == {1: 7}
    a.engine.copier._drop_saves()
    assert a.counter("drops_closing") == 7
    assert a.engine.state.open_saves == {}
    assert a.engine.state.tier.used_blocks == 0


# ---- touches and clears


def test_touches_that_wait_are_bounded(a: MiniEngine) -> None:
    a.ask("r1", range(30))
    for _ in range(TOUCH_QUEUE + 9):
        a.engine.copier.submit_touch(CHAIN.__getitem__, 0)
    assert len(a.engine.copier._touches) == TOUCH_QUEUE


def test_a_fragment_whose_head_is_kept_elsewhere_is_touched_from_its_own_beginning(a: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = a.engine.state.tier
    save(tier, CHAIN[4:7])
    touched: list[list[BlockKey]] = []
    monkeypatch.setattr(tier, "touch", touched.append)
    a.engine.copier.submit_touch(CHAIN.__getitem__, 5)
    a.copy()
    assert touched == [CHAIN[4:6]]


def test_a_promise_that_was_not_taken_up_ends_with_its_schedule(a: MiniEngine, clock: Clock) -> None:
    a.ask("r1", range(30))
    a.reset()
    assert a.half.matched_tokens(a._view(a.add("r2", range(30))), 0, clock()) == (28, False)
    a.half.build(StepView([]), clock())  # the engine had no room
    a.page.write(ControlState(epoch=2))
    a.poll()
    assert a.counter("clears") == 1


# ---- peers


def test_a_peer_that_is_named_again_is_tried_at_once_and_warned_of_again(
    a: MiniEngine, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    peers, late = a.engine.state.peers, PeerEntry("w", "late", 9)
    for wanted in ([late], [], [late]):
        peers.want(wanted)
        peers.refresh(clock.now)
    assert a.counter("peer_attach_refused") == 2
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 2


def test_the_segment_of_a_dead_peer_is_not_attached(tmp_path: Path, clock: Clock, a: MiniEngine) -> None:
    other = MiniEngine(tmp_path, "b", clock)
    other.engine.state.segment._header[17] += 1  # the start of another process
    a.know(other)
    assert a.engine.state.peers.attached == ()
    assert a.counter("peer_attach_refused") == 1


def test_a_rejected_record_is_counted_once_and_anew_for_a_new_mapping(tmp_path: Path, clock: Clock, a: MiniEngine) -> None:
    other = MiniEngine(tmp_path, "b", clock)
    a.know(other)
    other.ask("r1", range(30))
    (peer,) = a.engine.state.peers.attached
    key = other.engine.state.segment.key_of(0)
    assert key is not None
    for _ in range(3):
        assert peer.reader.find(key, epoch=7) is None
    for _ in range(2):
        a.poll()
    assert a.counter("record_rejected") == 3
    a.know()
    a.know(other)
    (peer,) = a.engine.state.peers.attached
    assert peer.reader.find(key, epoch=7) is None
    a.poll()
    assert a.counter("record_rejected") == 4

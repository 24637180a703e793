"""An idle engine's look at the world, when a part of the world is broken: the rest of the look goes on, and what failed is counted."""

import os
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.directory.control import ControlState
from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine


@pytest.fixture
def clock() -> Clock:
    return Clock()


def break_page(engine: MiniEngine) -> None:
    """The sequence names a state that was never written."""
    with open(engine.page.path, "r+b") as file:
        file.seek(8)
        file.write((77).to_bytes(8, "little"))


def test_a_broken_control_page_is_counted_and_stops_neither_beat_nor_sharing(tmp_path: Path, clock: Clock) -> None:
    me, other = MiniEngine(tmp_path, "me", clock), MiniEngine(tmp_path, "other", clock)
    me.know(other)
    other.ask("r1", range(20))
    break_page(me)
    before = me.header()["heartbeat_us"]
    me.poll()
    me.poll()
    assert me.counter("hook_errors") == 2
    assert me.header()["heartbeat_us"] > before
    me.ask("r2", range(20))
    assert me.sources("r2")["peer_cpu"] == 16
    other.engine.close()
    other.page.close()
    os.unlink(other.engine.state.segment.path)
    me.poll()
    assert me.engine.state.peers.attached == ()


def test_a_truncated_control_page_is_counted_and_the_engine_serves_on(tmp_path: Path, clock: Clock) -> None:
    me = MiniEngine(tmp_path, "me", clock)
    os.truncate(me.page.path, 0)
    me.poll()
    assert me.counter("hook_errors") == 1
    assert me.ask("r1", range(20)).text
    me.check()


def test_a_look_at_peers_that_fails_does_not_lose_the_clear_that_was_read_with_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = MiniEngine(tmp_path, "me", clock)
    me.ask("r1", range(20))

    def fail(now: float) -> None:
        raise OSError("no descriptor left")

    with monkeypatch.context() as patched:
        patched.setattr(me.engine.state.peers, "refresh", fail)
        me.page.write(ControlState(epoch=2))
        me.poll()
    assert me.counter("hook_errors") == 1
    assert me.header()["epoch"] == me.header()["epoch_confirmed"] == 2
    assert me.header()["used_places"] == 0


def test_a_peer_whose_process_cannot_be_looked_at_for_now_is_kept(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    me, other = MiniEngine(tmp_path, "me", clock), MiniEngine(tmp_path, "other", clock)
    me.know(other)
    (peer,) = me.engine.state.peers.attached

    def fail() -> bool:
        raise OSError("no descriptor left")

    monkeypatch.setattr(peer.reader, "alive", fail)
    me.poll()
    assert me.engine.state.peers.attached == (peer,)
    assert me.counter("hook_errors") == me.counter("peer_detached") == 0


def test_a_peer_whose_segment_is_truncated_is_a_miss_then_let_go_and_refused_until_its_next_start(tmp_path: Path, clock: Clock) -> None:
    me, other = MiniEngine(tmp_path, "me", clock), MiniEngine(tmp_path, "other", clock)
    me.know(other)
    other.ask("r1", range(20))
    path = other.engine.state.segment.path
    raw = Path(path).read_bytes()
    os.truncate(path, 4096)
    try:
        me.ask("r2", range(20))
        assert me.sources("r2") == {"computed": 20}
        for _ in range(3):
            me.poll()
        assert me.engine.state.peers.attached == ()
        counts = [me.counter(name) for name in ("peer_attach_ok", "peer_detached", "peer_attach_refused", "hook_errors")]
        assert counts == [1, 1, 1, 0]
    finally:
        Path(path).write_bytes(raw)  # the owner of this test lives in the same process
    me.check()

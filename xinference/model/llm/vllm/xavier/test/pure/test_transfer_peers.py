"""Peers are attached when first wanted, let go when they are gone, and tried again with growing pauses."""

import logging
import os
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.directory.control import PeerEntry
from xinference.model.llm.vllm.xavier.directory.names import segment_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.test.mini_engine import NAMESPACE, Clock, MiniEngine
from xinference.model.llm.vllm.xavier.test.segments import small
from xinference.model.llm.vllm.xavier.transfer.bytes import BytesMover
from xinference.model.llm.vllm.xavier.transfer.peers import Peers


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def me(tmp_path: Path, clock: Clock) -> MiniEngine:
    return MiniEngine(tmp_path, "me", clock)


def uids(engine: MiniEngine) -> list[str]:
    return [peer.replica_uid for peer in engine.engine.state.peers.attached]


def test_a_replica_never_attaches_to_itself(me: MiniEngine) -> None:
    me.know(me)
    assert uids(me) == []
    assert me.counter("peer_attach_refused") == 0


def test_a_peer_that_is_not_there_yet_is_tried_again_with_growing_pauses(
    me: MiniEngine, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    peers = me.engine.state.peers
    peers.want([PeerEntry("w", "late", 9)])
    tries = []
    for second in range(12):
        peers.refresh(clock.now + second)
        tries.append(me.counter("peer_attach_refused"))
    assert tries == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4]  # after 1, 2, 4 seconds
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    late = MiniEngine(tmp_path, "late", clock, incarnation=9)
    peers.refresh(clock.now + 15)
    assert uids(me) == ["late"]
    assert late.entry == PeerEntry("w", "late", 9)


def test_the_pause_grows_to_its_limit_only(me: MiniEngine, clock: Clock) -> None:
    peers = me.engine.state.peers
    peers.want([PeerEntry("w", "never", 9)])
    for _ in range(12):
        clock.now += 31.0
        peers.refresh(clock.now)
    assert me.counter("peer_attach_refused") == 12


def test_a_file_that_can_never_be_read_is_remembered(me: MiniEngine, tmp_path: Path, clock: Clock) -> None:
    path = segment_path(str(tmp_path), "w", "bad", NAMESPACE)
    Path(path).write_bytes(b"\0" * 100_000)
    os.chmod(path, 0o600)
    peers = me.engine.state.peers
    peers.want([PeerEntry("w", "bad", 9)])
    for _ in range(5):
        clock.now += 100.0
        peers.refresh(clock.now)
    assert me.counter("peer_attach_refused") == 1
    peers.want([])
    peers.want([PeerEntry("w", "bad", 10)])  # another start of it is another file
    peers.refresh(clock.now)
    assert me.counter("peer_attach_refused") == 2


def test_a_peer_of_another_start_than_the_control_page_says_is_not_attached(me: MiniEngine, tmp_path: Path, clock: Clock) -> None:
    other = MiniEngine(tmp_path, "other", clock, incarnation=5)
    me.engine.state.peers.want([PeerEntry("w", "other", 6)])
    me.engine.state.peers.refresh(clock.now)
    assert uids(me) == []
    me.know(other)
    assert uids(me) == ["other"]


def test_which_peers_are_mapped_stands_in_the_segment(me: MiniEngine, tmp_path: Path, clock: Clock) -> None:
    other = MiniEngine(tmp_path, "other", clock, incarnation=5)
    reader = SegmentReader.open(me.engine.state.segment.path, expected_incarnation=None)
    me.know(other)
    assert reader.attached() == {5}
    me.know()
    assert reader.attached() == frozenset()


def test_a_peer_that_is_no_longer_named_is_let_go(me: MiniEngine, tmp_path: Path, clock: Clock) -> None:
    other = MiniEngine(tmp_path, "other", clock)
    me.know(other)
    assert uids(me) == ["other"]
    me.know()
    assert uids(me) == []
    assert (me.counter("peer_attach_ok"), me.counter("peer_detached")) == (1, 1)


def test_a_peer_whose_segment_was_replaced_is_let_go_and_the_new_one_attached(me: MiniEngine, tmp_path: Path, clock: Clock) -> None:
    other = MiniEngine(tmp_path, "other", clock)
    me.know(other)
    other.engine.close()
    other.page.close()
    again = MiniEngine(tmp_path, "other", clock, incarnation=2)
    me.poll()
    assert uids(me) == []
    me.know(again)
    assert uids(me) == ["other"]


def test_a_dead_peer_is_let_go(me: MiniEngine, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    other = MiniEngine(tmp_path, "other", clock)
    me.know(other)
    (peer,) = me.engine.state.peers.attached
    monkeypatch.setattr(peer.reader, "alive", lambda: False)
    me.poll()
    assert peer not in me.engine.state.peers.attached


def test_a_peer_whose_places_cannot_hold_our_blocks_is_refused_for_good(me: MiniEngine, tmp_path: Path, clock: Clock) -> None:
    path = segment_path(str(tmp_path), "w", "small", NAMESPACE)
    segment = SegmentWriter.open(path, small(place_bytes=64), incarnation=3, epoch=1)
    peers = Peers(me.config, NAMESPACE, BytesMover(bytearray(256), 128), lambda name, amount=1: None)
    peers.want([PeerEntry("w", "small", 3)])
    peers.refresh(clock.now)
    assert peers.attached == ()
    assert peers.refused() == ("small",)
    segment.close(unlink=True)


def test_records_of_a_peer_that_do_not_validate_are_counted(me: MiniEngine, tmp_path: Path, clock: Clock) -> None:
    other = MiniEngine(tmp_path, "other", clock)
    other.ask("r1", range(20))
    me.know(other)
    (peer,) = me.engine.state.peers.attached
    key = next(key for place in range(9) if (key := other.engine.state.segment.key_of(place)) is not None)
    assert peer.reader.find(key, epoch=99) is None
    me.poll()
    assert me.counter("record_rejected") == 1

"""Ways in which sharing KV broke elsewhere, played through here. The design page on failures says which test holds which."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.records import RecordTable
from xinference.model.llm.vllm.xavier.store.tier import CpuTier, ReserveRequest
from xinference.model.llm.vllm.xavier.test.mini_engine import BLOCK, Clock, MiniEngine
from xinference.model.llm.vllm.xavier.test.segments import fill, key, keys, open_segment, small


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_requests_that_hog_the_pool_never_stop_all_progress(tmp_path: Path, clock: Clock) -> None:
    """Preempted and admitted again for ever, with nothing computed in between."""
    one, two = (MiniEngine(tmp_path, uid, clock, num_blocks=18, budget=16) for uid in ("one", "two"))
    one.know(two)
    two.know(one)
    for number in range(6):
        two.ask(f"seed-{number}", range(number * 100, number * 100 + 24))
    one.poll()
    requests = [one.add(f"r-{number}", range(number * 100, number * 100 + 28), max_tokens=24) for number in range(6)]
    still, tokens = 0, -1
    while one.requests:
        one.step()
        now = sum(len(request.text) for request in requests)
        ended = sum(request.status == "ended" for request in requests)
        still, tokens = (0, now + ended) if now + ended != tokens else (still + 1, tokens)
        assert still < 20, [(request.request_id, request.status, request.computed) for request in requests]
    one.step()
    assert {request.status for request in requests} == {"ended"}
    assert one.counter("load_blocks") > 0
    one.check()


@pytest.mark.parametrize("num_stored", range(0, 24, 4))
def test_an_own_hit_longer_than_what_is_stored_is_offered_nothing(tmp_path: Path, clock: Clock, num_stored: int) -> None:
    """Never a negative number of tokens to load."""
    one, two = MiniEngine(tmp_path, "one", clock), MiniEngine(tmp_path, "two", clock)
    one.know(two)
    two.know(one)
    two.ask("stored", range(num_stored + 1))
    one.poll()
    one.ask("local", range(24))
    loaded = one.counter("load_blocks")
    one.ask("again", range(30))
    sources = one.sources("again")
    assert sources["local"] == 24
    assert one.counter("load_blocks") == loaded
    assert sum(sources.values()) == 30


def test_many_short_requests_of_whole_blocks_end_and_leave_nothing(tmp_path: Path, clock: Clock) -> None:
    """Their sum is more than a step computes; each ends in the step in which it begins."""
    engine = MiniEngine(tmp_path, "one", clock, budget=20)
    for turn in range(5):
        for number in range(40):
            length = BLOCK * (1 + number % 3)
            engine.add(f"{turn}-{number}", range(number * 50, number * 50 + length))
        engine.run(400)
    assert engine.counter("hook_errors") == 0
    assert engine.counter("requests") == 200
    engine.check()


def test_a_peers_death_costs_no_look_at_what_it_held(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker elsewhere stalled for minutes while it dropped a dead client's keys."""
    me, other = MiniEngine(tmp_path, "me", clock), MiniEngine(tmp_path, "other", clock)
    me.know(other)
    other.ask("r1", range(20))
    (peer,) = me.engine.state.peers.attached

    def look(self: RecordTable, *arguments: object) -> None:
        raise RuntimeError("a record was looked at")

    for name in ("find", "record", "all_words", "key", "generation"):
        monkeypatch.setattr(RecordTable, name, look)
    monkeypatch.setattr(SegmentReader, "alive", lambda self: False)
    me.poll()
    assert peer not in me.engine.state.peers.attached
    assert (me.counter("peer_detached"), me.counter("hook_errors")) == (1, 0)


SCRIPT = """
from xinference.model.llm.vllm.xavier.block.key import block_key
from xinference.model.llm.vllm.xavier.directory.layout import layout_word, record_check
from xinference.model.llm.vllm.xavier.block.namespace import Namespace
namespace = Namespace(**{field: field for field in Namespace.__dataclass_fields__})
print(hash("text"), block_key(bytes(range(32)), 1, b"adapter"), layout_word(), record_check(1, 2, 3, 4, 5, 6, 7, 8), namespace.digest())
"""


def test_keys_records_and_namespaces_are_the_same_in_every_process_whatever_its_hash_seed() -> None:
    """Elsewhere: no hit across processes, silently, because Python's hash of text is drawn at random in each."""
    seen = []
    for seed in ("1", "2", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        result = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=True)
        seen.append(result.stdout.split(maxsplit=1))
    assert len({text_hash for text_hash, _ in seen}) == 3, "the seeds did nothing"
    assert len({ours for _, ours in seen}) == 1


def test_tens_of_thousands_of_saves_and_evictions_leave_no_memory_behind(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, small(num_places=64))
    tier = CpuTier.of(segment)

    def churn(turns: range) -> None:
        for turn in turns:
            chain = keys(range(turn * 8, turn * 8 + 8))
            reserved = tier.reserve(ReserveRequest(None, chain))
            for index, place in enumerate(reserved.places, reserved.first):
                if turn % 5:
                    tier.publish(place, chain[index], chain[index - 1] if index else None)
                else:
                    tier.give_back(place)
            tier.unpin(tier.pin(chain))

    churn(range(500))
    gc.collect()
    before = sys.getallocatedblocks()
    churn(range(500, 5000))
    gc.collect()
    assert sys.getallocatedblocks() - before < 200
    tier.check()
    segment.close()


def test_peers_that_come_and_go_leave_no_mapping_and_no_descriptor_behind(tmp_path: Path) -> None:
    """A view that somebody keeps would keep the old mapping's memory."""

    def held() -> tuple[int, int]:
        gc.collect()
        return Path("/proc/self/maps").read_text().count(str(tmp_path)), len(os.listdir("/proc/self/fd"))

    before = held()
    for number in range(40):
        segment = open_segment(tmp_path, incarnation=number + 1)
        fill(segment, 0, key(number))
        reader = SegmentReader.open(segment.path, expected_incarnation=number + 1)
        slab = reader.slab_view()
        assert reader.find(key(number), 1) is not None
        segment.close(unlink=True)
        if number % 2:
            reader.close()
        del reader, segment, slab
    assert held() == before

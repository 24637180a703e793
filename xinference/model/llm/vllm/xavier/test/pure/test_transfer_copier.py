"""The helper thread as a thread: it wakes for work, looks at the control page by itself, drains at the end, and survives errors."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.directory.control import ControlState
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class RealClock:
    """CLOCK_MONOTONIC, with the attribute that engines in small move."""

    @property
    def now(self) -> float:
        return time.monotonic()

    @now.setter
    def now(self, value: float) -> None:
        pass

    def __call__(self) -> float:
        return time.monotonic()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[MiniEngine]:
    engine = MiniEngine(tmp_path, "a", RealClock(), copier_poll_seconds=0.02)  # type: ignore[arg-type]
    engine.copying = False
    engine.engine.copier.start()
    yield engine
    engine.engine.close()


def test_saves_are_made_beside_the_steps(engine: MiniEngine) -> None:
    engine.ask("r1", range(30))
    until(lambda: engine.counter("saves_blocks") == 7)


def test_an_idle_engine_learns_of_a_clear_and_confirms_it(engine: MiniEngine) -> None:
    engine.ask("r1", range(30))
    until(lambda: engine.counter("saves_blocks") == 7)
    engine.page.write(ControlState(epoch=2))
    until(lambda: engine.header()["epoch_confirmed"] == 2)
    assert engine.header()["used_bytes"] == 0


def test_an_idle_engine_attaches_a_peer_that_came_later(engine: MiniEngine, tmp_path: Path) -> None:
    other = MiniEngine(tmp_path, "b", RealClock())  # type: ignore[arg-type]
    engine.page.write(ControlState(epoch=1, peers=(other.entry,)))
    until(lambda: engine.counter("peer_attach_ok") == 1)


def test_the_heartbeat_goes_on_while_nothing_is_asked(engine: MiniEngine) -> None:
    first = engine.header()["heartbeat_us"]
    until(lambda: engine.header()["heartbeat_us"] > first)


def test_what_is_queued_is_saved_before_the_thread_ends(engine: MiniEngine) -> None:
    started = threading.Event()
    goes_on = threading.Event()

    def hold() -> None:
        started.set()
        goes_on.wait(10.0)

    engine.mover.during = hold
    engine.ask("r1", range(30))
    assert started.wait(10.0)
    engine.ask("r2", range(100, 130))
    engine.mover.during = lambda: None
    reader = SegmentReader.open(engine.engine.state.segment.path, expected_incarnation=None)
    goes_on.set()
    engine.engine.close()
    assert not engine.engine.copier.alive
    assert reader.counters()["saves_blocks"] == 14


def test_a_copy_that_does_not_end_keeps_the_segment_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MiniEngine(tmp_path, "a", RealClock())  # type: ignore[arg-type]
    engine.copying = False
    goes_on, started = threading.Event(), threading.Event()
    engine.mover.during = lambda: (started.set(), goes_on.wait(10.0))[0]
    monkeypatch.setattr("xinference.model.llm.vllm.xavier.connector.engine.DRAIN_SECONDS", 0.01)
    monkeypatch.setattr("xinference.model.llm.vllm.xavier.transfer.copier.LAST_BATCH_SECONDS", 0.01)
    engine.engine.copier.start()
    engine.ask("r1", range(30))
    assert started.wait(10.0)
    engine.ask("r2", range(100, 130))
    engine.engine.close()
    assert engine.counter("drops_closing") == 7  # r2's were given back
    assert engine.header()["state"] != 4
    goes_on.set()
    until(lambda: not engine.engine.copier.alive)


def test_an_error_in_the_thread_is_counted_and_the_thread_goes_on(engine: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = engine.engine.state.tier
    monkeypatch.setattr(tier, "publish", lambda *arguments: (_ for _ in ()).throw(RuntimeError("broken")))
    engine.ask("r1", range(30))
    until(lambda: engine.counter("hook_errors") == 1)
    assert engine.engine.copier.alive


def test_a_load_is_made_before_saves_that_were_queued_earlier(tmp_path: Path) -> None:
    clock = Clock()
    a = MiniEngine(tmp_path, "a", clock)
    a.ask("r0", range(30))
    b = MiniEngine(tmp_path, "b", clock, batch_max_blocks=1)
    b.know(a)
    b.copying = False
    b.ask("r1", range(100, 130))
    b.add("r2", range(30))
    b.step()
    order: list[str] = []
    save, load = b.mover.save, b.mover.load
    b.mover.save = lambda slab, copies: (order.append("save"), save(slab, copies))[1]  # type: ignore[method-assign]
    b.mover.load = lambda slab, copies: (order.append("load"), load(slab, copies))[1]  # type: ignore[method-assign]
    b.copy()
    assert order[:7] == ["load"] * 7
    assert "save" in order[7:]

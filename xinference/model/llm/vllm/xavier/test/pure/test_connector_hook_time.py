"""What hooks cost is measured, and apart from the bytes that they move."""

from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.connector import guard, worker
from xinference.model.llm.vllm.xavier.connector.metadata import StepMeta
from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine


class Ticks:
    """Stands for the time module: nanoseconds by hand."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def pass_by(self, nanoseconds: int) -> None:
        self.now += nanoseconds


def test_time_in_hooks_is_told_apart_from_the_copies_that_a_hook_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, ticks = MiniEngine(tmp_path, "a", Clock()), Ticks()
    a.ask("r0", range(30))
    monkeypatch.setattr(guard, "time", ticks)
    monkeypatch.setattr(worker, "time", ticks)
    hooks, start_loads = guard.Guard(a.engine.state), a.worker.start_loads

    def start(meta: StepMeta) -> None:
        ticks.pass_by(30)
        start_loads(meta)

    monkeypatch.setattr(a.worker, "start_loads", lambda meta: hooks.run("start_load_kv", lambda: start(meta), lambda: None))
    a.reset()
    a.copying = False
    a.mover.during = lambda: ticks.pass_by(1000)
    a.add("r1", range(30), max_tokens=2)
    a.step()
    monkeypatch.undo()
    assert a.counter("loads_sync") == 1
    monkeypatch.setattr(guard, "FLUSH_CALLS", 1)
    hooks.flush()
    assert a.counter("hook_calls") == 1
    assert a.counter("hook_ns_total") == 30
    assert a.counter("hook_copy_ns") == 1000

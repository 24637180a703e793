"""Guards of hooks, of an engine's end and of adapters that nothing else here would miss: each test is red without one of them."""

import os
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.connector.adapters import AdapterDigests
from xinference.model.llm.vllm.xavier.connector.engine import EngineRegistry
from xinference.model.llm.vllm.xavier.connector.guard import FLUSH_CALLS, Guard
from xinference.model.llm.vllm.xavier.errors import ConfigRefused
from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine


@pytest.fixture
def a(tmp_path: Path) -> MiniEngine:
    return MiniEngine(tmp_path, "a", Clock())


def fails() -> str:
    raise RuntimeError("a hook is broken")


def test_a_hook_that_raises_gives_the_answer_of_an_engine_without_a_cache_and_is_counted(a: MiniEngine) -> None:
    guard = Guard(a.engine.state)
    assert guard.run("a hook", fails, lambda: "nothing") == "nothing"
    assert guard.run("a hook", lambda: "something", lambda: "nothing") == "something"
    assert a.counter("hook_errors") == 1


def test_after_the_end_no_hook_is_run(a: MiniEngine) -> None:
    guard = Guard(a.engine.state)
    a.engine.close()
    assert a.engine.state.closed
    assert guard.run("a hook", lambda: "something", lambda: "nothing") == "nothing"


def test_hooks_are_counted_once_and_many_at_a_time(a: MiniEngine) -> None:
    guard = Guard(a.engine.state)
    for _ in range(FLUSH_CALLS - 1):
        guard.run("a hook", lambda: None, lambda: None)
    guard.flush()
    assert a.counter("hook_calls") == 0
    guard.run("a hook", lambda: None, lambda: None)
    guard.flush()
    guard.flush()
    assert a.counter("hook_calls") == FLUSH_CALLS
    for _ in range(FLUSH_CALLS):
        guard.run("a hook", lambda: None, lambda: None)
    guard.flush()
    assert a.counter("hook_calls") == 2 * FLUSH_CALLS


def test_an_engine_ends_once(a: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []
    close = a.engine.copier.close
    monkeypatch.setattr(a.engine.copier, "close", lambda seconds: (ends.append(seconds), close(seconds))[1])
    a.engine.close()
    a.engine.close()
    assert len(ends) == 1


def test_one_start_of_a_replica_has_one_engine_and_an_engine_that_ended_is_forgotten(a: MiniEngine) -> None:
    registry = EngineRegistry()
    registry.add(a.engine)
    assert registry.get(a.config) is a.engine
    with pytest.raises(ConfigRefused, match="two engines"):
        registry.add(a.engine)
    registry.close(a.config)
    assert a.engine.closed
    assert registry.get(a.config) is None
    registry.close(a.config)


def test_a_file_that_grew_without_a_new_time_is_another_adapter(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"12")
    os.utime(weights, ns=(1, 1))
    before = AdapterDigests().digest("name", 1, str(tmp_path), False)
    with open(weights, "ab") as file:
        file.write(b"3")
    os.utime(weights, ns=(1, 1))
    assert AdapterDigests().digest("name", 1, str(tmp_path), False) != before

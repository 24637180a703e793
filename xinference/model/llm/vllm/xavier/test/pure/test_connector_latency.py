"""How long loads and saves took, counted where they settle."""

from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine


@pytest.fixture
def clock() -> Clock:
    return Clock()


def buckets(engine: MiniEngine, kind: str) -> dict[str, int]:
    prefix = f"{kind}_seconds_le_"
    return {name.removeprefix(prefix): value for name, value in engine.engine.state.segment.counters.items() if prefix in name and value}


def slowly(engine: MiniEngine, clock: Clock, seconds: float) -> None:
    """Every copy of this engine takes so long."""

    def during() -> None:
        clock.now += seconds

    engine.mover.during = during


def test_a_load_is_counted_by_the_time_from_its_allocation_to_the_end_of_its_copies(tmp_path: Path, clock: Clock) -> None:
    a, b = MiniEngine(tmp_path, "a", clock), MiniEngine(tmp_path, "b", clock)
    a.ask("r0", range(30))
    b.know(a)
    b.copying = False
    b.add("r1", range(30))
    b.step()
    clock.now += 0.3  # it waits for the copier
    slowly(b, clock, 0.3)
    b.copy()
    b.copying = True
    b.run()
    assert b.sources("r1") == {"peer_cpu": 28, "computed": 2}
    assert buckets(b, "load") == {"1": b.counter("loads_async")}
    assert 600_000_000 <= b.counter("load_wait_ns") < 1_000_000_000


def test_each_copy_of_the_saving_thread_is_counted_by_its_time(tmp_path: Path, clock: Clock) -> None:
    a = MiniEngine(tmp_path, "a", clock)
    slowly(a, clock, 0.03)
    a.ask("r0", range(30))
    assert buckets(a, "save") == {"0_05": a.counter("save_batches")}
    assert a.counter("save_batches") > 0

"""Two engines in small on one directory: what one has saved the other loads, and nobody computes on a wrong byte."""

from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.test.mini_engine import BLOCK, Clock, MiniEngine


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pair(directory: Path, clock: Clock, **kinds: int) -> tuple[MiniEngine, MiniEngine]:
    a, b = MiniEngine(directory, "a", clock, **kinds), MiniEngine(directory, "b", clock, **kinds)
    a.know(b)
    b.know(a)
    return a, b


def test_what_one_replica_computed_another_loads(tmp_path: Path, clock: Clock) -> None:
    a, b = pair(tmp_path, clock)
    first = a.ask("r1", range(30), max_tokens=3)
    assert a.sources("r1") == {"computed": 30}
    assert a.counter("saves_blocks") == 8  # 30 + 2 tokens computed
    b.poll()
    second = b.ask("r2", range(30), max_tokens=3)
    assert second.text == first.text
    assert b.sources("r2") == {"peer_cpu": 28, "computed": 2}
    assert b.counter("loads_async") == 1
    a.check()
    b.check()


@pytest.mark.parametrize(
    ("num_tokens", "loaded"),
    [
        (1, 0),
        (BLOCK - 1, 0),
        (BLOCK, 0),
        (BLOCK + 1, BLOCK),
        (5 * BLOCK, 4 * BLOCK),
        (5 * BLOCK + 1, 5 * BLOCK),
        (5 * BLOCK - 1, 4 * BLOCK),
    ],
)
def test_never_the_last_prompt_token_and_never_a_partial_block(tmp_path: Path, clock: Clock, num_tokens: int, loaded: int) -> None:
    a, b = pair(tmp_path, clock)
    first = a.ask("r1", range(num_tokens), max_tokens=6)
    second = b.ask("r2", range(num_tokens), max_tokens=6)
    assert second.text == first.text
    assert b.sources("r2").get("peer_cpu", 0) == loaded
    assert sum(b.account("r2").sources) == num_tokens

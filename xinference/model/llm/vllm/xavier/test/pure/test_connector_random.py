"""Random schedules over three replicas that share a directory: small engines, small caches, slow copiers, aborts, clears.

The engines compare every byte they compute on; the books are checked after every step, and every request's account adds up.
"""

import random
from functools import partial
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.directory.control import ControlState
from xinference.model.llm.vllm.xavier.test.mini_engine import BLOCK, Clock, MiniEngine

STEPS = 250


def a_prompt(rng: random.Random) -> list[int]:
    """One of few families, cut somewhere and sometimes continued: prefixes are shared, and fork."""
    family = rng.randrange(4)
    stem = [(family * 37 + index) % 200 for index in range(rng.randrange(1, 12 * BLOCK))]
    return stem + [rng.randrange(200) for _ in range(rng.choice((0, 0, 1, BLOCK, 3 * BLOCK)))]


def a_step(rng: random.Random, engine: MiniEngine, number: int, copying: bool) -> None:
    engine.copying = copying
    if rng.random() < 0.4 and len(engine.requests) < 6:
        engine.add(
            f"{engine.config.replica_uid}-{number}",
            a_prompt(rng),
            rng.randrange(1, 2 * BLOCK),
            salt=rng.choice((b"", b"", b"s")),
            prompt_logprobs=rng.random() < 0.1,
        )
    if rng.random() < 0.05 and engine.requests:
        request = rng.choice(list(engine.requests.values()))
        if request.status != "ended":
            engine.abort(request.request_id)
    engine.step()
    if rng.random() < 0.3:
        engine.poll()
    engine.check()


def disturb(rng: random.Random, engines: list[MiniEngine]) -> None:
    """In the middle of a copy any engine may go on with its steps, the copying one too unless it copies within a step.

    Other engines' copiers run meanwhile, so they may overwrite what is being read.
    """
    copying = False

    def meanwhile(busy: MiniEngine) -> None:
        nonlocal copying
        if not copying and rng.random() < 0.3:
            copying = True
            for engine in rng.choices([engine for engine in engines if not engine.stepping], k=rng.randrange(4)):
                a_step(rng, engine, rng.randrange(10**6, 10**9), copying=engine is not busy)
            copying = False

    for engine in engines:
        engine.mover.during = partial(meanwhile, engine)


@pytest.mark.parametrize("seed", range(16))
def test_any_schedule_computes_on_the_right_bytes_and_balances_its_books(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    clock = Clock()
    engines = [
        MiniEngine(tmp_path, uid, clock, num_blocks=rng.choice((24, 40)), cache_blocks=rng.choice((6, 20, 60)), budget=rng.choice((8, 32)))
        for uid in ("a", "b", "c")
    ]
    for engine in engines:
        engine.know(*engines)
    disturb(rng, engines)
    epoch = 1
    for number in range(STEPS):
        if rng.random() < 0.01:
            epoch += 1
            for engine in engines:
                engine.page.write(ControlState(epoch=epoch, peers=tuple(other.entry for other in engines)))
        a_step(rng, rng.choice(engines), number, copying=rng.random() < 0.7)
    for engine in engines:
        engine.mover.during = lambda: None
        engine.copying = True
        engine.run(2000)
        engine.poll()
        engine.check()
    for engine in engines:
        for entry in engine.records():
            assert sum(entry.sources) == entry.prompt_tokens
            assert entry.state in ("finished", "aborted")
        header = engine.header()
        assert header["epoch"] == header["epoch_confirmed"] == epoch
        assert engine.counter("hook_errors") == 0
    assert sum(engine.counter("loads_async") for engine in engines) > 5

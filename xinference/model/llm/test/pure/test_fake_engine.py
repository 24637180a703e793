"""The fake engine in this process: texts are those of a model without a cache, whatever was cached, chunked, preempted or aborted."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xinference.model.llm.fake import network
from xinference.model.llm.fake.blocks import BlockPool, extend_hashes, hash_root
from xinference.model.llm.fake.config import FakeConfig, FakeConfigRefused, Faults, changed
from xinference.model.llm.fake.engine import EngineFailed, FakeEngine
from xinference.model.llm.fake.request import Output, Sampling, Sequence
from xinference.model.llm.fake.sharing import NoSharing
from xinference.model.llm.fake.vocabulary import MESSAGE_END

SMALL = FakeConfig(max_model_len=64, block_size=4, num_blocks=16, max_num_batched_tokens=8, max_num_seqs=4)


@asynccontextmanager
async def running(config: FakeConfig = SMALL) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(config, lambda pool: NoSharing())
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


_numbers = iter(range(10**9))


def sequence(prompt: list[int], max_tokens: int = 8, salt: str = "", **sampling: object) -> Sequence:
    return Sequence(f"r{next(_numbers)}", list(prompt), len(prompt), Sampling(max_tokens, **sampling), salt, None)  # type: ignore[arg-type]


async def generate(engine: FakeEngine, request: Sequence) -> list[Output]:
    return [output async for output in engine.generate(request)]


async def tokens(engine: FakeEngine, prompt: list[int], max_tokens: int = 8, **more: object) -> list[int]:
    return [o.token for o in await generate(engine, sequence(prompt, max_tokens, **more)) if o.token is not None]


PROMPT = list(range(300, 330))


async def test_a_prompt_gets_the_reference_s_tokens_cold_and_cached() -> None:
    async with running() as engine:
        expected = network.continuation(PROMPT, 8, SMALL.eos_every)
        assert await tokens(engine, PROMPT) == expected
        assert await tokens(engine, PROMPT) == expected
        outputs = await generate(engine, sequence(PROMPT))
        assert outputs[0].cached_tokens == 28  # 7 whole blocks of 4, never the last token


async def test_another_prefix_another_text() -> None:
    texts = {tuple(network.continuation([first, *PROMPT[1:]], 8, 0)) for first in range(300, 350)}
    assert len(texts) == 50


async def test_a_salt_separates_caches_but_not_texts() -> None:
    async with running() as engine:
        plain = await generate(engine, sequence(PROMPT))
        salted = await generate(engine, sequence(PROMPT, salt="tenant"))
        again = await generate(engine, sequence(PROMPT, salt="tenant"))
        assert [o.token for o in plain] == [o.token for o in salted] == [o.token for o in again]
        assert [x[0].cached_tokens for x in (plain, salted, again)] == [0, 0, 28]


async def test_hashes_chain_and_the_root_and_salt_reach_every_block() -> None:
    def hashes(*, seed: str = "0", salt: str = "", content: list[int] = PROMPT) -> list[bytes]:
        found: list[bytes] = []
        extend_hashes(found, content, 4, hash_root(seed), salt)
        return found

    base = hashes()
    assert len(base) == 7
    assert hashes(content=[*PROMPT[:8], 999, *PROMPT[9:]])[:2] == base[:2]
    for other in (hashes(seed="1"), hashes(salt="s"), hashes(content=[1, *PROMPT[1:]])):
        assert not set(other) & set(base)


async def test_a_full_pool_preempts_and_everyone_still_gets_the_right_text() -> None:
    async with running() as engine:
        prompts = [[300 + i, *PROMPT[:11]] for i in range(6)]
        results = await asyncio.gather(*(tokens(engine, p, 20, ignore_eos=True) for p in prompts))
        assert engine.scheduler.preemptions > 0
        for prompt, result in zip(prompts, results, strict=True):
            assert result == network.continuation(prompt, 20, 0)
        engine.pool.check()
        assert engine.pool.num_free == engine.pool.num_blocks


async def test_a_text_ends_at_its_end_token_or_its_limit_or_a_stop_token() -> None:
    async with running() as engine:
        free = network.continuation(PROMPT, 30, 3)
        assert free[-1] == MESSAGE_END
        engine.config = changed(engine.config, {"eos_every": 3})
        outputs = await generate(engine, sequence(PROMPT, 30))
        assert outputs[-1].finish_reason == "stop"
        assert outputs[-1].stop_token is None
        limited = await generate(engine, sequence(PROMPT, 2, ignore_eos=True))
        assert [o.finish_reason for o in limited] == [None, "length"]
        stopped = await generate(engine, sequence(PROMPT, 30, ignore_eos=True, stop_token_ids=frozenset({free[0]})))
        assert (stopped[-1].finish_reason, stopped[-1].stop_token) == ("stop", free[0])


async def test_the_context_is_never_exceeded() -> None:
    async with running() as engine:
        outputs = await generate(engine, sequence(list(range(300, 362)), 50, ignore_eos=True))
        assert len(outputs) == 2
        assert outputs[-1].finish_reason == "length"


async def test_forced_tokens_are_spoken_and_the_text_ends_with_them() -> None:
    async with running() as engine:
        assert await tokens(engine, PROMPT, 20, forced=(65, 66, 67)) == [65, 66, 67, MESSAGE_END]


async def test_leaving_early_aborts_and_frees_everything() -> None:
    async with running() as engine:
        stream = engine.generate(sequence(PROMPT, 30, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        assert engine.finished["abort"] == 1
        assert engine.pool.num_free == engine.pool.num_blocks
        assert not engine.scheduler.running


async def test_a_frozen_engine_makes_no_step_until_it_thaws() -> None:
    async with running() as engine:
        engine.set_faults(Faults(freeze=True))
        task = asyncio.create_task(generate(engine, sequence(PROMPT, 2)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        engine.set_faults(Faults())
        assert len(await task) == 2


async def test_a_dead_engine_fails_open_and_new_requests() -> None:
    async with running(changed(SMALL, {"faults": Faults(freeze=True)})) as engine:
        task = asyncio.create_task(generate(engine, sequence(PROMPT)))
        await asyncio.sleep(0)
        engine.set_faults(Faults(dead=True))
        with pytest.raises(EngineFailed):
            await task
        with pytest.raises(EngineFailed):
            await generate(engine, sequence(PROMPT))


async def test_an_error_after_some_tokens_reaches_the_reader() -> None:
    async with running(changed(SMALL, {"faults": Faults(error_after_tokens=3)})) as engine:
        stream = engine.generate(sequence(PROMPT, 20, ignore_eos=True))
        assert [(await anext(stream)).finish_reason for _ in range(2)] == [None, None]
        with pytest.raises(EngineFailed):
            await anext(stream)
        assert engine.pool.num_free == engine.pool.num_blocks


async def test_wrong_bytes_in_one_cached_block_change_the_text() -> None:
    """The control of the whole suite: without this, right texts would prove nothing."""
    async with running() as engine:
        expected = await tokens(engine, PROMPT)
        hashes: list[bytes] = []
        extend_hashes(hashes, PROMPT, 4, hash_root("0"), "")
        victim = engine.pool.cached_prefix(hashes)[2]
        engine.pool.block(victim)[5] ^= 1
        assert await tokens(engine, PROMPT) != expected


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_random_work_is_always_right_and_the_books_always_balance(seed: int) -> None:
    asyncio.run(random_work(random.Random(seed)))


async def random_work(rng: random.Random) -> None:
    async with running() as engine:
        pools: list[BlockPool] = [engine.pool]

        async def one() -> None:
            prompt = [300 + rng.randrange(3) for _ in range(rng.randrange(1, 6))] + PROMPT[: rng.randrange(30)]
            count = rng.randrange(1, 20)
            expected = network.continuation(prompt, count, SMALL.eos_every)
            got = []
            stream = engine.generate(sequence(prompt, count, rng.choice(["", "a"])))
            give_up_after = rng.choice([None, None, 1, 3])
            async for output in stream:
                got.append(output.token)
                for pool in pools:
                    pool.check()
                if give_up_after is not None and len(got) >= give_up_after:
                    break
            await stream.aclose()
            assert got == expected[: len(got)]
            assert give_up_after is not None or len(got) == len(expected)

        await asyncio.gather(*(one() for _ in range(rng.randrange(1, 9))))
        assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"nope": 1}', "unknown field 'nope'"),
        ('{"block_size": "16"}', "block_size must be of type int"),
        ('{"block_size": true}', "block_size must be of type int"),
        ('{"faults": {"hang": 1}}', "hang must be of type bool"),
        ('{"faults": 3}', "expected a JSON object"),
        ('{"block_size": 0}', "block_size must be at least 1"),
        ('{"num_blocks": 4}', "must hold one request"),
    ],
)
def test_a_wrong_configuration_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(FakeConfigRefused, match=words):
        FakeConfig.from_json(text)


def test_a_configuration_survives_its_json() -> None:
    config = FakeConfig(block_size=32, faults=Faults(decode_ms=1.5), xavier={"a": 1})
    assert FakeConfig.from_json(config.to_json()) == config
    assert FakeConfig.from_json('{"faults": {"decode_ms": 2}}').faults.decode_ms == 2

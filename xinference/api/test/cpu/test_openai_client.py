"""The real openai client against this API with the fake engine behind it, in vLLM's shapes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from aiohttp import web
from pydantic import BaseModel

from xinference.api.test.fakes import FakeCluster, model, replica, serving
from xinference.model.llm.fake.config import FakeConfig, Faults
from xinference.model.llm.fake.engine import FakeEngine
from xinference.model.llm.fake.routes import FakeServer
from xinference.model.llm.fake.sharing import NoSharing

MESSAGES: Any = [{"role": "user", "content": "tell me something"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Place(BaseModel):
    name: str
    height: int


@asynccontextmanager
async def fake_engine(path: Path, config: FakeConfig) -> AsyncIterator[FakeEngine]:
    """A fake engine's server on a Unix socket, in this process."""
    engine = FakeEngine(config, lambda _: NoSharing())
    runner = web.AppRunner(FakeServer("m", engine).app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    steps = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        steps.cancel()
        await asyncio.gather(steps, return_exceptions=True)
        await runner.cleanup()


class Bench:
    """Engines, the API before them, and a client."""

    def __init__(self, client: openai.AsyncOpenAI, engines: list[FakeEngine], cluster: FakeCluster) -> None:
        self.client = client
        self.engines = engines
        self.cluster = cluster


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    cluster = FakeCluster()
    config = FakeConfig(max_model_len=512, eos_every=0)
    async with fake_engine(tmp_path / "0", config) as first, fake_engine(tmp_path / "1", config) as second:
        await cluster.put(model(), replica("m-0", tmp_path / "0"), replica("m-1", tmp_path / "1"))
        async with serving(cluster) as served, openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="k", max_retries=0) as client:
            yield Bench(client, [first, second], cluster)


async def test_chat_whole_and_streamed_say_the_same(bench: Bench) -> None:
    fields: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    whole = await bench.client.chat.completions.create(**fields)
    stream = await bench.client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (whole.usage.prompt_tokens, 12)


async def test_usage_tells_of_cached_tokens_always(bench: Bench) -> None:
    whole = await bench.client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=2)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert isinstance(whole.usage.prompt_tokens_details.cached_tokens, int)


async def test_the_stream_helper_and_parsed_output_work(bench: Bench) -> None:
    parsed = await bench.client.chat.completions.parse(model="m", messages=MESSAGES, response_format=Place)
    assert isinstance(parsed.choices[0].message.parsed, Place)
    async with bench.client.chat.completions.stream(model="m", messages=MESSAGES, response_format=Place) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Place)


async def test_json_output_is_json(bench: Bench) -> None:
    answer = await bench.client.chat.completions.create(model="m", messages=MESSAGES, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


async def test_a_schema_that_is_missing_is_400(bench: Bench) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await bench.client.chat.completions.create(model="m", messages=MESSAGES, response_format={"type": "json_schema"})  # type: ignore[call-overload]
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_tools_are_called(bench: Bench, choice: Any) -> None:
    answer = await bench.client.chat.completions.create(model="m", messages=MESSAGES, tools=[TOOL], tool_choice=choice)
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    [call] = calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert "city" in json.loads(call.function.arguments)


async def test_streamed_tool_arguments_come_together(bench: Bench) -> None:
    messages: Any = [{"role": "user", "content": "please get_weather"}]
    stream = await bench.client.chat.completions.create(model="m", messages=messages, tools=[TOOL], stream=True)
    pieces = [call async for chunk in stream for call in (chunk.choices[0].delta.tool_calls or [])]
    assert {piece.index for piece in pieces} == {0}
    assert "city" in json.loads("".join((piece.function.arguments or "") for piece in pieces if piece.function))


async def test_a_tools_answer_goes_round(bench: Bench) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages: Any = [*MESSAGES, asked, {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]
    answer = await bench.client.chat.completions.create(model="m", messages=messages, tools=[TOOL], tool_choice="none", max_tokens=3)
    assert answer.choices[0].message.content


async def test_logprobs_have_openais_shape(bench: Bench) -> None:
    answer = await bench.client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [2, 2, 2]


async def test_several_choices_and_prompts_keep_their_places(bench: Bench) -> None:
    chat = await bench.client.chat.completions.create(model="m", messages=MESSAGES, n=3, max_tokens=2)
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    text = await bench.client.completions.create(model="m", prompt=["one", "two"], n=2, max_tokens=2)
    assert [choice.index for choice in text.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize("prompt", ["river", ["river", "stone"], [5, 6, 7], [[5, 6], [7]]])
async def test_completions_take_every_kind_of_prompt(bench: Bench, prompt: Any) -> None:
    assert (await bench.client.completions.create(model="m", prompt=prompt, max_tokens=2)).choices[0].text
    stream = await bench.client.completions.create(model="m", prompt=prompt, max_tokens=2, stream=True)
    assert [chunk async for chunk in stream][-1].choices[0].finish_reason


async def test_completions_echo_with_logprobs(bench: Bench) -> None:
    answer = await bench.client.completions.create(model="m", prompt="river stone", max_tokens=2, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("river stone")
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.text_offset)


async def test_a_stop_string_stops(bench: Bench) -> None:
    free = await bench.client.completions.create(model="m", prompt="river", max_tokens=12, temperature=0)
    word = free.choices[0].text.split()[3]
    stopped = await bench.client.completions.create(model="m", prompt="river", max_tokens=12, temperature=0, stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert word not in stopped.choices[0].text


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": [{"role": "user", "content": "river " * 600}]}, "context_length_exceeded", "messages"),
        ({"max_completion_tokens": 5000}, "limit_exceeded", "max_completion_tokens"),
        ({"top_logprobs": 3}, None, "top_logprobs"),
        ({"tool_choice": "required"}, None, "tool_choice"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_engine_refuses_is_a_400(bench: Bench, fields: Any, code: str | None, param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await bench.client.chat.completions.create(**{"model": "m", "messages": MESSAGES, "stream": stream, **fields})
    assert (caught.value.code, caught.value.param) == (code, param)


async def test_one_of_two_engines_that_dies_is_not_noticed(bench: Bench) -> None:
    bench.engines[0].set_faults(Faults(dead=True))
    for index in range(6):
        messages: Any = [{"role": "user", "content": f"question {index}"}]
        assert (await bench.client.chat.completions.create(model="m", messages=messages, max_tokens=2)).choices
    assert [args[1] for args in bench.cluster.asked("report_replica_failure")] in ([], ["m-0"])


async def test_an_engine_that_fails_in_the_middle_ends_its_streams_with_an_error(bench: Bench) -> None:
    for engine in bench.engines:
        engine.set_faults(Faults(error_after_tokens=3))
    stream = await bench.client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=20, stream=True)
    with pytest.raises(openai.APIError) as caught:
        [chunk async for chunk in stream]
    assert caught.value.code in ("internal_error", "engine_dead")


async def test_leaving_a_stream_frees_the_engine(bench: Bench) -> None:
    for engine in bench.engines:
        engine.set_faults(Faults(decode_ms=5))
    stream = await bench.client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    await anext(stream)
    assert sum(len(engine.scheduler.running) for engine in bench.engines) == 1
    await stream.close()
    async with asyncio.timeout(1):
        while any(engine.scheduler.running for engine in bench.engines):
            await asyncio.sleep(0.005)


async def test_many_streams_at_once_do_not_mix(bench: Bench) -> None:
    async def one(index: int) -> bool:
        fields: dict[str, Any] = {"model": "m", "prompt": f"number {index}", "max_tokens": 30, "temperature": 0}
        whole = await bench.client.completions.create(**fields)
        stream = await bench.client.completions.create(**fields, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        return bool(text == whole.choices[0].text)

    assert all(await asyncio.gather(*(one(index) for index in range(24))))

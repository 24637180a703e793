"""Real vLLM on the CPU with a tiny random model: it starts from our command, serves on the socket, and ends without a trace.

And the fake is held to it: the same requests get answers of the same shape and errors with the same fields from both.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from xinference.model.llm.engine import EngineProcess
from xinference.model.llm.fake.config import FakeConfig
from xinference.model.llm.family import read_family
from xinference.model.llm.random_model import make_random_model
from xinference.model.llm.test.replicas import FakeReplica, eventually
from xinference.model.llm.vllm.arguments import known_arguments
from xinference.model.llm.vllm.command import VllmStart, build_command
from xinference.model.llm.vllm.flavour import detect_flavour

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY_SECONDS = 150.0
LIMIT = 1024  # max_model_len of both
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello the river"}], "max_tokens": 6, "temperature": 0}
PARAMETERS = {
    "type": "object",
    "properties": {"days": {"type": "integer", "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": PARAMETERS}}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}


@dataclass
class Engine:
    process: EngineProcess
    session: aiohttp.ClientSession
    lines: list[str]

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(path, json=body) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: Any) -> list[Any]:
        async with self.session.post(path, json={**body, "stream": True}) as response:
            text = await response.text()
        data = [part.removeprefix("data: ") for part in text.split("\n\n") if part.strip()]
        assert data[-1] == "[DONE]"
        return [json.loads(part) for part in data[:-1]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    home = tmp_path_factory.mktemp("home")
    flavour = detect_flavour()
    known = await known_arguments(home, flavour)
    family = read_family(make_random_model(home / "model", max_model_len=LIMIT))
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    start = VllmStart(family, ("model",), home / "run" / "e.sock", config, max_model_len=LIMIT, kv_cache_bytes=64 << 20, num_threads=2)
    command = build_command(start, flavour, known, os.environ)
    lines: list[str] = []
    process = EngineProcess(command.argv, command.env, start.uds, lines.append)
    try:
        await process.start()
        await process.wait_ready(READY_SECONDS)
        async with aiohttp.ClientSession("http://engine", connector=aiohttp.UnixConnector(str(start.uds))) as session:
            yield Engine(process, session, lines)
    finally:
        await process.stop(10)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fake(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeReplica]:
    if detect_flavour().version[:2] != (0, 32):
        pytest.skip("the fake is worded as vLLM 0.32")
    config = FakeConfig(max_model_len=LIMIT, block_size=32)
    async with FakeReplica(tmp_path_factory.mktemp("fake"), config=config) as replica:
        yield replica


async def test_completions_and_chats_are_answered_greedily_and_repeatably(engine: Engine) -> None:
    _, first = await engine.post("/v1/chat/completions", HELLO)
    _, second = await engine.post("/v1/chat/completions", HELLO)
    assert first["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]
    body = {"prompt": list(range(3, 103)), "max_tokens": 4, "temperature": 0}
    _, cold = await engine.post("/v1/completions", body)
    _, warm = await engine.post("/v1/completions", body)
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_another_prompt_gets_another_text(engine: Engine) -> None:
    """The random model is of use only if its text depends on the whole prompt."""
    texts = set()
    for first in range(3, 13):
        _, answer = await engine.post("/v1/completions", {"prompt": [first, *range(20, 90)], "max_tokens": 12, "temperature": 0})
        texts.add(answer["choices"][0]["text"])
    assert len(texts) == 10


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_tools_are_called_with_arguments_of_their_schema(engine: Engine, choice: Any) -> None:
    status, answer = await engine.post("/v1/chat/completions", {**HELLO, "tools": TOOLS, "tool_choice": choice, "max_tokens": 100})
    assert status == 200, answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert set(json.loads(call["function"]["arguments"])) == {"days"}


async def test_a_client_that_leaves_aborts_its_request(engine: Engine) -> None:
    body = {"prompt": "the river", "max_tokens": 900, "ignore_eos": True, "stream": True}
    response = await engine.session.post("/v1/completions", json=body)
    await response.content.readany()
    assert await running(engine) == 1
    response.close()
    await eventually(lambda: idle(engine))


async def running(engine: Engine) -> float:
    async with engine.session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))


async def idle(engine: Engine) -> bool:
    return await running(engine) == 0


async def test_no_prompt_reaches_the_log(engine: Engine) -> None:
    await engine.post("/v1/completions", {"prompt": "canary in the coal mine", "max_tokens": 1})
    assert not [line for line in engine.lines if "canary" in line]


def shape(value: Any) -> Any:
    """Names and kinds of a JSON value; numbers are one kind, and a list is known by its first item that is not null."""
    if isinstance(value, dict) and value and all(isinstance(item, float) for item in value.values()):
        return "logprob by token"
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(next((item for item in value if item is not None), None))] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def missing(fake: Any, real: Any, path: str = "") -> list[str]:
    """Where the fake's shape differs from the real one; fields of the real one that are null there may be absent."""
    if isinstance(fake, dict) and isinstance(real, dict):
        optional = {"content"} if path.endswith(".delta") else set()  # a piece of text may be held back
        found = [f"{path}.{key} is not in vLLM's" for key in fake if key not in real and key not in optional]
        for key, item in real.items():
            found += (
                missing(fake[key], item, f"{path}.{key}") if key in fake else ([] if item == "NoneType" else [f"{path}.{key} is missing"])
            )
        return found
    if isinstance(fake, list) and isinstance(real, list):
        return missing(fake[0], real[0], f"{path}[]") if fake and real else []
    return [] if fake == real or "NoneType" in (fake, real) else [f"{path}: {fake} for {real}"]


ANSWERED = [
    ("/v1/chat/completions", HELLO),
    ("/v1/chat/completions", {**HELLO, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**HELLO, "n": 2, "temperature": 1}),
    ("/v1/chat/completions", {**HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 100}),
    ("/v1/chat/completions", {**HELLO, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 100}),
    ("/v1/chat/completions", {**HELLO, "response_format": SCHEMA, "max_tokens": 100}),
    ("/v1/chat/completions", {**HELLO, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "the river", "max_tokens": 3, "temperature": 0}),
    ("/v1/completions", {"prompt": [[7, 8], [5, 6]], "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["the river", "stone"], "max_tokens": 3, "n": 2}),
    ("/v1/completions", {"prompt": "the river", "max_tokens": 3, "echo": True, "logprobs": 2}),
    ("/tokenize", {"prompt": "the river", "return_token_strs": True}),
    ("/tokenize", {"messages": HELLO["messages"]}),
    ("/detokenize", {"tokens": [65, 66]}),
]


@pytest.mark.parametrize(("path", "body"), ANSWERED)
async def test_the_fake_answers_in_vllm_s_shape(engine: Engine, fake: FakeReplica, path: str, body: dict[str, Any]) -> None:
    real_status, real = await engine.post(path, body)
    fake_status, mine = await fake.post(path, body)
    assert fake_status == real_status
    assert missing(shape(mine), shape(real)) == []


@pytest.mark.parametrize(("path", "body"), [a for a in ANSWERED if a[0].startswith("/v1/")])
async def test_the_fake_streams_in_vllm_s_shape(engine: Engine, fake: FakeReplica, path: str, body: dict[str, Any]) -> None:
    streamed = {**body, "stream_options": {"include_usage": True}}
    real = await engine.events(path, streamed)
    mine = [json.loads(event) for event in (await fake.events(path, streamed))[:-1]]
    for index in (0, 1, -2, -1):
        assert missing(shape(mine[index]), shape(real[index])) == [], index


REFUSED: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5000}),
    ("/v1/completions", {"prompt": [1] * 1100}),
    ("/v1/completions", {"prompt": [1] * LIMIT}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": ["the river", [5, 6]]}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
    ("/v1/completions", {"prompt": "a", "max_tokens": "x"}),
    ("/v1/completions", {"prompt": "a", "n": 0}),
    ("/v1/completions", {"prompt": "a", "n": 2, "temperature": 0}),
    ("/v1/completions", {"prompt": "a", "logprobs": 100}),
    ("/v1/completions", {"prompt": "a", "temperature": -1}),
    ("/v1/completions", {"prompt": "a", "temperature": 3}),
    ("/v1/completions", {"prompt": "a", "top_p": 0}),
    ("/v1/completions", {"prompt": "a", "stop": ["a", "b", "c", "d", "e"]}),
    ("/v1/completions", {"prompt": "a", "suffix": "x"}),
    ("/v1/completions", {"prompt": [999999]}),
    ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "a", "model": "other"}),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_schema"}}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": "x"}),
    ("/v1/chat/completions", {**HELLO, "logprobs": False, "top_logprobs": 3}),
    ("/v1/chat/completions", {**HELLO, "logprobs": True, "top_logprobs": 50}),
    ("/v1/chat/completions", {**HELLO, "tools": []}),
    ("/v1/chat/completions", {**HELLO, "tool_choice": "auto"}),
    ("/v1/chat/completions", {**HELLO, "tools": TOOLS, "tool_choice": "zz"}),
    ("/v1/chat/completions", {**HELLO, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "q"}}}),
    ("/v1/chat/completions", {**HELLO, "max_tokens": 9999}),
    ("/v1/chat/completions", {**HELLO, "temperature": "hot"}),
    ("/v1/chat/completions", [1]),
]


def field_of(param: str | None) -> str | None:
    """The field at fault; which item of it is named depends on the order in which vLLM tries the forms of a field."""
    return param and ".".join(part for part in param.split(".") if not part.isdigit())


@pytest.mark.parametrize(("path", "body"), REFUSED)
async def test_the_fake_refuses_as_vllm_does(engine: Engine, fake: FakeReplica, path: str, body: Any) -> None:
    real_status, real = await engine.post(path, body)
    fake_status, mine = await fake.post(path, body)
    assert fake_status == real_status
    error, expected = mine["error"], real["error"]
    assert (error["type"], error["code"]) == (expected["type"], expected["code"])
    assert field_of(error["param"]) == field_of(expected["param"])
    if error["type"] == "BadRequestError":
        assert error["message"] == expected["message"]


async def test_a_wrong_argument_fails_the_start_with_vllm_s_own_words(engine: Engine, tmp_path: Path) -> None:
    """Last in the file: the engine above is stopped first, so that two do not share the machine's memory."""
    tree = [psutil.Process(engine.process.keeper_pid), *psutil.Process(engine.process.keeper_pid).children(recursive=True)]
    assert len(tree) >= 3
    assert await engine.process.stop(10) == 0
    assert not [p for p in tree if p.is_running()]
    assert not engine.process.uds.exists()
    flavour = detect_flavour()
    known = await known_arguments(tmp_path.parent, flavour)
    family = read_family(make_random_model(tmp_path / "model"))
    start = VllmStart(family, ("model",), tmp_path / "e.sock", {"max_model_len": 9999999}, kv_cache_bytes=1 << 26)
    command = build_command(start, flavour, known, os.environ)
    broken = EngineProcess(command.argv, command.env, start.uds, lambda line: None)
    try:
        await broken.start()
        assert await asyncio.wait_for(broken.wait(), READY_SECONDS) != 0
        assert "max_model_len (9999999) is greater than the derived max_model_len" in broken.explain(1)
    finally:
        await broken.stop(1)

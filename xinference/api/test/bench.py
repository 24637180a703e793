"""Scripted replicas, the app before them and an openai client: the set-up of the stream tests."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
from aiohttp import web

from xinference.api.test.fakes import (
    FakeCluster,
    Script,
    ScriptedReplica,
    Served,
    chunk,
    model,
    replica,
    send_event,
    serving,
    start_stream,
    usage_chunk,
)

MESSAGES: Any = [{"role": "user", "content": "x"}]
WHOLE = (chunk(), chunk("one"), chunk(" two"), chunk(finish="stop"), usage_chunk(), "[DONE]")
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": usage_chunk()["usage"],
    "kv_transfer_params": None,
}


async def until(condition: Any, seconds: float = 5.0) -> None:
    """Wait for a condition, failing after some time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def setup(
    tmp_path: Path, *scripts: Script, xavier: bool = False, **options: Any
) -> AsyncIterator[tuple[FakeCluster, list[ScriptedReplica], Served, openai.AsyncOpenAI]]:
    """One replica for each script, the app before them, and a client that tries nothing twice."""
    cluster = FakeCluster()
    replicas = [ScriptedReplica(script) for script in scripts]
    async with _all_serving(replicas, tmp_path):
        await cluster.put(model(xavier=xavier), *(replica(f"m-{index}", tmp_path / f"{index}") for index in range(len(replicas))))
        async with (
            serving(cluster, **options) as served,
            openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="k", max_retries=0) as client,
        ):
            yield cluster, replicas, served, client


@asynccontextmanager
async def _all_serving(replicas: list[ScriptedReplica], tmp_path: Path, index: int = 0) -> AsyncIterator[None]:
    if index == len(replicas):
        yield
        return
    async with replicas[index].serving(tmp_path / str(index)), _all_serving(replicas, tmp_path, index + 1):
        yield


def request_bytes(body: Any, headers: str = "") -> bytes:
    """A chat completion as it goes over the wire."""
    content = json.dumps(body).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {len(content)}"]
    return ("\r\n".join(head) + f"\r\n{headers}\r\n").encode() + content


async def raw(served: Served, body: Any, headers: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a bare connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request_bytes(body, headers))
    await writer.drain()
    return reader, writer


async def read_chunked(reader: asyncio.StreamReader) -> tuple[bytes, list[bytes]]:
    """The head of an answer and its chunks, to the end."""
    head = await reader.readuntil(b"\r\n\r\n")
    chunks = []
    while size := int(await reader.readline(), 16):
        chunks.append(await reader.readexactly(size))
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return head, chunks


def dying(*events: Any) -> Script:
    """A replica that breaks the connection after some events."""

    async def script(request: web.Request, _: Any) -> web.StreamResponse:
        response = await start_stream(request)
        for event in events:
            await send_event(response, event)
        assert request.transport is not None
        request.transport.abort()
        return response

    return script


def waiting(started: asyncio.Event, *events: Any) -> Script:
    """A replica that sends some events and then nothing."""

    async def script(request: web.Request, body: Any) -> web.StreamResponse:
        if body.get("stream") and events:
            response = await start_stream(request)
            for event in events:
                await send_event(response, event)
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    return script


def questions(count: int) -> list[Any]:
    """Prompts that share nothing, so that every replica is the first choice of some."""
    return [[{"role": "user", "content": f"question {index}"}] for index in range(count)]

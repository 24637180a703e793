"""Streams from a replica's socket to the client's: what arrives, what happens when either end fails."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from xinference.api.config import ApiConfig
from xinference.api.test.fakes import (
    FakeCluster,
    Script,
    ScriptedReplica,
    Served,
    answering,
    chunk,
    model,
    replica,
    send_event,
    serving,
    start_stream,
    streaming,
    usage_chunk,
)
from xinference.settings import Limits

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


async def test_a_stream_arrives_as_the_replica_sent_it(tmp_path: Path) -> None:
    async with setup(tmp_path, streaming(*WHOLE)) as (_, _, _, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


async def test_usage_comes_last_when_asked_for(tmp_path: Path) -> None:
    async with setup(tmp_path, streaming(*WHOLE)) as (_, _, _, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 4


async def test_the_framing_is_exact(tmp_path: Path) -> None:
    async with setup(tmp_path, streaming(chunk("one"), usage_chunk(), "[DONE]")) as (_, _, served, _):
        reader, writer = await raw(served, {"model": "m", "messages": MESSAGES, "stream": True}, headers="x-request-id: abc.1\r\n")
        head, chunks = await read_chunked(reader)
        writer.close()
    lines = head.decode().lower().split("\r\n")
    assert lines[0] == "http/1.1 200 ok"
    assert "content-type: text/event-stream; charset=utf-8" in lines
    assert "cache-control: no-cache" in lines
    assert "x-accel-buffering: no" in lines
    assert "x-request-id: abc.1" in lines
    assert b"".join(chunks) == b"data: " + json.dumps(chunk("one"), separators=(",", ":")).encode() + b"\n\ndata: [DONE]\n\n"


async def test_what_the_replica_gets_names_the_request(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER)) as (_, [engine], _, client):
        await client.chat.completions.create(model="m", messages=MESSAGES, extra_headers={"x-request-id": "mine"})
        await client.chat.completions.create(model="m", messages=MESSAGES)
    (_, first, first_headers), (_, second, second_headers) = engine.received
    assert first_headers["x-request-id"] == "mine"
    assert first["kv_transfer_params"]["xavier"]["request"] != "mine"
    assert second["kv_transfer_params"]["xavier"]["request"] == second_headers["x-request-id"]
    assert "authorization" not in first_headers


async def test_a_whole_answer_loses_what_is_between_us_and_the_replica(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER)) as (_, _, served, _):
        reader, writer = await raw(served, {"model": "m", "messages": MESSAGES}, headers="connection: close\r\n")
        body = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
    assert "kv_transfer_params" not in body
    assert body["choices"] == ANSWER["choices"]


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


@pytest.mark.parametrize("fault", [dying, streaming], ids=["cut", "ended without its last event"])
async def test_a_replica_that_dies_mid_stream_gives_an_error_event_and_is_reported(tmp_path: Path, fault: Any) -> None:
    async with setup(tmp_path, fault(chunk(), chunk("one"))) as (cluster, _, _, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert [(await anext(stream)).choices[0].delta.content for _ in range(2)] == ["", "one"]
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
        assert caught.value.code == "engine_dead"
        await until(lambda: cluster.asked("report_replica_failure") == [("m", "m-0", "1")])


async def test_an_engine_that_reports_its_death_mid_stream_is_engine_dead(tmp_path: Path) -> None:
    dead = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": None, "code": 500}}
    async with setup(tmp_path, streaming(chunk("one"), dead, "[DONE]")) as (cluster, _, _, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as caught:
            [event async for event in stream]
        assert caught.value.code == "engine_dead"
        await until(lambda: cluster.asked("report_replica_failure"))


async def test_an_error_that_comes_first_in_a_stream_is_a_status(tmp_path: Path) -> None:
    bad = {"error": {"message": "bad grammar", "type": "BadRequestError", "param": "response_format", "code": 400}}
    async with setup(tmp_path, streaming(bad, "[DONE]")) as (_, _, _, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    assert caught.value.param == "response_format"


def questions(count: int) -> list[Any]:
    """Prompts that share nothing, so that every replica is the first choice of some."""
    return [[{"role": "user", "content": f"question {index}"}] for index in range(count)]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_that_dies_before_its_first_byte_is_replaced_unseen(tmp_path: Path, stream: bool) -> None:
    good = streaming(*WHOLE) if stream else answering(ANSWER)
    async with setup(tmp_path, dying(), dying(), good) as (cluster, replicas, _, client):
        for messages in questions(12):
            answer = await client.chat.completions.create(model="m", messages=messages, stream=stream)
            if isinstance(answer, openai.AsyncStream):
                assert [event async for event in answer]
        # One that broke a connection is avoided for a while, and reported once.
        assert [len(each.received) for each in replicas] == [1, 1, 12]
        await until(lambda: sorted(args[1] for args in cluster.asked("report_replica_failure")) == ["m-0", "m-1"])


async def test_a_replica_that_broke_a_connection_is_asked_again_when_no_other_is_left(tmp_path: Path) -> None:
    times = iter((dying(), answering(ANSWER)))

    async def script(request: web.Request, body: Any) -> web.StreamResponse:
        return await next(times)(request, body)

    async with setup(tmp_path, script) as (_, _, _, client):
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert (await client.chat.completions.create(model="m", messages=MESSAGES)).choices


async def test_a_replica_that_is_not_there_is_replaced_unseen(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER)) as (cluster, _, _, client):
        await cluster.put(model(), replica("gone", tmp_path / "nobody"), replica("m-0", tmp_path / "0"))
        for messages in questions(6):
            assert (await client.chat.completions.create(model="m", messages=messages)).choices


async def test_when_all_replicas_fail_the_client_is_told_to_come_back(tmp_path: Path) -> None:
    async with setup(tmp_path, dying(), dying()) as (_, replicas, _, client):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    assert caught.value.status_code == 503
    assert caught.value.code == "no_replica_available"
    assert caught.value.response.headers["retry-after"] == "1"
    assert [len(each.received) for each in replicas] == [1, 1]


async def test_a_busy_replica_is_passed_by(tmp_path: Path) -> None:
    busy = answering({"error": {"message": "The engine is currently busy", "type": "x", "param": None, "code": 503}}, 503)
    async with setup(tmp_path, busy, busy, answering(ANSWER)) as (cluster, _, _, client):
        assert (await client.chat.completions.create(model="m", messages=MESSAGES)).choices
        assert cluster.asked("report_replica_failure") == []


async def test_a_refusal_is_not_tried_elsewhere(tmp_path: Path) -> None:
    bad = answering({"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}, 400)
    async with setup(tmp_path, bad, bad) as (_, replicas, _, client):
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=MESSAGES)
    assert sum(len(each.received) for each in replicas) == 1


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


@pytest.mark.parametrize(("stream", "events"), [(True, (chunk("one"),)), (True, ()), (False, ())], ids=["stream", "queued", "whole"])
async def test_a_client_that_leaves_aborts_its_request_within_a_second(tmp_path: Path, stream: bool, events: Any) -> None:
    started = asyncio.Event()
    async with setup(tmp_path, waiting(started, *events)) as (_, [engine], served, _):
        _, writer = await raw(served, {"model": "m", "messages": MESSAGES, "stream": stream})
        await started.wait()
        writer.close()
        await until(lambda: engine.left == 1, 1.0)
        await until(lambda: not served.app.state.api.gateway.open, 1.0)


async def test_closing_a_stream_of_the_openai_client_aborts_it(tmp_path: Path) -> None:
    started = asyncio.Event()
    async with setup(tmp_path, waiting(started, chunk("one"))) as (_, [engine], _, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: engine.left == 1, 1.0)


async def test_a_silent_stream_is_kept_alive_with_comments(tmp_path: Path) -> None:
    more = asyncio.Event()

    async def script(request: web.Request, _: Any) -> web.StreamResponse:
        response = await start_stream(request)
        await more.wait()
        for event in WHOLE:
            await send_event(response, event)
        return response

    async with setup(tmp_path, script, config=ApiConfig(keep_alive_seconds=0.02)) as (_, _, served, _):
        reader, writer = await raw(served, {"model": "m", "messages": MESSAGES, "stream": True})
        await reader.readuntil(b": keep-alive\n\n")
        await reader.readuntil(b": keep-alive\n\n")
        more.set()
        rest = await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()
    assert b'"content":"one"' in rest


async def test_a_silent_whole_answer_gets_no_comments(tmp_path: Path) -> None:
    more = asyncio.Event()

    async def script(request: web.Request, body: Any) -> web.StreamResponse:
        await more.wait()
        return await answering(ANSWER)(request, body)

    async with setup(tmp_path, script, config=ApiConfig(keep_alive_seconds=0.01)) as (_, [engine], _, client):
        task = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
        await until(lambda: engine.received)
        asyncio.get_running_loop().call_later(0.1, more.set)
        assert (await task).choices


async def test_a_slow_reader_is_dropped_and_its_request_aborted(tmp_path: Path) -> None:
    sent = 0

    async def script(request: web.Request, _: Any) -> web.StreamResponse:
        nonlocal sent
        response = await start_stream(request)
        event = chunk("x" * 50_000)
        while True:
            await send_event(response, event)
            sent += 50_000

    async with setup(tmp_path, script, limits=Limits(slow_reader_bytes=200_000)) as (_, [engine], served, _):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", served.port))
        sock.sendall(request_bytes({"model": "m", "messages": MESSAGES, "stream": True}))
        await until(lambda: engine.left == 1, 10.0)
        await until(lambda: not served.server.server_state.connections)
        metric = served.app.state.api.metrics.slow_readers.labels("m")._value.get()
        sock.close()
    assert metric == 1
    assert sent < 20_000_000


async def test_a_reader_that_keeps_up_gets_any_amount(tmp_path: Path) -> None:
    events = [chunk("x" * 50_000)] * 100
    async with setup(tmp_path, streaming(*events, *WHOLE), limits=Limits(slow_reader_bytes=200_000)) as (_, _, _, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert len([event async for event in stream]) == 104


async def test_a_request_that_lasts_too_long_is_ended(tmp_path: Path) -> None:
    started = asyncio.Event()
    async with setup(tmp_path, waiting(started, chunk("one")), limits=Limits(request_seconds=0.2)) as (_, [engine], _, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as caught:
            [event async for event in stream]
        assert caught.value.code == "request_timeout"
        await until(lambda: engine.left == 1, 1.0)


async def test_an_administrator_can_abort_a_request(tmp_path: Path) -> None:
    started = asyncio.Event()
    async with setup(tmp_path, waiting(started, chunk("one"))) as (_, [engine], served, client), aiohttp.ClientSession() as http:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, extra_headers={"x-request-id": "job-1"})
        await started.wait()
        answers = []
        for request_id in ("other", "job-1"):
            async with http.post(f"{served.url}/v1/models/m/requests/{request_id}/abort") as response:
                answers.append(await response.json())
        assert answers == [{"aborted": False}, {"aborted": True}]
        with pytest.raises(openai.APIError) as caught:
            [event async for event in stream]
        assert caught.value.code == "request_aborted"
        await until(lambda: engine.left == 1, 1.0)


async def test_a_replica_that_the_supervisor_gives_up_is_given_up_here(tmp_path: Path) -> None:
    """A frozen engine, or one behind a broken network, keeps its connections: only the route table tells."""
    started = asyncio.Event()
    async with setup(tmp_path, waiting(started, chunk("one"))) as (cluster, _, _, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        await started.wait()
        await cluster.put(model(state="unavailable"))
        with pytest.raises(openai.APIError) as caught:
            [event async for event in stream]
        assert caught.value.code == "engine_dead"


async def test_a_queued_request_moves_on_when_its_replica_is_given_up(tmp_path: Path) -> None:
    started = asyncio.Event()
    async with setup(tmp_path, waiting(started), answering(ANSWER)) as (cluster, replicas, _, client):
        frozen, good = replica("m-0", tmp_path / "0"), replica("m-1", tmp_path / "1")
        await cluster.put(model(), frozen)
        task = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
        await started.wait()
        await cluster.put(model(), good)
        assert (await task).choices
        assert len(replicas[1].received) == 1


async def test_a_draining_replica_finishes_its_streams(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def script(request: web.Request, _: Any) -> web.StreamResponse:
        response = await start_stream(request)
        await send_event(response, chunk("one"))
        await go.wait()
        await send_event(response, "[DONE]")
        return response

    async with setup(tmp_path, script) as (cluster, _, served, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        await cluster.put(model(), replica("m-0", tmp_path / "0", state="draining"))
        await until(lambda: not served.app.state.api.gateway.table.get("m").ready)
        go.set()
        assert len([event async for event in stream]) == 1


async def test_an_endless_event_is_an_internal_error(tmp_path: Path) -> None:
    async def script(request: web.Request, _: Any) -> web.StreamResponse:
        response = await start_stream(request)
        while True:
            await response.write(b"data: " + b"x" * 10_000)

    async with setup(tmp_path, script, config=ApiConfig(event_bytes=100_000)) as (_, [engine], _, client):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        await until(lambda: engine.left == 1, 1.0)
    assert caught.value.code == "internal_error"
    assert caught.value.response.headers["x-should-retry"] == "false"


async def test_an_endless_answer_is_an_internal_error(tmp_path: Path) -> None:
    config = ApiConfig(response_bytes=100_000)
    async with setup(tmp_path, answering({"text": "x" * 200_000}), config=config) as (_, _, _, client):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
    assert caught.value.code == "internal_error"

"""How a request ends before its answer does: clients that leave or do not read, silence, deadlines, replicas that are given up."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from xinference.api.config import ApiConfig
from xinference.api.test.bench import ANSWER, MESSAGES, WHOLE, raw, request_bytes, setup, until, waiting
from xinference.api.test.fakes import answering, chunk, model, replica, send_event, start_stream, streaming
from xinference.settings import Limits


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

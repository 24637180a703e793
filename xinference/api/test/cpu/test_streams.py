"""Streams from a replica's socket to the client's: what arrives, and what happens when the replica fails."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from xinference.api.config import ApiConfig
from xinference.api.test.bench import ANSWER, MESSAGES, WHOLE, dying, questions, raw, read_chunked, setup, until
from xinference.api.test.fakes import answering, chunk, model, replica, send_event, start_stream, streaming, usage_chunk


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


async def test_a_connection_whose_answer_has_ended_serves_the_next_request(tmp_path: Path) -> None:
    connections: list[Any] = []

    async def script(request: web.Request, body: Any) -> web.StreamResponse:
        connections.append(request.transport)
        return await (streaming(*WHOLE) if body.get("stream") else answering(ANSWER))(request, body)

    async with setup(tmp_path, script) as (_, _, _, client):
        for stream in (True, False, True):
            answer = await client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
            if stream:
                assert [event async for event in answer]
    assert len(set(connections)) == 1


async def test_a_connection_whose_answer_does_not_end_is_not_used_again(tmp_path: Path) -> None:
    connections: list[Any] = []

    async def script(request: web.Request, _: Any) -> web.StreamResponse:
        connections.append(request.transport)
        response = await start_stream(request)
        for event in WHOLE:
            await send_event(response, event)
        await asyncio.Event().wait()
        return response

    async with setup(tmp_path, script, config=ApiConfig(finish_seconds=0.01)) as (_, [engine], served, client):
        for number in (1, 2):
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            assert [event async for event in stream]
            await until(partial(lambda count: engine.left == count, number))
        await until(lambda: not served.app.state.api.gateway.open)
        assert [past.state for past in served.app.state.api.gateway.history] == ["finished", "finished"]
    assert len(set(connections)) == 2

"""Every limit, lowered and passed: the status, the words, and the count under the limit's own name."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from xinference.api.config import ApiConfig
from xinference.api.metrics import ENGINE_LIMITS
from xinference.api.test.bench import ANSWER, MESSAGES, until
from xinference.api.test.fakes import (
    FakeCluster,
    ScriptedReplica,
    Served,
    answering,
    chunk,
    model,
    replica,
    send_event,
    serving,
    start_stream,
)
from xinference.api.test.wire import HEALTH, HOST, Line, Reply, line, post
from xinference.settings import Limits

CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
QUICK = ApiConfig(abort_seconds=0.2, keep_connection_seconds=0.05, event_poll_seconds=0.01, log_poll_seconds=0.01)
# Limits of API keys have tests of their own, with the keys.
ELSEWHERE = {"key_concurrent_requests", "key_requests_per_minute"}


@dataclass(frozen=True)
class Case:
    """How a limit is passed.

    Args:
        value: what it is lowered to.
        status: of the refusal; None where a connection is cut without an answer.
        within: a body, or a value of it, that just passes.
        over: the same that does not; or what to do to a server.
    """

    value: Any
    status: int | None
    over: Any
    within: Any = None
    path: str = "/v1/chat/completions"


async def _bodies(served: Served) -> Reply:
    async with line(served) as first, line(served) as second:
        await first.send(post(b" " * 90, length=100))
        await until(lambda: served.app.middleware_stack.app._held_bytes == 90)  # type: ignore[union-attr]
        await second.send(post(b" " * 20))
        return await second.reply()


async def _connections(served: Served) -> Reply:
    async with line(served), line(served), line(served) as third:
        await third.send(HEALTH)
        return await third.reply()


async def _queued(served: Served) -> Reply:
    async with line(served) as first, line(served) as second:
        await first.send(_body({**CHAT, "stream": True}))
        await until(lambda: len(served.app.state.api.gateway.open) == 1)
        await second.send(_body(CHAT))
        return await second.reply()


async def _event_streams(served: Served) -> Reply:
    ask = b"GET /v1/models/m/events?follow=true HTTP/1.1\r\n" + HOST + b"\r\n"
    async with line(served) as first, line(served) as second:
        await first.send(ask)
        await until(lambda: len(served.app.state.api.gateway.feeds) == 1)
        await second.send(ask)
        return await second.reply()


async def _cut(served: Served, data: bytes, again: bytes = b"") -> Reply:
    async with line(served) as connection:
        await connection.send(data)
        await asyncio.sleep(0)
        await connection.send(again)
        said = await connection.end()
    return Reply(0, {}, said)


async def _unread(served: Served) -> Reply:
    ask = b"GET /v1/models/m/logs?tail=20000 HTTP/1.0\r\n" + HOST + b"\r\n"
    async with not_read(served, ask):
        await until(lambda: not served.server.server_state.connections)
    return Reply(0, {}, b"")


async def _slow_reader(served: Served) -> Reply:
    async with not_read(served, _body({**CHAT, "stream": True})):
        await until(lambda: not served.server.server_state.connections)
    return Reply(0, {}, b"")


async def _deadline(served: Served) -> Reply:
    async with line(served) as connection:
        await connection.send(_body({**CHAT, "user": "wait"}))
        return await connection.reply()


@asynccontextmanager
async def not_read(served: Served, data: bytes) -> AsyncIterator[None]:
    """A client that asks and never reads."""
    _reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1)
    writer.write(data)
    await until(lambda: bool(served.server.server_state.connections))
    try:
        yield
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _body(value: Any, path: str = "/v1/chat/completions") -> bytes:
    return post(msgspec.json.encode(value), path)


def _head(size: int = 0, fields: int = 0) -> bytes:
    return b"GET /health HTTP/1.1\r\n" + HOST + b"x: a\r\n" * fields + b"y: " + b"a" * size + b"\r\n\r\n"


CASES: dict[str, Case] = {
    "connections": Case(2, 429, _connections),
    "head_bytes": Case(1024, 431, _head(size=1100), _head(size=900)),
    "head_fields": Case(16, 431, _head(fields=16), _head(fields=14)),
    "pipelined_requests": Case(2, None, lambda served: _cut(served, _body({**CHAT, "stream": True}), HEALTH * 4)),
    "body_bytes": Case(100, 413, post(b" " * 101)),
    "bodies_bytes": Case(100, 429, _bodies),
    "json_depth": Case(4, 400, _body({**CHAT, "x": [[[[]]]]}), _body({**CHAT, "x": [[[]]]})),
    "messages": Case(2, 400, _body({**CHAT, "messages": MESSAGES * 3}), _body({**CHAT, "messages": MESSAGES * 2})),
    "prompts": Case(
        2, 400, _body({**TEXT, "prompt": ["x"] * 3}, "/v1/completions"), _body({**TEXT, "prompt": ["x"] * 2}, "/v1/completions")
    ),
    "choices": Case(2, 400, _body({**CHAT, "n": 3}), _body({**CHAT, "n": 2})),
    "stop_strings": Case(1, 400, _body({**CHAT, "stop": ["a", "b"]}), _body({**CHAT, "stop": ["a"]})),
    "logprobs": Case(1, 400, _body({**TEXT, "logprobs": 2}, "/v1/completions"), _body({**TEXT, "logprobs": 1}, "/v1/completions")),
    "tools": Case(
        1,
        400,
        _body({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}] * 2}),
        _body({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    ),
    "queued_requests": Case(1, 429, _queued),
    "slow_reader_bytes": Case(1024, None, _slow_reader),
    "event_streams": Case(1, 429, _event_streams),
    "head_read_seconds": Case(0.1, None, lambda served: _cut(served, HEALTH[:20])),
    "body_read_seconds": Case(0.1, 400, post(b"{", length=10)),
    "unread_seconds": Case(0.1, None, _unread),
    "request_seconds": Case(0.2, 504, _deadline),
    "max_model_len": Case(None, 400, _body({**TEXT, "prompt": [1] * 4000, "max_tokens": 97}, "/v1/completions")),
    "engine": Case(None, 400, _body({**CHAT, "user": "refuse"})),
}


async def _script(request: Any, body: Any) -> Any:
    """A replica that streams for ever, refuses, waits or answers, as its user says."""
    if body.get("stream"):
        response = await start_stream(request)
        while True:
            await send_event(response, chunk("x" * 1000))
    if body.get("user") == "wait":
        await asyncio.Event().wait()
    if body.get("user") == "refuse":
        refusal = {"error": {"message": "bad_words must be at most 9", "type": "Bad Request", "param": "bad_words", "code": 400}}
        return await answering(refusal, 400)(request, body)
    return await answering(ANSWER)(request, body)


@asynccontextmanager
async def limited(tmp_path: Path, **lowered: Any) -> AsyncIterator[Served]:
    """A server with one limit lowered."""
    cluster = FakeCluster()
    cluster.log_lines = ["x" * 1000 + "\n"] * 20_000
    async with ScriptedReplica(_script).serving(tmp_path / "s"):
        await cluster.put(model(), replica("m-0", tmp_path / "s"))
        async with serving(cluster, config=QUICK, limits=Limits(**lowered)) as served:
            yield served


async def rows(served: Served) -> dict[str, Any]:
    """What the server says of its limits, by name."""
    async with aiohttp.ClientSession() as http, http.get(served.url + "/v1/limits") as response:
        return {row["name"]: row for row in (await response.json())["data"]}


async def reply_to(served: Served, data: bytes) -> Reply:
    """The answer to a request of its own connection."""
    async with line(served) as connection:
        await connection.send(data)
        return await connection.reply()


def test_every_limit_has_a_case() -> None:
    assert set(CASES) | ELSEWHERE == set(Limits.model_fields) | set(ENGINE_LIMITS)


@pytest.mark.parametrize("name", CASES)
async def test_what_is_over_a_limit_is_refused_in_words_and_counted_once(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    lowered = {} if case.value is None else {name: case.value}
    over: Callable[[Served], Awaitable[Reply]] | bytes = case.over
    async with limited(tmp_path, **lowered) as served:
        metrics = served.app.state.api.metrics
        if case.within is not None:
            assert (await reply_to(served, case.within)).status == 200
        assert metrics.num_refused(name) == 0
        reply = await reply_to(served, over) if isinstance(over, bytes) else await over(served)
        if case.status is not None:
            assert reply.status == case.status
            if case.value is not None:
                assert f"{case.value:g}" in reply.error["message"]
            assert ("retry-after" in reply.headers) == (case.status == 429)
        await until(lambda: metrics.num_refused(name) == 1)
        others = {other for other in CASES if other != name and metrics.num_refused(other)}
        assert not others
        async with aiohttp.ClientSession() as http, http.get(served.url + "/metrics") as response:
            assert f'xinference_refused_total{{limit="{name}"}} 1.0' in await response.text()


async def test_limits_are_shown_with_their_defaults_and_counts(tmp_path: Path) -> None:
    async with limited(tmp_path, choices=2) as served:
        before = (await rows(served))["choices"]
        await reply_to(served, CASES["choices"].over)
        after = await rows(served)
    assert (before["value"], before["default"], before["refused"]) == (2, 8, 0)
    assert after["choices"]["refused"] == 1
    assert set(after) == set(Limits.model_fields)
    assert all(row["description"] for row in after.values())


async def test_connections_over_the_limit_do_not_stay_and_make_room_again(tmp_path: Path) -> None:
    async with limited(tmp_path, connections=2) as served:
        async with line(served) as first, line(served) as second, line(served) as third:
            assert await third.end() == b""  # it asked nothing, and is cut
            for within in (first, second):
                await within.send(HEALTH)
                assert (await within.reply()).status == 200
        await until(lambda: not served.server.server_state.connections)
        assert (await reply_to(served, HEALTH)).status == 200


async def test_thirty_two_event_streams_are_the_default_and_one_that_ends_makes_room(tmp_path: Path) -> None:
    ask = b"GET /v1/models/m/events?follow=true HTTP/1.1\r\n" + HOST + b"\r\n"
    async with limited(tmp_path) as served, contextlib.AsyncExitStack() as stack:
        feeds = served.app.state.api.gateway.feeds
        lines: list[Line] = [await stack.enter_async_context(line(served)) for _ in range(33)]
        for each in lines[:32]:
            await each.send(ask)
        await until(lambda: len(feeds) == 32)
        await lines[32].send(ask)
        assert (await lines[32].reply()).status == 429
        lines[0].writer.transport.abort()
        await until(lambda: len(feeds) == 31)
        await lines[32].send(ask)
        await until(lambda: len(feeds) == 32)


@pytest.mark.parametrize("name", sorted(Limits.model_fields))
def test_a_limit_that_is_no_limit_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: -1})

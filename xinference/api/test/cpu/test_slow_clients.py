"""Clients that dribble, stop, leave in the middle, or do not read: each holds a connection for a bounded time, and nothing after it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from xinference.api.config import ApiConfig
from xinference.api.test.bench import MESSAGES, request_bytes, setup, until, waiting
from xinference.api.test.fakes import FakeCluster, Served, chunk, model, send_event, serving, start_stream
from xinference.api.test.wire import HEALTH, HOST, chunked, held, line, nothing_left, post
from xinference.settings import Limits

# A head or body of this server takes milliseconds: what is late in these tests is late because nobody sends it.
QUICK: Any = {
    "config": ApiConfig(abort_seconds=0.2, keep_connection_seconds=0.05),
    "limits": Limits(head_read_seconds=0.3, body_read_seconds=0.3, unread_seconds=0.2),
}
STREAM = {"model": "m", "messages": MESSAGES, "stream": True}
PART = b'{"model":"m"'


def refused(served: Served, limit: str) -> float:
    """How often a limit has refused."""
    return float(served.app.state.api.metrics.refused.labels(limit)._value.get())


async def dribble(served: Served, start: bytes, piece: bytes) -> bytes:
    """Send a beginning, then a piece again and again until the server has had enough; returns what it said."""
    async with line(served) as connection:
        await connection.send(start)
        ended = asyncio.create_task(connection.end())
        while not ended.done():
            await connection.send(piece)
            await asyncio.wait({ended}, timeout=0.02)
        return await ended


async def endless(request: Any, _: Any) -> Any:
    """A replica that streams for ever."""
    response = await start_stream(request)
    while True:
        await send_event(response, chunk("x" * 1000))


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\n", b"x: a\r\n"),
        (b"GET /health", b"a"),
        (b"\r\n", b"\r\n"),
        (HEALTH, b"\r\n"),
        (HEALTH + b"GET /health HTTP/1.1\r\nx: ", b"a"),
    ],
    ids=["nothing", "fields", "address", "line breaks", "line breaks after a request", "second head"],
)
async def test_a_head_that_is_dribbled_is_cut(start: bytes, piece: bytes) -> None:
    async with serving(FakeCluster(), **QUICK) as served, nothing_left(served):
        said = await dribble(served, start, piece)
        assert said.count(b"HTTP/1.1 ") == (1 if start.startswith(HEALTH) else 0)
        assert refused(served, "head_read_seconds") == 1


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (post(PART, length=10_000), b" "),
        (chunked(b""), b"1\r\n \r\n"),
        (chunked(b"1;"), b"a"),
        (chunked(b"1\r\n"), b""),
        (post(PART, "/v1/models", length=10_000), b" "),
        (post(PART, "/v1/models/m/scale", length=10_000), b" "),
    ],
    ids=["length", "chunks", "chunk extension", "no chunk", "launch", "scale"],
)
async def test_a_body_that_is_dribbled_is_refused_and_the_connection_cut(start: bytes, piece: bytes) -> None:
    async with serving(FakeCluster(), **QUICK) as served, nothing_left(served):
        said = await dribble(served, start, piece)
        assert said.startswith(b"HTTP/1.1 400 ")
        assert b"did not arrive within" in said
        assert refused(served, "body_read_seconds") == 1


@pytest.mark.parametrize("start", [post(b"", length=2**40), b"POST /nothing HTTP/1.1\r\n" + HOST + b"content-length: 9999999\r\n\r\n"])
async def test_whoever_goes_on_sending_after_the_answer_is_cut(start: bytes) -> None:
    async with serving(FakeCluster(), **QUICK) as served, nothing_left(served):
        said = await dribble(served, start, b" ")
    assert said.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 415 "))


async def test_whoever_ends_its_body_after_an_early_answer_keeps_the_connection() -> None:
    async with (
        serving(FakeCluster(), **QUICK | {"limits": Limits(body_bytes=10)}) as served,
        nothing_left(served),
        line(served) as connection,
    ):
        await connection.send(post(b"", length=20))
        assert (await connection.reply()).status == 413
        (protocol,) = served.server.server_state.connections
        await until(lambda: protocol._closing is not None)
        cut = protocol._closing
        await connection.send(b" " * 20 + HEALTH)
        assert (await connection.reply()).status == 200
        assert cut.cancelled()
        await connection.send(HEALTH)
        assert (await connection.reply()).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /health HTTP/1.1\r\nhost:",
        HEALTH,
        post(PART, length=10_000),
        chunked(b"5\r\n{"),
        request_bytes({"model": "m", "messages": MESSAGES}),
        request_bytes(STREAM),
    ],
    ids=["nothing", "half a head", "request", "half a body", "half a chunk", "chat", "stream"],
)
async def test_a_client_that_closes_its_side_has_left(tmp_path: Path, data: bytes) -> None:
    started = asyncio.Event()
    script = waiting(started, chunk())
    async with setup(tmp_path, script, **QUICK) as (_, [engine], served, _), nothing_left(served), line(served) as connection:
        await connection.send(data)
        connection.writer.write_eof()
        await connection.end()
    assert engine.left == len(engine.received)


async def test_every_pipelined_request_hears_that_its_client_has_left(tmp_path: Path) -> None:
    async with setup(tmp_path, endless, **QUICK) as (_, [engine], served, _), nothing_left(served):
        async with line(served) as connection:
            await connection.send(request_bytes(STREAM) * 3)
            await connection.reader.readuntil(b"\r\n\r\n")
        await until(lambda: engine.left == 1)
    assert len(engine.received) == 1


@pytest.mark.parametrize(
    "more", [HEALTH * 200, post(b" " * 100_000), chunked(b"1000\r\n" + b" " * 0x1000 + b"\r\n" * 1) * 40], ids=["many", "large", "bad"]
)
async def test_a_connection_holds_no_more_than_so_much_for_later(tmp_path: Path, more: bytes) -> None:
    async with setup(tmp_path, endless, **QUICK) as (_, [engine], served, _), nothing_left(served), line(served) as connection:
        await connection.send(request_bytes(STREAM))
        await connection.reader.readuntil(b"\r\n\r\n")
        await connection.send(more)
        await connection.end()
        await until(lambda: engine.left == 1)


async def test_no_answer_to_garbage_is_written_into_the_stream_before_it(tmp_path: Path) -> None:
    async with setup(tmp_path, endless, **QUICK) as (_, [engine], served, _), nothing_left(served), line(served) as connection:
        await connection.send(request_bytes(STREAM))
        await connection.reader.readuntil(b"\r\n\r\n")
        await connection.send(b"garbage\r\n\r\n")
        assert b"invalid_http" not in await connection.end()
        await until(lambda: engine.left == 1)


async def test_a_head_that_waits_for_an_earlier_answer_is_not_late() -> None:
    """The server does not read while two requests are there, and must not blame the client for it."""
    go_on = asyncio.Event()

    class Busy(FakeCluster):
        async def list_models(self) -> list[Any]:
            await go_on.wait()
            return []

    async with serving(Busy(), **QUICK) as served, line(served) as connection:
        await connection.send(b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n" + HEALTH + HEALTH[:20])
        await until(lambda: any(connection.flow.read_paused for connection in served.server.server_state.connections))
        protocol = next(iter(served.server.server_state.connections))
        late = protocol._timer
        await until(lambda: protocol._timer is not late)
        go_on.set()
        await connection.send(HEALTH[20:])
        assert [(await connection.reply()).status for _ in range(3)] == [200] * 3


@asynccontextmanager
async def not_reading(served: Served, data: bytes) -> AsyncIterator[socket.socket]:
    """A client that sends a request and reads nothing, with as little room as the kernel allows."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(client, ("127.0.0.1", served.port))
        await loop.sock_sendall(client, data)
        await until(lambda: held(served)[0] == 1)
        yield client
    finally:
        client.close()


async def test_a_stream_that_nobody_reads_is_cut_at_its_limit(tmp_path: Path) -> None:
    async with setup(tmp_path, endless, **QUICK) as (_, [engine], served, _), nothing_left(served):
        async with not_reading(served, request_bytes(STREAM)):
            await until(lambda: held(served)[0] == 0)
        await until(lambda: engine.left == 1)
        assert refused(served, "slow_reader_bytes") == 1


async def test_a_log_that_nobody_reads_is_cut_at_its_limit() -> None:
    cluster = FakeCluster()
    cluster.models["m"] = model()
    cluster.log_lines = ["x" * 1000 + "\n"] * 20_000
    async with serving(cluster, **QUICK) as served, nothing_left(served):
        async with not_reading(served, b"GET /v1/models/m/logs?follow=true&tail=20000 HTTP/1.1\r\n" + HOST + b"\r\n"):
            await until(lambda: held(served)[0] == 0)
        assert refused(served, "slow_reader_bytes") == 1


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
async def test_a_whole_answer_that_nobody_reads_does_not_keep_its_connection(version: bytes) -> None:
    cluster = FakeCluster()
    cluster.models["m"] = model()
    cluster.log_lines = ["x" * 1000 + "\n"] * 20_000
    ask = b"GET /v1/models/m/logs?tail=20000 " + version + b"\r\n" + HOST + b"connection: close\r\n\r\n"
    async with serving(cluster, **QUICK) as served, nothing_left(served):
        async with not_reading(served, ask):
            await until(lambda: held(served)[0] == 0)
        assert refused(served, "unread_seconds") == 1


async def test_a_whole_answer_that_is_read_slowly_arrives_whole() -> None:
    cluster = FakeCluster()
    cluster.models["m"] = model()
    cluster.log_lines = ["x" * 999 + "\n"] * 5_000
    ask = b"GET /v1/models/m/logs?tail=20000 HTTP/1.0\r\n" + HOST + b"\r\n"
    loop, size = asyncio.get_running_loop(), 0
    async with serving(cluster, **QUICK) as served, nothing_left(served), not_reading(served, ask) as client:
        async with asyncio.timeout(30):
            while part := await loop.sock_recv(client, 262144):
                size += len(part)
                await asyncio.sleep(0.02)
        assert refused(served, "unread_seconds") == 0
    assert size > 5_000_000


async def test_a_thousand_clients_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    moments = (b"", HEALTH[:9], HEALTH, post(PART, length=99), request_bytes(STREAM), b"\x00", request_bytes(STREAM) + b"\x00")

    async def come_and_go(number: int, served: Served) -> None:
        async with line(served) as connection:
            await connection.send(moments[number % len(moments)])
            if number % 2:
                with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
                    async with asyncio.timeout(0.05):
                        await connection.reader.readexactly(1)
            if number % 3 == 0:
                connection.writer.transport.abort()

    async with setup(tmp_path, endless, **QUICK) as (_, [engine], served, _), nothing_left(served):
        for start in range(0, 1000, 50):
            await asyncio.gather(*(come_and_go(number, served) for number in range(start, start + 50)))
        await until(lambda: engine.left == len(engine.received))

"""Bare connections to a served app, and what the app holds for them."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from xinference.api.test.bench import until
from xinference.api.test.fakes import Served

HOST = b"host: localhost\r\n"
JSON = HOST + b"content-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
READ_BYTES = 65536
PATIENCE_SECONDS = 10.0


def post(content: bytes, path: str = "/v1/chat/completions", fields: bytes = b"", length: int | None = None) -> bytes:
    """A request with a JSON body, or what claims to be one."""
    announced = len(content) if length is None else length
    return b"POST %s HTTP/1.1\r\n%scontent-length: %d\r\n%s\r\n%s" % (path.encode(), JSON, announced, fields, content)


def chunked(frames: bytes, fields: bytes = b"") -> bytes:
    """A request whose body comes in these frames."""
    return b"POST /v1/chat/completions HTTP/1.1\r\n" + JSON + b"transfer-encoding: chunked\r\n" + fields + b"\r\n" + frames


@dataclass
class Reply:
    """One answer."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object, whose shape is checked."""
        error: dict[str, Any] = json.loads(self.content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "internal" not in error["message"]
        return error


class Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Send all of it, or as much as the server takes."""
        self.writer.write(data)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self.writer.drain()
        except ConnectionError:
            pass

    async def reply(self, head_only: bool = False) -> Reply:
        """The next answer."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            first, *rest = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
            length = 0 if head_only else int(headers.get("content-length", "0"))
            return Reply(int(first.split()[1]), headers, await self.reader.readexactly(length))

    async def end(self) -> bytes:
        """What comes until the server closes."""
        parts = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            try:
                while part := await self.reader.read(READ_BYTES):
                    parts.append(part)
            except ConnectionError:
                pass
        return b"".join(parts)


@asynccontextmanager
async def line(served: Served) -> AsyncIterator[Line]:
    """A connection, closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        yield Line(reader, writer)
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass


def held(served: Served) -> tuple[int, ...]:
    """Connections, handlers, requests, feeds, bytes of bodies, tasks and open files."""
    state, gateway = served.server.server_state, served.app.state.api.gateway
    edge: Any = served.app.middleware_stack
    while not hasattr(edge, "_held_bytes"):
        edge = edge.app
    tasks, files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    return len(state.connections), len(state.tasks), len(gateway.open), len(gateway.feeds), edge._held_bytes, tasks, files


@asynccontextmanager
async def nothing_left(served: Served) -> AsyncIterator[None]:
    """What happens inside leaves nothing behind, and the next request is answered."""
    async with line(served) as first:
        await first.send(HEALTH)
        await first.reply()
    await until(lambda: held(served)[0] == 0)
    before = held(served)
    yield
    async with line(served) as after:
        await after.send(HEALTH)
        assert (await after.reply()).status == 200
    try:
        await until(lambda: held(served) == before)
    except TimeoutError:
        raise AssertionError(f"left over: {held(served)}, before: {before}") from None

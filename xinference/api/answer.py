"""The client's end of one proxied request: what has been sent, and how to end it well.

A stream's status is committed as late as possible, with the first event or the first comment, so that whatever goes wrong before is a
real HTTP status. After that only an error event can tell the client: an answer that simply stops would be taken as complete.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from starlette.types import Scope, Send

from xinference.api.errors import Header
from xinference.api.sse import DONE, KEEP_ALIVE, json_event
from xinference.errors import XinferenceError

# An extension that xinference.api.server puts into the scope: how much the client has left unread, and how to cut it off.
TRANSPORT_EXTENSION: Final = "xinference.transport"

STREAM_HEADERS: Final[list[Header]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADERS: Final[list[Header]] = [(b"content-type", b"application/json")]


class SlowReader(Exception):
    """The client leaves more bytes unread than it may."""


class Answer:
    """What one client gets.

    Args:
        max_unread_bytes: a stream whose client leaves more than this unread is given up.
    """

    def __init__(self, scope: Scope, send: Send, max_unread_bytes: int) -> None:
        extension = scope.get("extensions", {}).get(TRANSPORT_EXTENSION, {})
        self._unread: Callable[[], int] | None = extension.get("unread_bytes")
        self._abort: Callable[[], None] | None = extension.get("abort")
        self._send = send
        self._max_unread_bytes = max_unread_bytes
        self._lock = asyncio.Lock()
        self.started = False
        self.finished = False
        self.has_events = False
        self.last_sent = time.monotonic()

    async def events(self, data: bytes) -> None:
        """Send whole events.

        Raises:
            SlowReader: too much of what was sent before is still unread.
        """
        self.has_events = True
        await self._write(data)
        if self._unread is not None and self._unread() > self._max_unread_bytes:
            raise SlowReader(f"more than {self._max_unread_bytes} bytes unread")

    async def keep_alive(self) -> None:
        """Send a comment, unless something is being sent anyway."""
        if not self._lock.locked():
            await self._write(KEEP_ALIVE)

    async def done(self) -> None:
        """End a stream that is complete."""
        await self._write(DONE, last=True)

    async def close(self) -> None:
        """End a stream of news."""
        await self._write(b"", last=True)

    async def fail(self, error: XinferenceError) -> None:
        """End a stream that is not complete, with an error event."""
        await self._write(json_event(error.to_wire()), last=True)

    async def json(self, content: bytes) -> None:
        """Send a whole answer that is not a stream."""
        self.started = self.finished = True
        headers = [*JSON_HEADERS, (b"content-length", str(len(content)).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": content})

    def cut(self) -> None:
        """Drop the connection with what is unread."""
        self.finished = True
        if self._abort is not None:
            self._abort()

    async def _write(self, data: bytes, last: bool = False) -> None:
        async with self._lock:
            if self.finished:
                return
            self.finished = last
            self.last_sent = time.monotonic()
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})

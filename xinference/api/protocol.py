"""uvicorn's HTTP protocol with bounds: how large a head may be and how long it may take, how many connections there are, and how long
a connection may stay that is of no use to anybody.

                     ┌─ head, in time and within its size ─> app ─> answer ─┬─ body had arrived ──> next head, or idle
    connection made ─┤                                                      └─ body still comes ──> cut after abort_seconds
                     └─ too many connections, no HTTP, head too large ────> answer, no more reading, cut after abort_seconds

What uvicorn leaves open is closed here: it reads heads of any size, waits without an end for what it writes to a connection that it
closes, tells only the last of several pipelined requests that their client has left, and loses the body of a request that asks for
another protocol, as Java's HTTP client does for HTTP/2 unless told otherwise (uvicorn 0.54, httptools_impl.py).
"""

import asyncio
import fcntl
import struct
import termios
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from xinference.api.answer import TRANSPORT_EXTENSION
from xinference.api.config import ApiConfig
from xinference.api.edge import error_response
from xinference.api.errors import HeadTooLarge
from xinference.api.metrics import ApiMetrics
from xinference.errors import InvalidRequest, RateLimited, XinferenceError
from xinference.settings import Limits

# A pause in reading holds the sender up once this much is unread. Twice what a stream may leave unread, so that the app notices first.
_WRITE_BUFFER_FACTOR: Final = 2


class ApiProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        limits: sizes and times of a head, numbers of connections and of requests on one, unread bytes.
        timings: how long things may take.
        metrics: where refusals are counted.
    """

    def __init__(self, *args: Any, limits: Limits, timings: ApiConfig, metrics: ApiMetrics, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._timings = timings
        self._metrics = metrics
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._refusal: XinferenceError | None = None
        self._over_limit = False
        self._in_message = False
        self._in_head = False
        self._unsorted_bytes = 0  # received since the last part of a message was complete
        self._head_bytes = 0
        self._head_fields = 0
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_FACTOR * self._limits.slow_reader_bytes)
        self._over_limit = len(self.connections) > self._limits.connections
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._closing):
            if timer is not None:
                timer.cancel()
        # uvicorn tells the newest request only; one that was sent before it may be the one that runs.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        self._unsorted_bytes += len(data)
        try:
            self._feed(data)
            if self._unsorted_bytes > self._limits.head_bytes:
                # Part of a head, or of what may stand between and after the pieces of a body.
                self._refuse(self._head_too_large("head_bytes"))
        except httptools.HttpParserError:
            self._answer_refusal()
        if self._refusal is None and self._is_idle() and self._timer is None:
            self._expect_head()  # whatever came, it was no beginning of a request

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                return self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                self._begin_again()

    def _begin_again(self) -> None:
        """Read a head that asks for another protocol as the request for this one that it also is.

        The parser takes what follows such a head for the other protocol.
        """
        version = self.parser.get_http_version().encode()
        kept = [name + b": " + value + b"\r\n" for name, value in self.headers if name not in (b"upgrade", b"connection")]
        if not self.parser.should_keep_alive():
            kept.append(b"connection: close\r\n")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"%s %s HTTP/%s\r\n%s\r\n" % (self.scope["method"].encode(), self.url, version, b"".join(kept)))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        transport: dict[object, object] = {"unread_bytes": self.transport.get_write_buffer_size, "abort": self.transport.abort}
        self.scope["extensions"] = {TRANSPORT_EXTENSION: transport}
        self._in_message = self._in_head = True
        self._head_bytes = self._head_fields = self._unsorted_bytes = 0
        self._expect_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._head_fields += 1
        if self._head_bytes > self._limits.head_bytes:
            self._refuse(self._head_too_large("head_bytes"))
        if self._head_fields > self._limits.head_fields:
            self._refuse(self._head_too_large("head_fields"))
        if self._in_head:  # else it stands behind the body, where nothing of what a head says may be said
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head = False
        self._unsorted_bytes = 0
        if self._head_bytes > self._limits.head_bytes:
            self._refuse(self._head_too_large("head_bytes"))
        if self._over_limit:
            self._metrics.refused.labels("connections").inc()
            self._refuse(RateLimited(f"the server has {self._limits.connections} open connections, which is the limit; try again later"))
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self.scope["method"] = self.parser.get_method().decode("ascii")
            return  # the same head comes again, see _begin_again
        super().on_headers_complete()
        if len(self.pipeline) > self._limits.pipelined_requests:
            self._refuse_pipelined()

    def on_body(self, body: bytes) -> None:
        self._unsorted_bytes = 0
        super().on_body(body)
        if self.cycle is not self._running and len(self.cycle.body) > HIGH_WATER_LIMIT:
            # uvicorn stops reading here, and would not notice that the client leaves the request that runs.
            self._refuse_pipelined()

    def on_message_complete(self) -> None:
        self._in_message = False
        self._unsorted_bytes = 0
        if self._closing is not None and not self.transport.is_closing():
            self._closing.cancel()  # all has come that an answer did not wait for
            self._closing = None
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._running = None
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_when_stuck()
        elif self._in_message and not self._in_head and self._is_idle():
            # Answered before its body had come. A client that goes on sending has no use for it.
            self._cut_after(self._timings.abort_seconds)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._cut_when_stuck()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._cut_after(self._timings.abort_seconds)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _is_idle(self) -> bool:
        """Whether no request is being answered or waits for its turn."""
        return not self.pipeline and (self._running is None or self._running.response_complete)

    def _head_too_large(self, limit: str) -> XinferenceError:
        self._metrics.refused.labels(limit).inc()
        limits = self._limits
        return HeadTooLarge(f"the head of a request may have {limits.head_bytes} bytes and {limits.head_fields} fields, this one has more")

    def _refuse(self, error: XinferenceError) -> None:
        self._refusal = error
        raise httptools.HttpParserCallbackError(str(error))

    def _refuse_pipelined(self) -> None:
        self._metrics.refused.labels("pipelined_requests").inc()
        self._refuse(RateLimited(f"{self._limits.pipelined_requests} small requests may wait for an answer on one connection"))

    def _answer_refusal(self) -> None:
        """Say why no more is read; only where no other answer is under way, which this one would look like a part of."""
        if self._refusal is None:
            self._refusal = InvalidRequest("this is not a valid HTTP request", code="invalid_http")
        self._stop_timer()
        if self.transport.is_closing() or not self._may_answer():
            self.transport.abort()
            return
        status, headers, content = error_response(self._refusal)
        head = b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())
        lines = [head, *(name + b": " + value for name, value in headers), b"connection: close", b"", content]
        self.transport.write(b"\r\n".join(lines))
        # Closed at once, a connection with unread bytes is reset, and a client that still sends would never read the answer.
        self.transport.write_eof()
        self._cut_after(self._timings.abort_seconds)

    def _may_answer(self) -> bool:
        """Whether nothing has been said to the request at fault, and no other one is being answered."""
        if self._is_idle():
            return True
        running = self._running
        if running is None or running is not self.cycle or not self._in_message or running.response_started:
            return False
        running.disconnected = True  # what the app says of half a request is not sent any more
        running.message_event.set()
        return True

    def _expect_head(self) -> None:
        self._stop_timer()
        seconds = self._timings.abort_seconds if self._over_limit else self._limits.head_read_seconds
        self._timer = self.loop.call_later(seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.flow.read_paused:
            self._expect_head()  # it is us who do not read: an earlier request is being answered
            return
        self._timer = None
        self._metrics.refused.labels("connections" if self._over_limit else "head_read_seconds").inc()
        self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut_after(self, seconds: float) -> None:
        if self._closing is None:
            self._closing = self.loop.call_later(seconds, self.transport.abort)

    def _cut_when_stuck(self, left_bytes: int | None = None) -> None:
        """Cut a connection that is being closed when its client has read nothing of what is left for a while."""
        unread = self._unread_bytes()
        if left_bytes is not None and unread >= left_bytes:
            self._metrics.refused.labels("unread_seconds").inc()
            self.transport.abort()
        elif unread:
            self._closing = self.loop.call_later(self._limits.unread_seconds, self._cut_when_stuck, unread)

    def _unread_bytes(self) -> int:
        """What has been written and has not reached the client, in the kernel too: that holds megabytes, and takes more in big steps."""
        connection = self.transport.get_extra_info("socket")
        if connection is None or connection.fileno() < 0:
            return 0
        (queued,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"    "))
        return int(queued) + self.transport.get_write_buffer_size()

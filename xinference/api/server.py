"""Serving the app: a listening socket, uvicorn, and an end that no client mistakes for the end of its answer.

running ── first SIGTERM or SIGINT ──> draining: /ready and new requests get 503, open ones go on
                                          │ all have ended, or drain_seconds are over
                                          v
                                       ending: what is still open gets the error server_shutting_down
any state ── second signal ──────────> ending, at once
"""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any, Final, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from xinference.api.answer import TRANSPORT_EXTENSION
from xinference.api.auth import check_bind
from xinference.api.edge import error_response
from xinference.api.routing import AppState
from xinference.errors import InvalidRequest, ShuttingDown

logger = logging.getLogger(__name__)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# Longer than clients keep idle connections, so that it is them who close: a request sent into a closing connection is lost.
KEEP_ALIVE_SECONDS: Final = 75
# After error events have been sent; what has not been flushed by then is cut.
CLOSE_SECONDS: Final = 2
BACKLOG: Final = 1024


class ApiProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with three additions: the app sees how much a client leaves unread and can cut it off; a request's head
    must arrive in time; and what is not HTTP is refused in the error shape.

    Args:
        write_buffer_bytes: unread bytes at which sending pauses. More than a stream may leave unread, so that the app notices first.
        head_seconds: how long the head of a request may take.
        abort_seconds: how long an idle connection may take to flush when it is closed.
    """

    def __init__(self, *args: Any, write_buffer_bytes: int, head_seconds: float, abort_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write_buffer_bytes = write_buffer_bytes
        self._head_seconds = head_seconds
        self._abort_seconds = abort_seconds
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self._write_buffer_bytes)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        transport: dict[object, object] = {"unread_bytes": self.transport.get_write_buffer_size, "abort": self.transport.abort}
        self.scope["extensions"] = {TRANSPORT_EXTENSION: transport}
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        super().on_headers_complete()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._abort_seconds, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        _, headers, content = error_response(InvalidRequest("this is not a valid HTTP request", code="invalid_http"))
        lines = [b"HTTP/1.1 400 Bad Request", *(name + b": " + value for name, value in headers), b"connection: close", b"", content]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    def _expect_head(self) -> None:
        self._head_arrived()
        self._head_timer = self.loop.call_later(self._head_seconds, self.transport.abort)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class ApiServer(uvicorn.Server):
    """uvicorn's server with an end in two steps. Signals are the business of ``serve``."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._api: AppState = app.state.api
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Begin to end; at once if it has begun before."""
        gateway = self._api.gateway
        if self._draining is not None:
            logger.warning("stopping at once: %d requests are cut", len(gateway.open))
            self._draining.cancel()
            self.end_now()
            return
        gateway.draining = True
        logger.info("draining: %d requests are open", len(gateway.open))
        self._draining = asyncio.create_task(self._drain())

    def end_now(self) -> None:
        """Tell all open requests that it is over, and close."""
        self._api.gateway.draining = True
        self._api.gateway.end_all(ShuttingDown("the server is shutting down"))
        self.should_exit = True

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._api.settings.drain_seconds):
                await self._api.gateway.idle.wait()
        self.end_now()


def server_config(app: FastAPI) -> uvicorn.Config:
    """How the app is served. No access log: paths hold model names of users, and the app counts its answers itself."""
    api: AppState = app.state.api
    protocol = functools.partial(
        ApiProtocol,
        write_buffer_bytes=2 * api.limits.slow_reader_bytes,
        head_seconds=api.config.head_read_seconds,
        abort_seconds=api.config.abort_seconds,
    )
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


async def serve(app: FastAPI, listener: socket.socket, *, handle_signals: bool = True) -> None:
    """Serve until a signal asks to stop, and return when all requests have ended.

    Args:
        listener: from ``listen``; closed at the end.
        handle_signals: whether SIGTERM and SIGINT are taken while serving.

    Raises:
        InvalidRequest: other machines could reach the server and no keys are asked for.
    """
    api: AppState = app.state.api
    try:
        check_bind(listener.getsockname()[0], api.keys)
    except InvalidRequest:
        listener.close()
        raise
    server = ApiServer(server_config(app), app)
    with _signals_to(server) if handle_signals else contextlib.nullcontext():
        await server.serve([listener])


@contextlib.contextmanager
def _signals_to(server: ApiServer) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, server.stop)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

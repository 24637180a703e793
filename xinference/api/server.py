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
from typing import Final, cast

import uvicorn
from fastapi import FastAPI

from xinference.api.keys import check_bind
from xinference.api.protocol import ApiProtocol
from xinference.api.routing import AppState
from xinference.errors import InvalidRequest, ShuttingDown

logger = logging.getLogger(__name__)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# Longer than clients keep idle connections, so that it is them who close: a request sent into a closing connection is lost.
KEEP_ALIVE_SECONDS: Final = 75
# After error events have been sent; what has not been flushed by then is cut.
CLOSE_SECONDS: Final = 2
BACKLOG: Final = 1024


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
    protocol = functools.partial(ApiProtocol, limits=api.limits, timings=api.config, metrics=api.metrics)
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
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio sets no TCP_NODELAY
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

"""The first and last thing every HTTP request passes: identity, origin, key, size, and the shape of errors.

In this order, so that a stranger learns nothing: request id, Host, Origin, key, content type, length of the body. Written as one plain
ASGI layer: each layer costs every token stream a call per chunk.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xinference.api.auth import PUBLIC_PATHS, is_loopback
from xinference.api.config import ApiConfig
from xinference.api.errors import ForeignHost, ForeignOrigin, Header, UnsupportedMediaType, error_headers, limit_of
from xinference.api.keys import NOBODY, KeyRing, KeyUse
from xinference.api.metrics import ApiMetrics
from xinference.errors import InternalError, InvalidRequest, RateLimited, RequestTooLarge, XinferenceError
from xinference.settings import Limits

logger = logging.getLogger(__name__)

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:@/\\?#\[\]\s]+)(?::\d{1,5})?")
_WRITES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_METHODS: Final = _WRITES | {"GET", "HEAD", "OPTIONS"}


def error_response(error: XinferenceError) -> tuple[int, list[Header], bytes]:
    """Status, headers and body that an error is answered with."""
    content = msgspec.json.encode(error.to_wire())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()), *error_headers(error)]
    return error.status, headers, content


async def send_error(send: Send, error: XinferenceError) -> None:
    """Answer with an error."""
    status, headers, content = error_response(error)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def new_request_id() -> str:
    """32 hex digits."""
    return secrets.token_hex(16)


class Edge:
    """ASGI middleware around the app.

    Args:
        allowed_hosts: names and addresses that may stand in the Host header; None allows all.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, limits: Limits, config: ApiConfig, metrics: ApiMetrics, allowed_hosts: frozenset[str] | None
    ) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._config = config
        self._metrics = metrics
        self._allowed_hosts = allowed_hosts
        self._held_bytes = 0  # bodies of open requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if REQUEST_ID.fullmatch(given) else new_request_id()
        state["has_own_request_id"] = state["request_id"] == given
        reply = _Reply(scope, send, self._metrics)
        try:
            self._check_host(headers)
            _check_origin(scope["method"], headers)
            with self._admitted(scope["path"], headers) as state["key"]:
                _check_content_type(scope["method"], headers)
                with self._bounded(headers, receive) as bounded:
                    await self._app(scope, bounded, reply.send)
        except XinferenceError as error:
            limit = limit_of(error)
            if limit is not None:
                self._metrics.refused.labels(limit).inc()
            await reply.fail(error)
        except ClientDisconnect:
            logger.debug("request %s: the client left before it had sent its body", state["request_id"])
        except Exception:
            logger.exception("request %s: %s %s failed", state["request_id"], scope["method"], scope["path"])
            await reply.fail(InternalError(f"internal error; the server's log has the details under request id {state['request_id']}"))

    def _admitted(self, path: str, headers: Headers) -> AbstractContextManager[KeyUse]:
        """Know the request's key, and count the request as one of the key's."""
        if path in PUBLIC_PATHS:
            return nullcontext(KeyUse(NOBODY))
        return self._keys.using(self._keys.key_of(headers.get("authorization"), time.time()), time.monotonic())

    def _check_host(self, headers: Headers) -> None:
        """A page of a foreign site whose name was made to point here still sends its own name."""
        named = headers.getlist("host")
        if len(named) > 1:
            raise ForeignHost("the request has several Host headers")
        if self._allowed_hosts is not None and _host_name("".join(named)) not in self._allowed_hosts:
            raise ForeignHost("the Host header does not name this server")

    @contextmanager
    def _bounded(self, headers: Headers, receive: Receive) -> Iterator[Receive]:
        """``receive`` that refuses a body which is too large, announced or not, or too slow, or one too many."""
        limit = self._limits.body_bytes
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise self._too_large()
        size, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._limits.body_read_seconds

        async def bounded() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                self._metrics.refused.labels("body_read_seconds").inc()
                raise InvalidRequest(f"the request body did not arrive within {self._limits.body_read_seconds:g} s") from None
            part = len(message.get("body", b""))
            size += part
            self._held_bytes += part
            complete = not message.get("more_body", False)
            if size > limit:
                raise self._too_large()
            if self._held_bytes > self._limits.bodies_bytes:
                self._metrics.refused.labels("bodies_bytes").inc()
                raise RateLimited(f"the open requests hold {self._limits.bodies_bytes} bytes, which is the limit; try again later")
            return message

        try:
            yield bounded
        finally:
            self._held_bytes -= size

    def _too_large(self) -> RequestTooLarge:
        self._metrics.refused.labels("body_bytes").inc()
        return RequestTooLarge(f"the request body is larger than {self._limits.body_bytes} bytes")


class _Reply:
    """Adds what every answer carries, and knows whether an error can still become a status."""

    def __init__(self, scope: Scope, send: Send, metrics: ApiMetrics) -> None:
        self._scope = scope
        self._send = send
        self._metrics = metrics
        self._started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            request_id: str = self._scope["state"]["request_id"]
            message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
            method = self._scope["method"]
            self._metrics.http_requests.labels(method if method in _METHODS else "other", str(message["status"])).inc()
        await self._send(message)

    async def fail(self, error: XinferenceError) -> None:
        if self._started:
            # Too late for a status; the server closes the connection, which no client takes for a complete answer.
            raise error
        await send_error(self.send, error)


def _check_origin(method: str, headers: Headers) -> None:
    """Browsers name the page that sends a write. There is no other way to tell a page's request from a user's."""
    origin = headers.get("origin")
    # Written by browsers as scheme://host:port and nothing else, so there is nothing to parse, and nothing that may not parse.
    if origin is not None and method in _WRITES and origin.partition("://")[2] != headers.get("host"):
        raise ForeignOrigin("writes from web pages of other sites are refused")


def _check_content_type(method: str, headers: Headers) -> None:
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if method in _WRITES and has_body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType("send the request body as application/json")


def _host_name(host: str) -> str:
    """The Host header without its port; empty when it is none."""
    found = _HOST.fullmatch(host)
    return found[1].lower() if found else ""


def hosts_of(bind_host: str, more: tuple[str, ...]) -> frozenset[str] | None:
    """Which Host headers are accepted: on loopback only its own names, since keys may be off there; else all, since keys are on."""
    if not is_loopback(bind_host):
        return frozenset(more) or None
    return frozenset({"localhost", "127.0.0.1", "[::1]", bind_host, *more})

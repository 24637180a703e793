"""The first and last thing every HTTP request passes: identity, origin, key, size, and the shape of errors.

In this order, so that a stranger learns nothing: request id, Host, Origin, key, content type, length of the body. Written as one plain
ASGI layer: each layer costs every token stream a call per chunk.
"""

import asyncio
import logging
import re
import secrets
from typing import Final
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xinference.api.auth import PUBLIC_PATHS, KeyRing, is_loopback
from xinference.api.config import ApiConfig
from xinference.api.errors import ForeignHost, ForeignOrigin, Header, UnsupportedMediaType, error_headers
from xinference.api.metrics import ApiMetrics
from xinference.errors import InternalError, InvalidRequest, RequestTooLarge, XinferenceError
from xinference.settings import Limits

logger = logging.getLogger(__name__)

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
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
            state["scopes"] = frozenset() if scope["path"] in PUBLIC_PATHS else self._keys.scopes_of(headers.get("authorization"))
            _check_content_type(scope["method"], headers)
            await self._app(scope, self._bounded(headers, receive), reply.send)
        except XinferenceError as error:
            await reply.fail(error)
        except ClientDisconnect:
            logger.debug("request %s: the client left before it had sent its body", state["request_id"])
        except Exception:
            logger.exception("request %s: %s %s failed", state["request_id"], scope["method"], scope["path"])
            await reply.fail(InternalError(f"internal error; the server's log has the details under request id {state['request_id']}"))

    def _check_host(self, headers: Headers) -> None:
        """A page of a foreign site whose name was made to point here still sends its own name."""
        if self._allowed_hosts is not None and _host_name(headers.get("host", "")) not in self._allowed_hosts:
            raise ForeignHost("the Host header does not name this server")

    def _bounded(self, headers: Headers, receive: Receive) -> Receive:
        """``receive`` that refuses a body which is too large, announced or not, or too slow."""
        limit = self._limits.body_bytes
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise self._too_large()
        size, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._config.body_read_seconds

        async def bounded() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise InvalidRequest(f"the request body did not arrive within {self._config.body_read_seconds:.0f} s") from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > limit:
                raise self._too_large()
            return message

        return bounded

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
    if origin is not None and method in _WRITES and urlsplit(origin).netloc != headers.get("host"):
        raise ForeignOrigin("writes from web pages of other sites are refused")


def _check_content_type(method: str, headers: Headers) -> None:
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if method in _WRITES and has_body and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType("send the request body as application/json")


def _host_name(host: str) -> str:
    """The Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def hosts_of(bind_host: str, more: tuple[str, ...]) -> frozenset[str] | None:
    """Which Host headers are accepted: on loopback only its own names, since keys may be off there; else all, since keys are on."""
    if not is_loopback(bind_host):
        return frozenset(more) or None
    return frozenset({"localhost", "127.0.0.1", "[::1]", bind_host, *more})

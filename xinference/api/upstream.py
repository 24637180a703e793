"""Connections to replicas: one HTTP session for each endpoint, one request at a time on a connection.

A connection whose answer was read to its end is kept for the next request, for less time than any engine keeps an idle one: a request
sent into a connection that the replica is closing could not be told from one whose replica died. A connection whose answer has not
ended is closed, which is how a request is aborted.
"""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp

from xinference.api.config import ApiConfig
from xinference.api.route_table import Endpoint
from xinference.errors import NoReplicaAvailable

_CONNECTION_ERRORS: Final = (aiohttp.ClientError, OSError, TimeoutError)
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)
NO_DESCRIPTOR: Final = (
    "the server has no file descriptor left for a connection to a replica: try again later; its limit is raised with `ulimit -n`"
)


class ConnectionLost(Exception):
    """The replica is not there, or went away before it had answered in full."""


class AnswerTooLarge(Exception):
    """A replica's answer exceeds the limit."""


class Upstream:
    """A replica's answer, of which the head has arrived."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status

    async def read_some(self) -> bytes:
        """What has arrived, at least one byte; empty at the end of the answer.

        Raises:
            ConnectionLost: the connection broke.
        """
        try:
            return await self._response.content.readany()
        except _CONNECTION_ERRORS as error:
            raise ConnectionLost(_describe(error)) from error

    async def finish(self, wait_seconds: float) -> None:
        """Read what follows the part that mattered, so that the connection can be kept; it is closed if that does not end in time."""
        with contextlib.suppress(ConnectionLost, TimeoutError):
            async with asyncio.timeout(wait_seconds):
                while await self.read_some():
                    pass

    async def read_all(self, max_bytes: int) -> bytes:
        """The whole answer.

        Raises:
            ConnectionLost: the connection broke.
            AnswerTooLarge: the answer exceeds ``max_bytes``.
        """
        parts: list[bytes] = []
        size = 0
        while part := await self.read_some():
            size += len(part)
            if size > max_bytes:
                raise AnswerTooLarge(f"an answer of more than {max_bytes} bytes")
            parts.append(part)
        return b"".join(parts)


@dataclass
class _Session:
    client: aiohttp.ClientSession
    num_open: int = 0


class Upstreams:
    """All sessions. One event loop only."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._sessions: dict[Endpoint, _Session] = {}

    @asynccontextmanager
    async def post(self, endpoint: Endpoint, path: str, content: bytes, headers: Mapping[str, str]) -> AsyncIterator[Upstream]:
        """Send a request and wait for the head of its answer, however long that takes.

        Leaving the block before the answer's end closes the connection, which aborts what the replica has not finished.

        Raises:
            ConnectionLost: nobody listens, or the connection broke before the answer.
            NoReplicaAvailable: this process has no descriptor for a connection, which is no replica's fault.
        """
        session = self._session(endpoint)
        session.num_open += 1
        try:
            try:
                response = await session.client.post(path, data=content, headers=headers)
            except _CONNECTION_ERRORS as error:
                if isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR:
                    raise NoReplicaAvailable(NO_DESCRIPTOR, code="out_of_descriptors") from error
                raise ConnectionLost(_describe(error)) from error
            try:
                yield Upstream(response)
            finally:
                response.close()
        finally:
            session.num_open -= 1

    async def get_text(self, endpoint: Endpoint, path: str, timeout_seconds: float) -> str:
        """A small text, such as metrics.

        Raises:
            ConnectionLost: there was no such answer in time.
        """
        session = self._session(endpoint)
        session.num_open += 1
        try:
            async with asyncio.timeout(timeout_seconds), session.client.get(path) as response:
                response.raise_for_status()
                return await response.text()
        except _CONNECTION_ERRORS as error:
            raise ConnectionLost(_describe(error)) from error
        finally:
            session.num_open -= 1

    async def retain(self, endpoints: set[Endpoint]) -> None:
        """Close the sessions of endpoints that no model has any more, unless a request still uses them."""
        for endpoint in [endpoint for endpoint, session in self._sessions.items() if endpoint not in endpoints and not session.num_open]:
            await self._sessions.pop(endpoint).client.close()

    async def close(self) -> None:
        """Close all sessions, and with them what is still open."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.client.close()

    def _session(self, endpoint: Endpoint) -> _Session:
        session = self._sessions.get(endpoint)
        if session is None:
            session = self._sessions[endpoint] = _Session(self._open(endpoint))
        return session

    def _open(self, endpoint: Endpoint) -> aiohttp.ClientSession:
        connector: aiohttp.BaseConnector
        if endpoint.uds is not None:
            connector = aiohttp.UnixConnector(endpoint.uds, limit=0, keepalive_timeout=self._config.keep_connection_seconds)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._config.keep_connection_seconds)
        headers = {"content-type": "application/json"}
        if endpoint.api_key is not None:
            headers["authorization"] = f"Bearer {endpoint.api_key}"
        return aiohttp.ClientSession(
            base_url=endpoint.url or "http://replica",
            connector=connector,
            headers=headers,
            skip_auto_headers=("accept-encoding", "user-agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_seconds),
            trust_env=False,
        )


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

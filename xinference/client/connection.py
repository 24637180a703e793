"""How both faces of the client are set up: endpoint, key, timeouts."""

import os
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from xinference.client.calls import Call
from xinference.errors import InvalidRequest

DEFAULT_ENDPOINT: Final = "http://127.0.0.1:9997"
ENDPOINT_VARIABLE: Final = "XINFERENCE_ENDPOINT"
API_KEY_VARIABLE: Final = "XINFERENCE_API_KEY"
CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 60.0
# A stream is silent for at most 15 s (keep-alive comments); four of them missing means that nobody is there any more.
SILENCE_SECONDS: Final = 60.0


def is_address(text: str) -> bool:
    """Whether a text may be the base address of a server."""
    try:
        parts = urlsplit(text)
        return text.isprintable() and " " not in text and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def printable(text: str) -> str:
    """A text whose control characters are shown, not sent to a terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]


@dataclass(frozen=True)
class Connection:
    """Where the server is and how to speak to it.

    Args:
        endpoint: base address; None takes XINFERENCE_ENDPOINT or the default of a local server.
        api_key: None takes XINFERENCE_API_KEY; without either no key is sent.
        answer_seconds: how long one answer may take.
    """

    endpoint: str
    api_key: str | None
    answer_seconds: float = ANSWER_SECONDS

    @classmethod
    def of(cls, endpoint: str | None, api_key: str | None, answer_seconds: float = ANSWER_SECONDS) -> "Connection":
        """Fill what was left out from the environment. Raises InvalidRequest for an address or a key that cannot be one."""
        address = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        if "://" not in address:
            address = f"http://{address}"
        if not is_address(address):
            raise InvalidRequest(f"'{printable(address)}' is not the address of a server; it looks like {DEFAULT_ENDPOINT}", "endpoint")
        key = api_key or os.environ.get(API_KEY_VARIABLE) or None
        if key is not None and not (key.isascii() and key.isprintable()):
            raise InvalidRequest("an API key is printable ASCII in one line; this one was damaged on its way here", param="api_key")
        return cls(address.rstrip("/"), key, answer_seconds)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def is_local(self) -> bool:
        """Whether the endpoint is this machine: proxies from the environment then lead astray."""
        return urlsplit(self.endpoint).hostname in ("127.0.0.1", "localhost", "::1")

    def request(self, call: Call) -> dict[str, Any]:
        """Arguments of the HTTP client's ``request`` for a call that answers once."""
        timeout = httpx2.Timeout(self.answer_seconds + call.patience_seconds, connect=CONNECT_SECONDS)
        return self._arguments(call) | {"timeout": timeout}

    def stream_request(self, call: Call) -> dict[str, Any]:
        """Arguments of the HTTP client's ``stream``: no limit on the stream's length, one on its silence."""
        return self._arguments(call) | {"timeout": httpx2.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)}

    def _arguments(self, call: Call) -> dict[str, Any]:
        url = self.endpoint + call.path
        return {"method": call.method, "url": url, "params": call.query(), "json": call.body, "headers": dict(call.headers)}

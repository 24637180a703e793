"""Who may do what: the scopes, what each route asks for, where a server may listen, and the administrator's own key.

    public      GET /health, GET /ready                    no key
    inference   asking models                              scope inference
    monitor     looking: metrics, events, caches, requests scope monitor
    admin       every other route, known or not            scope admin, which opens all others too

The default is denial: a new route is for administrators until it is listed here. Keys themselves are in keys.py.
"""

import contextlib
import ipaddress
import os
import secrets
from pathlib import Path
from typing import Final

from xinference.errors import InvalidRequest

ADMIN: Final = "admin"
INFERENCE: Final = "inference"
MONITOR: Final = "monitor"
SCOPES: Final = frozenset({ADMIN, INFERENCE, MONITOR})
ADMIN_KEY_FILE: Final = "admin.key"
KEY_PREFIX: Final = "xin-"

PUBLIC_PATHS: Final = frozenset({"/health", "/ready"})
_ASKING: Final = frozenset({INFERENCE, ADMIN})
_LOOKING: Final = frozenset({MONITOR, ADMIN})
_ADMINISTERING: Final = frozenset({ADMIN})
# What a route needs: any one of these scopes.
ROUTE_SCOPES: Final[dict[tuple[str, str], frozenset[str]]] = {
    ("POST", "/v1/chat/completions"): _ASKING,
    ("POST", "/v1/completions"): _ASKING,
    ("POST", "/v1/embeddings"): _ASKING,
    ("POST", "/tokenize"): _ASKING,
    ("POST", "/detokenize"): _ASKING,
    ("GET", "/v1/models"): SCOPES,
    ("GET", "/v1/models/{uid:path}"): SCOPES,
    ("GET", "/version"): SCOPES,
    ("GET", "/v1/limits"): SCOPES,
    ("GET", "/openapi.json"): SCOPES,
    # Not for those who only ask: how often a cache was hit tells what others ask.
    ("GET", "/metrics"): _LOOKING,
    ("GET", "/v1/models/{uid:path}/events"): _LOOKING,
    ("GET", "/v1/models/{uid:path}/replicas"): _LOOKING,
    ("GET", "/v1/models/{uid:path}/xavier"): _LOOKING,
    ("GET", "/v1/models/{uid:path}/xavier/stream"): _LOOKING,
    ("GET", "/v1/requests"): _LOOKING,
    ("GET", "/v1/requests/{request_id}"): _LOOKING,
    ("GET", "/v1/cluster"): _LOOKING,
    ("GET", "/v1/workers"): _LOOKING,
    ("GET", "/v1/devices"): _LOOKING,
}


def scopes_for(method: str, route: str) -> frozenset[str] | None:
    """The scopes that open a route, each by itself; None for a route that needs no key. HEAD counts as GET.

    Args:
        route: the path as it was declared, with its parameters in braces.
    """
    if route in PUBLIC_PATHS:
        return None
    return ROUTE_SCOPES.get((method.replace("HEAD", "GET"), route), _ADMINISTERING)


def is_loopback(host: str) -> bool:
    """Whether an address to bind to can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def new_secret() -> str:
    """A new key: 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def load_admin_key(home: Path) -> str:
    """The admin key of this installation; drawn and written at the first call (0600).

    Raises:
        InvalidRequest: the file can be read by others, or holds no key.
        OSError: it can be neither read nor written.
    """
    path = home / ADMIN_KEY_FILE
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        return _read_key(path)
    # Written beside and linked into place: a second server that starts at the same time must not read half a key.
    draft = home / f".{ADMIN_KEY_FILE}.{secrets.token_hex(8)}"
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(new_secret() + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    return _read_key(path)


def _read_key(path: Path) -> str:
    if path.stat().st_mode & 0o077:
        raise InvalidRequest(f"{path} can be read by other users of this machine: chmod 600 it, or delete it to get a new key")
    try:
        key = path.read_text("ascii").strip()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} holds no key: delete it to get a new one") from None
    if not key:
        raise InvalidRequest(f"{path} is empty: delete it to get a new key")
    return key

"""Who may do what: API keys with scopes, compared in constant time.

    public      GET /health, GET /ready               no key
    inference   the routes of INFERENCE_ROUTES        any key
    admin       every other route, known or not       a key with scope admin

The default is denial: a new route is for administrators until it is listed here. Keys are 256 random bits, so a plain SHA-256 of a key
is as good as a slow hash, and only digests are kept in memory.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xinference.errors import AuthenticationFailed, InvalidRequest
from xinference.settings import Settings

ADMIN: Final = "admin"
INFERENCE: Final = "inference"
ADMIN_KEY_FILE: Final = "admin.key"
KEY_PREFIX: Final = "xin-"

PUBLIC_PATHS: Final = frozenset({"/health", "/ready"})
INFERENCE_ROUTES: Final = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{uid:path}"),
        ("GET", "/version"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
    }
)


def required_scope(method: str, route: str) -> str | None:
    """The scope a route needs, None if none. HEAD counts as GET.

    Args:
        route: the path as it was declared, with its parameters in braces.
    """
    if route in PUBLIC_PATHS:
        return None
    return INFERENCE if (method.replace("HEAD", "GET"), route) in INFERENCE_ROUTES else ADMIN


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True)
class ApiKey:
    """One key's digest and what it allows."""

    digest: bytes
    scopes: frozenset[str]

    @classmethod
    def of(cls, key: str, *scopes: str) -> "ApiKey":
        return cls(_digest(key), frozenset(scopes))


EVERYTHING: Final = frozenset({ADMIN, INFERENCE})


@dataclass(frozen=True)
class KeyRing:
    """The keys a server accepts.

    Args:
        keys: all of them.
        required: False lets everybody do everything; only for servers that none but this machine can reach.
    """

    keys: tuple[ApiKey, ...] = ()
    required: bool = True

    def scopes_of(self, authorization: str | None) -> frozenset[str]:
        """What the bearer of an Authorization header may do.

        Raises:
            AuthenticationFailed: no key, or a wrong one.
        """
        if not self.required:
            return EVERYTHING
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationFailed("an API key is needed: send the header 'Authorization: Bearer KEY'")
        digest = _digest(key.strip())
        # All keys are compared, so that the time taken does not tell which one was nearly right.
        found = [known for known in self.keys if hmac.compare_digest(known.digest, digest)]
        if not found:
            raise AuthenticationFailed("this API key is not known to the server")
        return frozenset().union(*(key.scopes for key in found))


def is_loopback(host: str) -> bool:
    """Whether an address to bind to can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


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
            file.write(KEY_PREFIX + secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    return _read_key(path)


def _read_key(path: Path) -> str:
    if path.stat().st_mode & 0o077:
        raise InvalidRequest(f"{path} can be read by other users of this machine: chmod 600 it, or delete it to get a new key")
    key = path.read_text().strip()
    if not key:
        raise InvalidRequest(f"{path} is empty: delete it to get a new key")
    return key


def key_ring(settings: Settings, admin_key: str, inference_keys: tuple[str, ...] = ()) -> KeyRing:
    """The keys of a server.

    Keys are asked for when the server can be reached from other machines, when the settings say so, or when inference keys were given.

    Args:
        inference_keys: keys for users who may ask models but not launch or stop any.
    """
    keys = (ApiKey.of(admin_key, ADMIN, INFERENCE), *(ApiKey.of(key, INFERENCE) for key in inference_keys))
    required = settings.require_key or bool(inference_keys) or not is_loopback(settings.host)
    return KeyRing(keys, required)


def check_bind(host: str, ring: KeyRing) -> None:
    """Refuse to serve other machines without keys: who may launch a model may run code.

    Raises:
        InvalidRequest: the address is not loopback and no key would be asked for.
    """
    if not is_loopback(host) and not (ring.required and ring.keys):
        raise InvalidRequest(f"refusing to listen on {host} without API keys; bind 127.0.0.1, or start with --require-key", param="host")

"""API keys: what each allows and how much of it, and the ring that every request is checked against.

    request ──> KeyRing.key_of ──> ApiKey ──> KeyRing.using ──> KeyUse ──(revoked)──> ends what the request has opened

Keys are 256 random bits, so a plain SHA-256 of a key is as good as a slow hash, and only digests are kept. One event loop only.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from xinference.api.auth import ADMIN, SCOPES, is_loopback
from xinference.api.errors import KeyLimited
from xinference.errors import AuthenticationFailed, InsufficientScope, InvalidRequest, XinferenceError
from xinference.settings import Limits, Settings

ADMIN_KEY_ID: Final = "admin"
NO_KEY_ID: Final = "none"
_ASK_FOR_ONE: Final = "ask the administrator of the server for one (`xinference keys create`)"


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True)
class ApiKey:
    """One key's digest and what it allows.

    Args:
        scopes: what its bearer may do; see auth.py.
        key_id: what it is called in lists and by who revokes it; no secret.
        name: for people.
        models: the models it may ask; None for all.
        created, expires: unix seconds; ``expires`` is None for a key without end.
        requests_per_minute, concurrent_requests: limits of its own; 0 for none, None for the server's.
    """

    digest: bytes
    scopes: frozenset[str]
    key_id: str
    name: str = ""
    models: frozenset[str] | None = None
    created: float = 0.0
    expires: float | None = None
    requests_per_minute: int | None = None
    concurrent_requests: int | None = None

    @classmethod
    def of(cls, key: str, *scopes: str, **options: object) -> "ApiKey":
        """The key that this secret opens. ``options`` are the further fields."""
        digest = digest_of(key)
        return cls(digest=digest, scopes=frozenset(scopes), **{"key_id": digest.hex()[:12], **options})  # type: ignore[arg-type]

    @property
    def is_admin(self) -> bool:
        return ADMIN in self.scopes

    def check_model(self, uid: str) -> None:
        """Raises InsufficientScope for a model that the key may not ask. Says the same of a model that is not there."""
        if self.models is not None and uid not in self.models:
            allowed = ", ".join(sorted(self.models))
            raise InsufficientScope(f"this API key may only ask: {allowed}; GET /v1/models lists them", "model", "model_not_allowed")


EVERYBODY: Final = ApiKey(b"", SCOPES, NO_KEY_ID, requests_per_minute=0, concurrent_requests=0)
"""whoever asks a server that asks for no keys"""
NOBODY: Final = ApiKey(b"", frozenset(), NO_KEY_ID)
"""whoever asks for what needs no key"""


class Bucket:
    """Lets ``per_minute`` requests through in a minute, at most that many at once. ``now`` is monotonic seconds."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, now: float) -> float:
        """0.0 if the request may go through, else the seconds until one may."""
        rate = self.per_minute / 60
        self._level = min(self.per_minute, self._level + (now - self._at) * rate)
        self._at = now
        if self._level < 1:
            return (1 - self._level) / rate
        self._level -= 1
        return 0.0


class KeyUse:
    """One request's hold on its key."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self._revoked: XinferenceError | None = None
        self._ends: list[Callable[[XinferenceError], None]] = []

    def on_revoked(self, end: Callable[[XinferenceError], None]) -> None:
        """Have something ended when the key is revoked; at once if it was already, while the request was being read."""
        self._ends.append(end)
        if self._revoked is not None:
            end(self._revoked)

    def revoke(self, error: XinferenceError) -> None:
        """End what the request has opened."""
        self._revoked = error
        for end in self._ends:
            end(error)


@dataclass
class _Traffic:
    """What goes on with one key."""

    open: set[KeyUse] = field(default_factory=set)
    bucket: Bucket | None = None


class KeyRing:
    """The keys a server accepts.

    Args:
        keys: all of them.
        required: False lets everybody do everything; only for servers that none but this machine can reach.
        limits: what holds for keys without limits of their own.
    """

    def __init__(self, keys: Iterable[ApiKey] = (), required: bool = True, limits: Limits | None = None) -> None:
        self.required = required
        self.last_used: dict[str, float] = {}
        self._limits = limits or Limits()
        self._keys = {key.key_id: key for key in keys}
        self._traffic: dict[str, _Traffic] = {}

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return tuple(self._keys.values())

    def key_of(self, authorization: str | None, now: float) -> ApiKey:
        """The key in an Authorization header.

        Args:
            now: unix seconds.

        Raises:
            AuthenticationFailed: no key, a wrong one, or one that has expired.
        """
        if not self.required:
            return EVERYBODY
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise AuthenticationFailed(f"an API key is needed: send the header 'Authorization: Bearer KEY'; {_ASK_FOR_ONE}")
        digest = digest_of(secret.strip())
        # All keys are compared, so that the time taken does not tell which one was nearly right.
        found = [key for key in self._keys.values() if hmac.compare_digest(key.digest, digest)]
        if not found:
            raise AuthenticationFailed(f"this API key is not known to the server; {_ASK_FOR_ONE}")
        if found[0].expires is not None and found[0].expires <= now:
            raise AuthenticationFailed(f"this API key has expired; {_ASK_FOR_ONE}")
        self.last_used[found[0].key_id] = now
        return found[0]

    @contextmanager
    def using(self, key: ApiKey, now: float) -> Iterator[KeyUse]:
        """Count a request of a key as open.

        Args:
            now: monotonic seconds.

        Raises:
            KeyLimited: the key has too many open, or too many in a minute.
        """
        traffic = self._traffic.setdefault(key.key_id, _Traffic())
        use = KeyUse(key)
        self._check_limits(key, traffic, now)
        traffic.open.add(use)
        try:
            yield use
        finally:
            traffic.open.discard(use)

    def _check_limits(self, key: ApiKey, traffic: _Traffic, now: float) -> None:
        at_once = self._limits.key_concurrent_requests if key.concurrent_requests is None else key.concurrent_requests
        if at_once and len(traffic.open) >= at_once:
            words = f"this API key has {at_once} open requests, which is its limit; wait for one to end"
            raise KeyLimited(words, limit="key_concurrent_requests")
        per_minute = self._limits.key_requests_per_minute if key.requests_per_minute is None else key.requests_per_minute
        if not per_minute:
            return
        if traffic.bucket is None or traffic.bucket.per_minute != per_minute:
            traffic.bucket = Bucket(per_minute, now)
        wait = traffic.bucket.take(now)
        if wait:
            words = f"this API key may make {per_minute} requests a minute; send the next one in {wait:.0f} s"
            raise KeyLimited(words, limit="key_requests_per_minute", wait_seconds=wait)

    def put(self, key: ApiKey) -> None:
        """Accept a key from now on."""
        self._keys[key.key_id] = key

    def revoke(self, key_id: str) -> None:
        """Accept a key no more, and end what its requests have opened."""
        self._keys.pop(key_id, None)
        self.last_used.pop(key_id, None)
        traffic = self._traffic.pop(key_id, _Traffic())
        for use in tuple(traffic.open):
            use.revoke(AuthenticationFailed("this API key was revoked while the request was running; " + _ASK_FOR_ONE))


def key_ring(settings: Settings, admin_key: str, stored: Iterable[ApiKey] = ()) -> KeyRing:
    """The keys of a server.

    Keys are asked for when the server can be reached from other machines, when the settings say so, or when tenants are to be told apart.

    Args:
        stored: the keys that administrators have made.
    """
    limits = {"requests_per_minute": 0, "concurrent_requests": 0}  # an administrator must always get in
    admin = ApiKey.of(admin_key, ADMIN, key_id=ADMIN_KEY_ID, name="the server's own, for its administrator", **limits)
    required = settings.require_key or settings.isolate_tenants or not is_loopback(settings.host)
    return KeyRing((admin, *stored), required)


def check_bind(host: str, ring: KeyRing) -> None:
    """Refuse to serve other machines without keys: who may launch a model may run code.

    Raises:
        InvalidRequest: the address is not loopback and no key would be asked for.
    """
    if not is_loopback(host) and not (ring.required and ring.keys):
        raise InvalidRequest(f"refusing to listen on {host} without API keys; bind 127.0.0.1, or start with --require-key", param="host")


def tenant_salt(key_id: str, given: str | None) -> str:
    """The cache salt of a request of one key: no two keys have one in common, and a client's own salt still separates its prompts."""
    return hashlib.sha256(f"{len(key_id)}:{key_id}:{given or ''}".encode("utf-8", "surrogatepass")).hexdigest()

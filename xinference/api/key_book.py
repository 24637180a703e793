"""Making, listing and revoking API keys: the ring that requests are checked against and the file, kept in step.

create   written first, accepted then: a key that somebody holds outlives a crash
revoke   refused first, with the end of what it has open, written then: a full disk keeps nobody in
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from xinference.api.auth import new_secret
from xinference.api.errors import KeyFileUnusable, KeyStoreFailed
from xinference.api.key_store import MAX_KEYS, Keys, KeyStore, Stamp, StoredKey
from xinference.api.keys import ADMIN_KEY_ID, ApiKey, KeyRing, digest_of
from xinference.errors import Conflict, LimitExceeded, NotFound, NotSupported, XinferenceError

logger = logging.getLogger(__name__)

Json = dict[str, Any]
LOOK_SECONDS: Final = 1.0
"""how often it is looked whether another server with the same home has changed the file"""
USE_SECONDS: Final = 60.0
"""how often the times of last use are written"""


class KeyBook:
    """The keys of one server. Changes are made one at a time, in a thread: the disk must not hold up streams.

    Args:
        store: where keys outlive the server; None if it has no place for that.
    """

    def __init__(self, ring: KeyRing, store: KeyStore | None) -> None:
        self._ring = ring
        self._store = store
        self._lock = asyncio.Lock()
        self._stamp = store.stamp() if store is not None else None
        self._complained: str | None = None
        self._revoked: set[str] = set()  # refused, but not yet gone from the file

    async def create(self, asked: Json, lifetime_seconds: float | None = None) -> Json:
        """Make a key; the answer is the only one that ever holds it.

        Args:
            asked: name, scopes and what else a key has; checked.
            lifetime_seconds: after which it is refused; None for never.

        Raises:
            Conflict: there is a key of this name.
            LimitExceeded: there are too many.
            KeyStoreFailed: it could not be written.
        """
        secret = new_secret()
        now = time.time()
        row = StoredKey(
            **asked,
            id=f"key-{secrets.token_hex(6)}",
            sha256=digest_of(secret).hex(),
            created=now,
            expires=None if lifetime_seconds is None else now + lifetime_seconds,
        )

        def added(keys: Keys) -> Keys:
            if any(other.name == row.name for other in keys.values()):
                raise Conflict(f"there is a key named '{row.name}' already; revoke it first, or choose another name", "name")
            if len(keys) >= MAX_KEYS:
                raise LimitExceeded(f"there are {len(keys)} keys, which is the limit; revoke some")
            return {**keys, row.id: row}

        await self._change(added, "nothing was created")
        logger.info("key %s was created with scopes %s", row.id, ", ".join(row.scopes))
        return {**self._shown(row), "key": secret, "enforced": self._ring.required}

    async def rows(self) -> list[Json]:
        """All keys, without their secrets: the server's own first, then by age."""
        own = next((key for key in self._ring.keys if key.key_id == ADMIN_KEY_ID), None)
        keys = sorted((await asyncio.to_thread(self._needed_store().load)).values(), key=lambda row: row.created)
        return [*([self._shown_admin(own)] if own is not None else []), *(self._shown(row) for row in keys)]

    async def revoke(self, key_id: str) -> Json:
        """Refuse a key from now on and forget it.

        Raises:
            NotFound: there is none of this id.
            Conflict: it is the server's own.
            KeyStoreFailed: it is refused, but would be accepted again after a restart.
        """
        if key_id == ADMIN_KEY_ID:
            raise Conflict("the server's own key is in admin.key of its home: to have a new one, delete that file and restart", "id")

        def without(keys: Keys) -> Keys:
            if key_id not in keys:
                raise NotFound(f"there is no key '{key_id}'; GET /v1/keys lists them", "id")
            return {other: row for other, row in keys.items() if other != key_id}

        if any(key.key_id == key_id for key in self._ring.keys):
            self._revoked.add(key_id)
            self._ring.revoke(key_id)
        await self._change(without, "the key is refused, but would be accepted after a restart: mend the cause and revoke it again")
        logger.info("key %s was revoked", key_id)
        return {"id": key_id, "revoked": True}

    async def run(self) -> None:
        """Follow changes that other servers make to the file, and write when keys were last used. Until cancelled."""
        written = time.monotonic()
        while self._store is not None:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()
            if time.monotonic() - written >= USE_SECONDS:
                written = time.monotonic()
                await self.write_uses()

    async def close(self) -> None:
        """Write what is only in memory."""
        if self._store is not None and self._ring.last_used:
            await self.write_uses()

    async def look(self) -> None:
        """Take over the file if it has changed. A file that cannot be relied on changes nothing: who was accepted is, and nobody else."""
        store = self._needed_store()
        try:
            async with self._lock:
                stamp = await asyncio.to_thread(store.stamp)
                if stamp != self._stamp:
                    self._take_over(await asyncio.to_thread(store.load), stamp)
        except (KeyFileUnusable, OSError) as error:
            if str(error) != self._complained:
                logger.error("the keys known so far stay in use: %s", error)  # noqa: TRY400  (the words say all)
            self._complained = str(error)
        else:
            self._complained = None

    async def write_uses(self) -> None:
        """Write when keys were last used; a failure costs nothing but these figures."""
        used = dict(self._ring.last_used)

        def with_uses(keys: Keys) -> Keys:
            return {key_id: _used(row, used.get(key_id)) for key_id, row in keys.items()}

        try:
            await self._change(with_uses, "the times of last use are lost")
        except XinferenceError as error:
            logger.warning("%s", error)

    async def _change(self, edit: Callable[[Keys], Keys], otherwise: str) -> None:
        """Change the file, then the ring. A cancelled request does not stop a change half way."""
        await asyncio.shield(asyncio.ensure_future(self._changed(self._needed_store(), edit, otherwise)))

    async def _changed(self, store: KeyStore, edit: Callable[[Keys], Keys], otherwise: str) -> None:
        async with self._lock:
            try:
                keys = await asyncio.to_thread(store.change, lambda keys: self._still_wanted(edit(keys)))
            except (OSError, KeyFileUnusable) as error:
                raise KeyStoreFailed(f"{store.path} could not be changed: {error}; {otherwise}") from error
            self._take_over(keys, store.stamp())

    def _still_wanted(self, keys: Keys) -> Keys:
        """Every change does what a revocation could not write."""
        return {key_id: row for key_id, row in keys.items() if key_id not in self._revoked}

    def _take_over(self, keys: Keys, stamp: Stamp | None) -> None:
        self._stamp = stamp
        self._revoked &= keys.keys()
        keys = self._still_wanted(keys)
        for known in self._ring.keys:
            if known.key_id != ADMIN_KEY_ID and known.key_id not in keys:
                self._ring.revoke(known.key_id)
        for row in keys.values():
            self._ring.put(row.key())

    def _needed_store(self) -> KeyStore:
        if self._store is None:
            raise NotSupported("this server has no home directory to keep keys in")
        return self._store

    def _shown(self, row: StoredKey) -> Json:
        """A key as lists show it."""
        expired = row.expires is not None and row.expires <= time.time()
        return {
            "id": row.id,
            "name": row.name,
            "state": "expired" if expired else "active",
            "scopes": sorted(row.scopes),
            "models": None if row.models is None else sorted(row.models),
            "created": row.created,
            "expires": row.expires,
            "last_used": self._ring.last_used.get(row.id, row.last_used),
            "requests_per_minute": row.requests_per_minute,
            "concurrent_requests": row.concurrent_requests,
        }

    def _shown_admin(self, key: ApiKey) -> Json:
        row = StoredKey(key.key_id, key.name, "", tuple(key.scopes), key.created, None, None, 0, 0)
        return {**self._shown(row), "created": None}


def _used(row: StoredKey, when: float | None) -> StoredKey:
    if when is None or when <= (row.last_used or 0.0):
        return row
    return msgspec.structs.replace(row, last_used=when)

"""The file that keeps API keys over restarts: digests only, for the server's user alone.

    lock ─> read ─> edit ─> write a draft, fsync ─> rename ─> fsync the directory

Whenever the server or the machine stops, the file holds all keys before the change or all keys after it. Several servers with one home
share it: each change reads the file anew under a lock of its own, and each server looks now and then whether the file has changed.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from xinference.api.auth import SCOPES
from xinference.api.errors import KeyFileUnusable
from xinference.api.keys import ApiKey

FILE_NAME: Final = "api_keys.json"
VERSION: Final = 1
MAX_KEYS: Final = 1000
MAX_FILE_BYTES: Final = 16 * 1024 * 1024

Keys = dict[str, "StoredKey"]


class StoredKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key as it is written. ``last_used`` is unix seconds, at most a minute old while the server runs."""

    id: str
    name: str
    sha256: str
    scopes: tuple[str, ...]
    created: float
    models: tuple[str, ...] | None = None
    expires: float | None = None
    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    last_used: float | None = None

    def key(self) -> ApiKey:
        """What requests are checked against. Raises ValueError for values that no key has."""
        digest = bytes.fromhex(self.sha256)
        if len(digest) != 32 or not self.scopes or not SCOPES.issuperset(self.scopes) or self.models == ():
            raise ValueError(f"key '{self.id}' has a digest, scopes or models that no key has")
        return ApiKey(
            digest=digest,
            scopes=frozenset(self.scopes),
            key_id=self.id,
            name=self.name,
            models=None if self.models is None else frozenset(self.models),
            created=self.created,
            expires=self.expires,
            requests_per_minute=self.requests_per_minute,
            concurrent_requests=self.concurrent_requests,
        )


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    keys: list[StoredKey]


Stamp = tuple[int, int, int]


class KeyStore:
    """The file of one home directory."""

    def __init__(self, home: Path) -> None:
        self.path = home / FILE_NAME

    def load(self) -> Keys:
        """All keys by their ids; none if there is no file.

        Raises:
            KeyFileUnusable: it cannot be relied on, and why.
        """
        try:
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                info = os.fstat(file.fileno())
                raw = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._refused(f"cannot be read: {error.strerror}", "mend that") from error
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise self._refused("can be read or changed by other users of this machine", "chown it to the server's and chmod 600 it")
        return self._parsed(raw)

    def _parsed(self, raw: bytes) -> Keys:
        remedy = "restore it from a copy, or delete it: all keys but the administrator's are then gone and have to be made anew"
        if len(raw) > MAX_FILE_BYTES:
            raise self._refused(f"is larger than {MAX_FILE_BYTES} bytes", remedy)
        try:
            found = msgspec.json.decode(raw, type=_File)
            digests = {stored.key().digest for stored in found.keys}
        except (msgspec.DecodeError, ValueError) as error:
            raise self._refused(f"is damaged ({error})", remedy) from None
        keys = {stored.id: stored for stored in found.keys}
        if len(keys) < len(found.keys) or len(digests) < len(found.keys):
            raise self._refused("is damaged (two keys have one id or one digest)", remedy)
        if found.version != VERSION:
            raise self._refused(f"has version {found.version}, this server reads {VERSION}", "use the server that wrote it, or delete it")
        return keys

    def _refused(self, what: str, remedy: str) -> KeyFileUnusable:
        return KeyFileUnusable(f"{self.path}, which holds the API keys, {what}; {remedy}", param="home")

    def stamp(self) -> Stamp | None:
        """Equal for two looks between which nobody has written; None if there is no file."""
        try:
            info = self.path.stat()
        except FileNotFoundError:
            return None
        return info.st_ino, info.st_mtime_ns, info.st_size

    def change(self, edit: Callable[[Keys], Keys]) -> Keys:
        """Replace the keys by what ``edit`` makes of them; returns the new ones once they will outlive a crash.

        Raises:
            KeyFileUnusable: the file as it is cannot be relied on. Nothing is changed, nor when ``edit`` refuses.
            OSError: it cannot be written. Nothing is changed, except when the last step fails, which is to make the new name durable.
        """
        with self._locked():
            before = self.load()
            after = edit(before)
            if after != before:
                self._write(after)
        return after

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _write(self, keys: Keys) -> None:
        for left in self.path.parent.glob(f".{FILE_NAME}.*"):
            left.unlink(missing_ok=True)  # drafts of servers that died; the lock says that nobody is writing
        draft = self.path.parent / f".{FILE_NAME}.{secrets.token_hex(8)}"
        content = msgspec.json.format(msgspec.json.encode(_File(VERSION, list(keys.values()))), indent=1)
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.rename(self.path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

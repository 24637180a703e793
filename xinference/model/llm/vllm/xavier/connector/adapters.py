"""Which weights an adapter's name stands for: before vLLM 0.31 the engine's block hash holds the name alone."""

import os
from collections.abc import Hashable, Iterator
from hashlib import blake2b

DIGEST_BYTES = 16
# Adapters whose digest is kept; an engine has far fewer at a time.
DIGESTS_MAX = 256


class AdapterDigests:
    """Digests of adapters' files by name, size, time of change and inode, taken once a loading.

    The engine keeps an adapter in memory under an id, whatever becomes of its files: so a digest is taken when an id is first seen, which
    is when the engine loads it, and again when a request asks for loading in place.
    """

    def __init__(self) -> None:
        self._digest_by_loading: dict[Hashable, bytes] = {}

    def digest(self, name: str, number: int, path: str, fresh: bool) -> bytes:
        """The adapter's digest.

        Args:
            name, number, path: as the request names it.
            fresh: the engine loads it again for this request.
        """
        loading = (name, number, path)
        known = self._digest_by_loading.get(loading)
        if known is None or fresh:
            if len(self._digest_by_loading) >= DIGESTS_MAX:
                self._digest_by_loading.clear()
            known = self._digest_by_loading[loading] = _digest(name, path)
        return known


def _digest(name: str, path: str) -> bytes:
    state = blake2b(digest_size=DIGEST_BYTES, person=b"xavier-adapter")
    for line in (f"{name}\0{os.path.realpath(path)}", *_files(path)):
        state.update(line.encode())
        state.update(b"\n")
    return state.digest()


def _files(path: str) -> Iterator[str]:
    """One line for each file; none for an adapter that is not a local directory (a name on a hub, revision fixed by the engine)."""
    if os.path.isdir(path):
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            if entry.is_file():
                status = entry.stat()
                yield f"{entry.name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"

"""Which weights an adapter's name stands for: before vLLM 0.31 the engine's block hash holds the name alone."""

import logging
import os
from collections.abc import Hashable, Iterator
from hashlib import blake2b

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
# Adapters whose digest is kept, those not asked for longest are forgotten; an engine has far fewer at a time.
DIGESTS_MAX = 256


class AdapterDigests:
    """Digests of adapters' files by name, size, time of change and inode, as they were when the engine loaded them.

    The engine keeps an adapter in memory under an id, whatever becomes of its files, until it needs the room; then it loads the files
    again, as they are by then, and tells nobody. So a digest is taken when an id is first seen, which is when the engine loads it, and
    again when a request asks for loading in place. Once the files are others than those, nobody can say which the engine has.
    """

    def __init__(self) -> None:
        self._digest_by_loading: dict[Hashable, bytes] = {}
        self._doubtful: set[Hashable] = set()

    def digest(self, name: str, number: int, path: str, fresh: bool) -> bytes:
        """The adapter's digest; one that nobody else has, at each call another, if its files changed since it was loaded.

        Args:
            name, number, path: as the request names it.
            fresh: the engine loads it again for this request.
        """
        loading = (name, number, path)
        known, present = self._digest_by_loading.pop(loading, None), _digest(name, path)
        if known is None or fresh:
            known = present
            self._doubtful.discard(loading)
        if len(self._digest_by_loading) >= DIGESTS_MAX:
            del self._digest_by_loading[next(iter(self._digest_by_loading))]
        self._digest_by_loading[loading] = known
        return known if known == present else self._nobodys(loading)

    def _nobodys(self, loading: tuple[str, int, str]) -> bytes:
        if loading not in self._doubtful:
            if len(self._doubtful) >= DIGESTS_MAX:
                self._doubtful.clear()
            self._doubtful.add(loading)
            name, _, path = loading
            logger.warning(
                "adapter %s shares nothing any more: files in %s changed after it was loaded; load it again in place", name, path
            )
        return os.urandom(DIGEST_BYTES)


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

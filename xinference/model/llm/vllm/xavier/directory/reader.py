"""A replica's segment, seen by any other process: mapped read-only, trusted in nothing.

A peer that is alive, stopped or dead can be read alike: whatever validates was complete when it was published.
"""

import mmap

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory.counters import Counters
from xinference.model.llm.vllm.xavier.directory.files import WatchedFile, map_file, open_for_reading
from xinference.model.llm.vllm.xavier.directory.geometry import SegmentGeometry
from xinference.model.llm.vllm.xavier.directory.header import describe, read_geometry
from xinference.model.llm.vllm.xavier.directory.layout import (
    ATTACHED_FIRST,
    COUNTER_BYTES,
    HEADER_BYTES,
    MAX_ATTACHED,
    Word,
    refuse_unordered_machine,
)
from xinference.model.llm.vllm.xavier.directory.liveness import runs
from xinference.model.llm.vllm.xavier.directory.records import Found, Keys, RecordTable, words_of
from xinference.model.llm.vllm.xavier.directory.requests import RequestEntry, RequestLog
from xinference.model.llm.vllm.xavier.errors import SegmentRefused


class SegmentReader:
    """One mapped segment of somebody else's. Made by ``open``.

    Any number of threads may look at once (an engine's step thread and its copier do): nothing is changed by it but ``rejected``, one count
    over all of them, which may miss one of two made at the same moment. ``close`` is for when nobody looks any more.
    """

    def __init__(self, path: str, mapping: mmap.mmap, geometry: SegmentGeometry, watched: WatchedFile) -> None:
        self.path = path
        self.geometry = geometry
        self._mapping = mapping
        self._watched = watched
        self._file = memoryview(mapping)
        self._header = words_of(self._file, 0, HEADER_BYTES)
        self._table = RecordTable(self._file, geometry)
        counters = words_of(self._file, geometry.counters_offset, geometry.counters_offset + COUNTER_BYTES)
        ring = words_of(self._file, geometry.requests_offset, geometry.hints_offset)
        cursor = self._header[Word.REQUEST_UPDATES : Word.REQUESTS_WRITTEN + 1]
        self._counters = Counters(counters)
        self._requests = RequestLog(ring, cursor)
        self._views = (self._file, self._header, counters, ring, cursor)
        self._incarnation = self.owner_incarnation()

    @classmethod
    def open(cls, path: str, *, expected_incarnation: int | None) -> "SegmentReader":
        """Map the segment of this name.

        Args:
            path: where it lies.
            expected_incarnation: the owner's present start, as the control page says; None takes any.

        Raises:
            SegmentRefused: it does not exist, belongs to another start of the owner (both may pass), or is not a segment that this
                version can read (will not pass).
            PlatformRefused: this machine's memory order is not the one relied on.
        """
        refuse_unordered_machine()
        fd = open_for_reading(path)
        watched = WatchedFile(fd)
        try:
            geometry = read_geometry(fd, path)
            mapping = map_file(fd, geometry.file_bytes, path, mmap.ACCESS_READ)
        except BaseException:
            watched.close()
            raise
        reader = cls(path, mapping, geometry, watched)
        if expected_incarnation is not None and reader.owner_incarnation() != expected_incarnation:
            found = reader.owner_incarnation()
            reader.close()
            raise SegmentRefused(f"{path} belongs to incarnation {found:016x}, not {expected_incarnation:016x}", permanent=False)
        return reader

    def alive(self) -> bool:
        """Whether the owner runs: same pid, same start time, not a zombie. Costs about 15 us."""
        return self.whole() and runs(int(self._header[Word.PID]), int(self._header[Word.START_TICKS]))

    def owner_incarnation(self) -> int:
        """The owner's number of its present start."""
        return int(self._header[Word.INCARNATION])

    def replaced(self) -> bool:
        """Whether the name now means another file, or the file another owner: then let this mapping go, for it holds memory."""
        if not self._watched.named(self.path) or not self.whole():
            return True
        return self.owner_incarnation() != self._incarnation

    def whole(self) -> bool:
        """Whether the file still has all its bytes: asked before every look, so what somebody truncates is a miss, and then replaced."""
        return self._watched.num_bytes() >= self.geometry.file_bytes

    def find(self, key: BlockKey, epoch: int) -> Found | None:
        """Where the key's bytes are, if its record is valid and of exactly this epoch."""
        return self._table.find(key, epoch) if self.whole() else None

    def still(self, place: int, generation: int) -> bool:
        """Whether the bytes copied since ``find`` are good. The order matters: find, copy, then this."""
        return self.whole() and self._table.still(place, generation)

    def longest_prefix(self, keys: Keys, start: int, stop: int, epoch: int) -> int:
        """End of the longest run of keys from ``start`` that seem to be there, at most ``stop``; each is to be found again when taken."""
        return self._table.longest_prefix(keys, start, stop, epoch) if self.whole() else start

    def slab_view(self) -> memoryview:
        """All places' bytes, read-only; place p begins at p * place_bytes. It keeps the mapping alive."""
        start = self.geometry.slab_offset
        return self._file[start : start + self.geometry.slab_bytes]

    @property
    def rejected(self) -> int:
        """Records with a wanted key that did not validate, since ``open``."""
        return self._table.rejected

    def counters(self) -> dict[str, int]:
        """The owner's counters by name."""
        return dict(self._counters.items())

    def header(self) -> dict[str, int]:
        """The header's words by lower-case name (see layout.Word)."""
        return describe(self._header)

    def attached(self) -> frozenset[int]:
        """Incarnations of the peers whose segments the owner has mapped."""
        return frozenset(int(word) for word in self._header[ATTACHED_FIRST : ATTACHED_FIRST + MAX_ATTACHED] if word)

    def requests_since(self, update: int) -> tuple[list[RequestEntry], int]:
        """Accounting records changed after ``update`` (0: all), and the number to pass next time."""
        return self._requests.since(update)

    def find_request(self, request: bytes) -> list[RequestEntry]:
        """The accounting records of one request, oldest change first."""
        return self._requests.find(request)

    def close(self) -> None:
        """Let the mapping go; any later use raises ValueError. Memory behind views of the slab goes with the last of them."""
        self._watched.close()
        for view in self._views:
            view.release()
        self._table.release()
        try:
            self._mapping.close()
        except BufferError:  # somebody holds a view of the slab: the mapping goes with it
            pass

"""The control page: what a replica's model actor tells its engine, through one small file in shared memory.

    word 0 magic, word 1 layout, word 2 sequence; then two slots of {length, check, JSON}

State number s lies in slot s % 2. The writer fills the other slot and then stores the sequence, so the newest complete state can be read
at any moment, also when the writer is stopped or dies in the middle. An unchanged page costs its reader one comparison.
"""

import json
import mmap
import os
from dataclasses import dataclass
from hashlib import blake2b

from xinference.model.llm.vllm.xavier.config import CONTROL_LOCK_WAIT_SECONDS, ID_PATTERN, WORD_LIMIT
from xinference.model.llm.vllm.xavier.directory.files import (
    FileLock,
    create_file,
    discard,
    give_name,
    lock_file,
    map_file,
    open_for_reading,
)
from xinference.model.llm.vllm.xavier.directory.layout import refuse_unordered_machine
from xinference.model.llm.vllm.xavier.errors import ControlPageRefused, SegmentRefused

CONTROL_BYTES = 16 << 10
_MAGIC = int.from_bytes(b"xavierC1", "little")
_MAGIC_WORD, _SEQUENCE_WORD = 0, 1
_FIRST_SLOT, _SLOT_BYTES = 128, (CONTROL_BYTES - 128) // 2
_SLOT_HEADER = 16  # length and check, one word each
MAX_STATE_BYTES = _SLOT_BYTES - _SLOT_HEADER
_READ_ATTEMPTS = 100  # the writer must complete two states during one copy of 8 KiB to spoil it


@dataclass(frozen=True)
class PeerEntry:
    """A replica of the same model on this host, and its engine's present start."""

    worker_id: str
    replica_uid: str
    incarnation: int


@dataclass(frozen=True)
class ControlState:
    """What an engine has to know about the world outside.

    Args:
        epoch: the model-wide clear epoch.
        peers: replicas whose segments may be read.
        stopping: the engine is about to be stopped: save what is worth it, start nothing new.
    """

    epoch: int = 0
    peers: tuple[PeerEntry, ...] = ()
    stopping: bool = False

    def to_wire(self) -> bytes:
        """As JSON."""
        peers = [[peer.worker_id, peer.replica_uid, f"{peer.incarnation:x}"] for peer in self.peers]
        return json.dumps({"epoch": self.epoch, "peers": peers, "stopping": self.stopping}, separators=(",", ":")).encode()

    @classmethod
    def from_wire(cls, raw: bytes) -> "ControlState":
        """Rebuild what ``to_wire`` gave.

        Raises:
            ControlPageRefused: the text is not such a state.
        """
        try:
            wire = json.loads(raw)
            peers = tuple(_peer(*peer) for peer in wire["peers"])
            return cls(_word(wire["epoch"]), peers, bool(wire["stopping"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ControlPageRefused(f"a control page holds no valid state: {error}") from None


class ControlPageWriter:
    """The model actor's side: the one writer. Made by ``create``."""

    def __init__(self, path: str, lock: FileLock, mapping: mmap.mmap) -> None:
        self.path = path
        self._lock = lock
        self._mapping = mapping
        self._file = memoryview(mapping)
        self._words = self._file[:_FIRST_SLOT].cast("Q")

    @classmethod
    def create(cls, path: str, state: ControlState | None = None) -> "ControlPageWriter":
        """A new page with this state, in place of one whose writer is gone.

        Raises:
            ControlPageRefused: a live process writes a page of this name, or the state is larger than a page.
            SharedMemoryFull: there is no room.
            PlatformRefused: this machine's memory order is not the one relied on.
        """
        refuse_unordered_machine()
        try:
            old = lock_file(path, CONTROL_LOCK_WAIT_SECONDS)
            if old is not None:
                discard(old, path)
            lock, mapping, unfinished = create_file(path, CONTROL_BYTES)
            try:
                page = cls(path, lock, mapping)
                page.write(state or ControlState())
                page._words[_MAGIC_WORD] = _MAGIC
                give_name(unfinished, path)
            except BaseException:
                discard(lock, unfinished)
                raise
        except SegmentRefused as error:
            raise ControlPageRefused(error.reason) from None
        return page

    def write(self, state: ControlState) -> None:
        """Replace the state.

        Raises:
            ControlPageRefused: it is larger than the page, and the old state stays; or somebody truncated the page.
        """
        raw = state.to_wire()
        if len(raw) > MAX_STATE_BYTES:
            raise ControlPageRefused(
                f"a state of {len(raw)} bytes with {len(state.peers)} peers exceeds the {MAX_STATE_BYTES} of a control page"
            )
        _refuse_truncated(self._mapping, self.path)
        sequence = self._words[_SEQUENCE_WORD] + 1
        start = _slot(sequence)
        header = self._file[start : start + _SLOT_HEADER].cast("Q")
        self._file[start + _SLOT_HEADER : start + _SLOT_HEADER + len(raw)] = raw
        header[0] = len(raw)
        header[1] = _check(sequence, raw)
        self._words[_SEQUENCE_WORD] = sequence

    def close(self, unlink: bool = True) -> None:
        """Give the page up; a second call does nothing."""
        if self._lock.held:
            if unlink and self._lock.same_file(self.path):
                os.unlink(self.path)
            self._lock.release()


class ControlPageReader:
    """The engine's side. Made by ``open``; ``state`` is what was read last."""

    def __init__(self, path: str, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._file = memoryview(mapping)
        self._words = self._file[:_FIRST_SLOT].cast("Q")
        self._sequence = 0
        self.state = ControlState()

    @classmethod
    def open(cls, path: str) -> "ControlPageReader":
        """Map a page and read its state.

        Raises:
            ControlPageRefused: there is no such page, or it is not one.
            PlatformRefused: this machine's memory order is not the one relied on.
        """
        refuse_unordered_machine()
        try:
            fd = open_for_reading(path)
        except SegmentRefused as error:
            raise ControlPageRefused(error.reason) from None
        try:
            size = os.fstat(fd).st_size
            if size != CONTROL_BYTES:
                raise ControlPageRefused(f"{path} has {size} bytes: a control page has {CONTROL_BYTES}")
            page = cls(path, map_file(fd, CONTROL_BYTES, path, mmap.ACCESS_READ))
        except SegmentRefused as error:
            raise ControlPageRefused(error.reason) from None
        finally:
            os.close(fd)
        if page._words[_MAGIC_WORD] != _MAGIC:
            raise ControlPageRefused(f"{path} is not a control page")
        if page.poll() is None:
            raise ControlPageRefused(f"{path} holds no state")
        return page

    def poll(self) -> ControlState | None:
        """The new state, or None if nothing changed since the last call.

        Raises:
            ControlPageRefused: the page is corrupt; ``state`` stays what it was.
        """
        _refuse_truncated(self._mapping, self.path)
        for _ in range(_READ_ATTEMPTS):
            sequence = self._words[_SEQUENCE_WORD]
            if sequence == self._sequence:
                return None
            start = _slot(sequence)
            length, check = self._file[start : start + _SLOT_HEADER].cast("Q")
            raw = bytes(self._file[start + _SLOT_HEADER : start + _SLOT_HEADER + min(length, MAX_STATE_BYTES)])
            if self._words[_SEQUENCE_WORD] != sequence:
                continue
            if check != _check(sequence, raw):
                raise ControlPageRefused(f"{self.path} is corrupt: the check of state {sequence} does not fit")
            self.state = ControlState.from_wire(raw)
            self._sequence = sequence
            return self.state
        return None


def _refuse_truncated(mapping: mmap.mmap, path: str) -> None:
    """Touching a page behind a file's end kills with SIGBUS."""
    if mapping.size() < CONTROL_BYTES:
        raise ControlPageRefused(f"{path} was truncated to {mapping.size()} bytes: relaunch its replica")


def _peer(worker_id: object, replica_uid: object, incarnation: str) -> PeerEntry:
    return PeerEntry(_id(worker_id), _id(replica_uid), _word(int(incarnation, 16)))


def _id(value: object) -> str:
    """Part of a file's name, so nothing that leads elsewhere."""
    if not isinstance(value, str) or not ID_PATTERN.fullmatch(value):
        raise ValueError(f"{value!r:.80} is no id")
    return value


def _word(value: object) -> int:
    if type(value) is not int or not 0 <= value < WORD_LIMIT:
        raise ValueError(f"{value!r:.80} is no number of 64 bits")
    return value


def _slot(sequence: int) -> int:
    return _FIRST_SLOT + sequence % 2 * _SLOT_BYTES


def _check(sequence: int, raw: bytes) -> int:
    return int.from_bytes(blake2b(sequence.to_bytes(8, "little") + raw, digest_size=8).digest(), "little")

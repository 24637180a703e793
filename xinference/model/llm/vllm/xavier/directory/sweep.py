"""Removing what dead processes left in shared memory.

A file is removed only while its lock is held by the remover, so never under a live owner; unlinking leaves mappings valid. The one
exception is a worker that has seen its own child die.
"""

import errno
import logging
import os
from dataclasses import dataclass

from xinference.model.llm.vllm.xavier.config import STALE_AGE_SECONDS
from xinference.model.llm.vllm.xavier.directory.files import FileLock, lock_file
from xinference.model.llm.vllm.xavier.directory.names import FileName, parse_name
from xinference.model.llm.vllm.xavier.errors import SegmentRefused

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Removed:
    """A file that was removed, and the bytes that it had."""

    path: str
    num_bytes: int


@dataclass(frozen=True)
class StaleFile:
    """A file of ours that nobody owns any more."""

    path: str
    num_bytes: int
    age_seconds: float
    name: FileName


def remove_segments(shm_dir: str, worker_id: str, replica_uid: str | None = None, *, force: bool = False) -> list[Removed]:
    """Remove the segments, control pages and unfinished files of a worker, or of one of its replicas, whose lock is free.

    Args:
        shm_dir: where they lie.
        worker_id: whose they are.
        replica_uid: only this replica's, if given.
        force: also those that are locked: for a replica whose processes the caller has seen end.
    """
    removed = []
    for path, name in _ours(shm_dir):
        if name.worker_id != worker_id or replica_uid not in (None, name.replica_uid):
            continue
        try:
            lock = lock_file(path)
        except SegmentRefused as refusal:
            if force and not refusal.permanent:  # locked: a file of ours, unlike a directory or a link of that name
                removed += _remove(path)
            continue
        if lock is not None:
            removed += _remove(path)
            lock.release()
    return removed


def stale_files(shm_dir: str, now: float, min_age_seconds: float = STALE_AGE_SECONDS) -> list[StaleFile]:
    """Files of ours, of any worker, with a free lock and untouched for so long.

    Args:
        shm_dir: where they lie.
        now: unix time.
        min_age_seconds: younger ones may belong to an owner that is about to be relaunched.
    """
    found = []
    for path, name in _ours(shm_dir):
        lock = _try_lock(path)
        if lock is None:
            continue
        lock.release()
        try:
            status = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            continue
        age = now - max(status.st_mtime, status.st_ctime)
        if age >= min_age_seconds:
            found.append(StaleFile(path, status.st_size, age, name))
    return found


def remove_stale(shm_dir: str, now: float, min_age_seconds: float = STALE_AGE_SECONDS) -> list[Removed]:
    """Remove what ``stale_files`` lists, each under its lock."""
    removed = []
    for file in stale_files(shm_dir, now, min_age_seconds):
        lock = _try_lock(file.path)
        if lock is not None:
            removed += _remove(file.path)
            lock.release()
    return removed


def _ours(shm_dir: str) -> list[tuple[str, FileName]]:
    try:
        entries = sorted(os.listdir(shm_dir))
    except OSError:  # no such directory, or not for us to read
        return []
    parsed = ((entry, parse_name(entry)) for entry in entries)
    return [(os.path.join(shm_dir, entry), name) for entry, name in parsed if name is not None]


def _try_lock(path: str) -> FileLock | None:
    try:
        return lock_file(path)
    except SegmentRefused:
        return None


def _remove(path: str) -> list[Removed]:
    try:
        num_bytes = os.stat(path, follow_symlinks=False).st_size
        os.unlink(path)
    except OSError as error:
        if error.errno != errno.ENOENT:
            logger.warning("%s is of no use any more and cannot be removed: %s", path, error.strerror)
        return []
    return [Removed(path, num_bytes)]

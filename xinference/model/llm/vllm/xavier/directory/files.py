"""Files in shared memory: created whole or not at all, locked by their owner, mapped only after their size was checked.

* Space is really allocated: touching a hole of a sparse file on a full tmpfs kills the process with SIGBUS, a reader too.
* Nothing is ever truncated, for the same reason; files are unlinked, and mappings of them stay valid.
* The lock is an flock on an open file of its own. It falls with the process, even one killed with SIGKILL. (A POSIX lock would be lost
  when any descriptor of the file is closed.) mmap objects keep a duplicate of the descriptor they were made from, so locking that one
  would hold the lock for as long as anybody holds a view; and a forked child would inherit it, hence the fork hook.
"""

import errno
import fcntl
import mmap
import os
import stat
import time
import weakref

from xinference.model.llm.vllm.xavier.directory.names import unfinished_path, unfinished_paths
from xinference.model.llm.vllm.xavier.errors import SegmentRefused, SharedMemoryFull

_POLL_SECONDS = 0.005
# O_NONBLOCK: opening a FIFO of that name must not hang. (Python opens everything close-on-exec.)
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK


class FileLock:
    """An exclusive flock that lasts until ``release`` or the process's end, and is not inherited by forked children."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _held.add(self)

    @property
    def held(self) -> bool:
        """False after ``release``, and in a forked child."""
        return self._fd >= 0

    def same_file(self, path: str) -> bool:
        """Whether the locked file is the one with this name."""
        mine = os.fstat(self._fd)
        try:
            named = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_held: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.release()


# Closing the child's descriptor does not unlock: the lock belongs to the open file, which the parent still has.
os.register_at_fork(after_in_child=_drop_in_child)


def lock_file(path: str, wait_seconds: float = 0.0) -> FileLock | None:
    """Lock the file with this name.

    Returns:
        The lock, or None if there is no such file.

    Raises:
        SegmentRefused: somebody else held the lock for all of ``wait_seconds``, or the file is not one of ours.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fd = os.open(path, os.O_RDWR | _FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SegmentRefused(f"{path} cannot be opened: {error.strerror}", permanent=True) from None
        lock = FileLock(fd)
        try:
            _refuse_foreign(path, os.fstat(fd))
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.release()
            if time.monotonic() >= deadline:
                raise SegmentRefused(f"{path} is locked by a live process", permanent=False) from None
            time.sleep(_POLL_SECONDS)
            continue
        except BaseException:
            lock.release()
            raise
        if lock.same_file(path):
            return lock
        lock.release()  # replaced or removed between open and lock: look again


def create_file(path: str, num_bytes: int) -> tuple[FileLock, mmap.mmap, str]:
    """A new file of zeros, locked and mapped, under an unfinished name; ``give_name`` when its header is written.

    What predecessors left unfinished is removed first: it may be as large as what is wanted now.

    Returns:
        The lock, the writable mapping, and the unfinished name.

    Raises:
        SharedMemoryFull: the file system has no room; nothing is left behind.
    """
    for left in unfinished_paths(path):
        _remove_if_free(left)
    name = unfinished_path(path)
    lock = FileLock(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600))
    try:
        with open(name, "r+b") as file:
            fcntl.flock(lock._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            allocate(file.fileno(), num_bytes, path)
            return lock, mmap.mmap(file.fileno(), num_bytes), name
    except BaseException:
        os.unlink(name)
        lock.release()
        raise


def give_name(unfinished: str, path: str) -> None:
    """Let others find a file, whole, under its name.

    A link, not a rename: of two processes that make the same file at once, the later one must not push the earlier out of its name.

    Raises:
        SegmentRefused: somebody else was faster.
    """
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise SegmentRefused(f"{path} was made by another process meanwhile", permanent=False) from None
    os.unlink(unfinished)


def allocate(fd: int, num_bytes: int, path: str) -> None:
    """Give a file its bytes, or nothing at all.

    Raises:
        SharedMemoryFull: with needed and free bytes in the message.
    """
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
            raise
        room = os.statvfs(os.path.dirname(path) or ".")
        raise SharedMemoryFull(
            f"{path} needs {num_bytes} bytes, but {os.path.dirname(path)} has {room.f_bavail * room.f_frsize} free: {error.strerror}"
        ) from None


def _remove_if_free(path: str) -> None:
    try:
        lock = lock_file(path)
    except SegmentRefused:
        return  # somebody is making it
    if lock is not None:
        os.unlink(path)
        lock.release()


def open_for_reading(path: str) -> int:
    """A descriptor of a regular, fully allocated file of ours.

    Raises:
        SegmentRefused: there is none (not permanent), or it is something else (permanent).
    """
    try:
        fd = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        raise SegmentRefused(f"{path} does not exist", permanent=False) from None
    except OSError as error:
        raise SegmentRefused(f"{path} cannot be opened: {error.strerror}", permanent=True) from None
    try:
        status = os.fstat(fd)
        _refuse_foreign(path, status)
        _refuse_sparse(path, status)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_foreign(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SegmentRefused(f"{path} is not a regular file", permanent=True)
    if status.st_uid != os.geteuid():
        raise SegmentRefused(f"{path} belongs to user {status.st_uid}, not to this process's user", permanent=True)


def _refuse_sparse(path: str, status: os.stat_result) -> None:
    if status.st_blocks * 512 < status.st_size:
        raise SegmentRefused(f"{path} is sparse: reading its holes could kill this process", permanent=True)

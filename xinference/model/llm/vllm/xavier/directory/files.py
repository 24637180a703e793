"""Files in shared memory: created whole or not at all, locked by their owner, mapped only after their size was checked.

* Space is really allocated: touching a hole of a sparse file on a full tmpfs kills the process with SIGBUS, a reader too.
* Nothing is ever truncated, for the same reason; files are unlinked, and mappings of them stay valid.
* The lock is an flock on an open file of its own. It falls with the process, even one killed with SIGKILL. (A POSIX lock would be lost
  when any descriptor of the file is closed.) mmap objects keep a duplicate of the descriptor they were made from, so locking that one
  would hold the lock for as long as anybody holds a view; and a forked child would inherit it, hence the fork hook.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time
import weakref
from typing import BinaryIO

from xinference.model.llm.vllm.xavier.directory.names import unfinished_path, unfinished_paths
from xinference.model.llm.vllm.xavier.errors import SegmentRefused, SharedMemoryFull

_POLL_SECONDS = 0.005
# O_NONBLOCK: opening a FIFO of that name must not hang; O_NOCTTY: nor a terminal become ours. (Python opens everything close-on-exec.)
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
# What this process or the machine is short of for the moment: says nothing about the file.
_FOR_NOW = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG})
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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
        return _same_file(self._fd, path)

    def reopen(self, path: str) -> BinaryIO:
        """The locked file once more, to be mapped: by descriptor, since by now its name may mean another file.

        Raises:
            SegmentRefused: there is no descriptor left.
        """
        try:
            return open(f"/proc/self/fd/{self._fd}", "r+b")
        except OSError as error:
            raise _not_opened(path, error) from None

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class WatchedFile:
    """A file that is open for as long as this object lives, to be asked how large it is by now.

    Nothing of ours truncates a file, but somebody may, and touching a page behind a file's end kills with SIGBUS.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    def num_bytes(self) -> int:
        """The size. By a call that keeps the GIL, unlike all of ``os``: getting it back can cost a step 5 ms, this costs a microsecond."""
        if self._fd < 0:
            raise ValueError("the file is closed")
        return int(_lseek(self._fd, 0, os.SEEK_END))

    def named(self, path: str) -> bool:
        """Whether this is the file with that name."""
        return _same_file(self._fd, path)

    def close(self) -> None:
        """Let the file go; a second call does nothing."""
        self._fd = -1
        self._close()


def _same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:  # removed, or its directory was
        return False


_lseek = ctypes.PyDLL(None).lseek
_lseek.argtypes, _lseek.restype = (ctypes.c_int, ctypes.c_int64, ctypes.c_int), ctypes.c_int64

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
            raise _not_opened(path, error) from None
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
        except OSError as error:
            lock.release()
            raise SegmentRefused(f"{path} cannot be locked: {error.strerror}", permanent=False) from None
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
        SharedMemoryFull: the file system has no room, or no inode; nothing is left behind.
        SegmentRefused: the directory does not exist or may not be written, or the file cannot be mapped; nothing is left behind.
    """
    try:
        for left in unfinished_paths(path):
            _remove_if_free(left)
        name = unfinished_path(path)
        lock = FileLock(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600))
    except OSError as error:
        raise _not_made(path, num_bytes, error) from None
    try:
        fcntl.flock(lock._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with lock.reopen(path) as file:
            allocate(file.fileno(), num_bytes, path)
            return lock, map_file(file.fileno(), num_bytes, path), name
    except BaseException as error:
        discard(lock, name)
        if isinstance(error, OSError):
            raise _not_made(path, num_bytes, error) from None
        raise


def give_name(unfinished: str, path: str) -> None:
    """Let others find a file, whole, under its name.

    A link, not a rename: of two processes that make the same file at once, the later one must not push the earlier out of its name.

    Raises:
        SegmentRefused: somebody else was faster, or removed the unfinished file.
        SharedMemoryFull: there is no room for a name.
    """
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise SegmentRefused(f"{path} was made by another process meanwhile", permanent=False) from None
    except OSError as error:
        raise _not_made(path, 0, error) from None
    with contextlib.suppress(FileNotFoundError):  # swept at this very moment: it has its other name
        os.unlink(unfinished)


def discard(lock: FileLock, unfinished: str) -> None:
    """Take back what ``create_file`` made."""
    with contextlib.suppress(OSError):  # whatever was wrong before is what is to be reported
        os.unlink(unfinished)
    lock.release()


def allocate(fd: int, num_bytes: int, path: str) -> None:
    """Give a file its bytes, or nothing at all.

    Raises:
        SharedMemoryFull: with needed and free bytes in the message.
        SegmentRefused: the file system cannot do so.
    """
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        raise _not_made(path, num_bytes, error) from None


def map_file(fd: int, num_bytes: int, path: str, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
    """The file, mapped. It has so many bytes already.

    Raises:
        SegmentRefused: it was truncated meanwhile, or this process has no room in its address space.
    """
    try:
        return mmap.mmap(fd, num_bytes, access=access)
    except (OSError, ValueError) as error:
        raise SegmentRefused(f"{path} cannot be mapped with {num_bytes} bytes: {error}", permanent=False) from None


def _not_made(path: str, num_bytes: int, error: OSError) -> SharedMemoryFull | SegmentRefused:
    """Why a file could not be made, in the words of this package's errors."""
    directory = os.path.dirname(path) or "."
    if error.errno not in _NO_ROOM:
        return SegmentRefused(f"{path} cannot be made in {directory}: {error.strerror}", permanent=error.errno not in _FOR_NOW)
    room = os.statvfs(directory)
    return SharedMemoryFull(
        f"{path} needs {num_bytes} bytes, but {directory} has {room.f_bavail * room.f_frsize} free "
        f"and {room.f_favail} of {room.f_files} files left: {error.strerror}"
    )


def _not_opened(path: str, error: OSError) -> SegmentRefused:
    return SegmentRefused(f"{path} cannot be opened: {error.strerror}", permanent=error.errno not in _FOR_NOW)


def _remove_if_free(path: str) -> None:
    try:
        lock = lock_file(path)
    except SegmentRefused:
        return  # somebody is making it
    if lock is not None:
        discard(lock, path)


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
        raise _not_opened(path, error) from None
    try:
        status = os.fstat(fd)
        _refuse_foreign(path, status)
        refuse_open_to_others(path, status)
        _refuse_sparse(path, status)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_foreign(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SegmentRefused(f"{path} is not a regular file", permanent=True)
    if status.st_uid != os.geteuid():
        raise SegmentRefused(
            f"{path} belongs to user {status.st_uid}, not to this process's user {os.geteuid()}: remove it, or use another shm_dir",
            permanent=True,
        )


def refuse_open_to_others(path: str, status: os.stat_result) -> None:
    """Files are made for their user alone; one that others may write to may hold anything.

    Raises:
        SegmentRefused: the file's mode lets others write.
    """
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise SegmentRefused(f"{path} can be written by other users: its mode is {stat.S_IMODE(status.st_mode):04o}", permanent=True)


def _refuse_sparse(path: str, status: os.stat_result) -> None:
    if status.st_blocks * 512 < status.st_size:
        raise SegmentRefused(f"{path} is sparse: reading its holes could kill this process", permanent=True)

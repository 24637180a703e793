"""A worker's name, stable over its restarts and held by one process at a time.

Names of files in shared memory carry the worker id: only a worker that starts under the id of the one that died can sweep after it.
"""

import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

MAX_WORKERS_PER_HOME = 64


class TooManyWorkers(OSError):
    """More workers share one home than there are names."""


@dataclass
class WorkerIdentity:
    """The id, and the lock that holds it until ``release`` or the end of the process."""

    worker_id: str
    lock_fd: int

    def release(self) -> None:
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def take_identity(home: Path) -> WorkerIdentity:
    """The first id of this home that no other process holds; made at first use.

    Raises:
        TooManyWorkers: all are held.
    """
    directory = home / "workers"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(MAX_WORKERS_PER_HOME):
        fd = os.open(directory / f"{number}.id", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        known = os.pread(fd, 64, 0).decode(errors="replace").strip()
        if not known:
            known = f"w{secrets.token_hex(6)}"
            os.pwrite(fd, known.encode(), 0)
        return WorkerIdentity(known, fd)
    raise TooManyWorkers(f"{MAX_WORKERS_PER_HOME} workers run from {home} already")

"""What a replica leaves on the machine when its process was killed: files, a socket, an engine that is about to die."""

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path

from xinference.core.machine import Machine
from xinference.core.start_blocks import remove_abandoned_blocks
from xinference.model.llm import keeper
from xinference.model.llm.vllm.xavier.directory.sweep import remove_segments

logger = logging.getLogger(__name__)

END_SECONDS = 5.0  # for an engine to follow the process that watched it; a keeper process sees to that
POLL_SECONDS = 0.02
START_BLOCKS = Path("/dev/shm")  # noqa: S108 (where the actor system makes them, wherever segments lie)


class MachineLeftovers:
    """Files and processes of one worker."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def remove_cache(self, replica_uid: str | None) -> int:
        """Remove segments and control pages; how many files it was.

        Those of one replica are removed even while a dying engine holds their locks, for nobody else may use them: unlinking leaves its
        mapping valid. Those of all are removed only if their owner is gone, since another worker may have taken this one's name.
        """
        return len(remove_segments(self._machine.shm_dir, self._machine.worker_id, replica_uid, force=replica_uid is not None))

    def remove_socket(self, replica_uid: str) -> None:
        self._machine.socket_of(replica_uid).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove everything that a dead worker of this name left, sockets included; how many files it was."""
        removed = self.remove_cache(None)
        for socket in self._machine.sockets_dir.glob("*.sock"):
            socket.unlink(missing_ok=True)
            removed += 1
        return removed + remove_abandoned_blocks(START_BLOCKS)

    def remove_directory(self) -> None:
        """Remove the worker's directory of sockets, when it stops."""
        with contextlib.suppress(OSError):  # something of somebody else's lies in it
            self._machine.sockets_dir.rmdir()

    async def wait_ended(self, pid: int) -> None:
        """Wait until a process is gone; kill it if it takes too long.

        Its keeper, if that is stopped, is continued: it has been told to end the whole tree, and could not hear it.
        """
        _continue_keeper(pid)
        deadline = asyncio.get_running_loop().time() + END_SECONDS
        while _runs(pid):
            if asyncio.get_running_loop().time() > deadline:
                logger.error("engine process %s did not end with the process that watched it: killing it", pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(POLL_SECONDS)


def _runs(pid: int) -> bool:
    """Whether there is such a process, other than as a zombie."""
    try:
        return _stat(pid)[0] != b"Z"
    except OSError:
        return False


def _continue_keeper(pid: int) -> None:
    """Continue the keeper above an engine if it is stopped."""
    with contextlib.suppress(OSError):
        parent = int(_stat(pid)[1])
        if _stat(parent)[0] == b"T" and keeper.__file__.encode() in Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0"):
            os.kill(parent, signal.SIGCONT)


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat behind the name: state, parent, ... Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()

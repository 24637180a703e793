"""Finds and ends engine processes whose keeper died: what a worker cleans up when it starts, and when a keeper was killed.

Every process of an engine carries its keeper's identity in its environment, which children inherit. A process of a dead keeper belongs to
nobody any more.
"""

import contextlib
import os
import signal

MARK = "XINFERENCE_ENGINE_KEEPER"


def identity(pid: int) -> str | None:
    """A process as ``pid.start_time``, which no later process shares; None if it is gone or only a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else f"{pid}.{int(fields[19])}"


def marked_processes() -> dict[int, str]:
    """Processes of this user that carry a mark, with the keeper's identity."""
    prefix = f"{MARK}=".encode()
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:  # ended, or another user's
            continue
        mark = next((v for v in variables if v.startswith(prefix)), None)
        if mark is not None:
            found[int(name)] = mark.removeprefix(prefix).decode(errors="replace")
    return found


def kill_orphans() -> list[int]:
    """Kill engine processes whose keeper is gone; their pids. Engines of living keepers are left alone."""
    killed = []
    for pid, keeper in marked_processes().items():
        number = keeper.partition(".")[0]
        if number.isdigit() and identity(int(number)) != keeper:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed

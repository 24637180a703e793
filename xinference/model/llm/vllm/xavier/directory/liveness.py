"""Whether a process that wrote its pid and start time is still the one that runs.

A pid alone proves nothing: it may belong to a zombie, or to a newcomer that got the same number.
"""

from pathlib import Path

_STATE, _START_TICKS = 0, 19  # fields 3 and 22 of /proc/<pid>/stat, counted from behind the command's name


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it does not run (a zombie does not)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name may hold spaces and parentheses: the fields begin behind the last ")".
    fields = text.rpartition(b")")[2].split()
    if fields[_STATE] in (b"Z", b"X"):
        return None
    return int(fields[_START_TICKS])


def runs(pid: int, started_ticks: int) -> bool:
    """Whether the process with this pid is the one that started then."""
    return pid > 0 and start_ticks(pid) == started_ticks

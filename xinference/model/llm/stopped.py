"""Finds a stopped process (SIGSTOP) in an engine's tree: the one kind of hang that neither silence nor a health check can tell from work.

A core that computes a long prompt answers nobody for seconds and beats late, but it runs; one whose server answers from a process of its
own looks healthy while it is stopped. The kernel's word is exact: state T. A process under a debugger (state t) is not meant.
"""

import os
from pathlib import Path

STOPPED = b"T"
MAX_PROCESSES = 1024  # of one tree that are looked at


def stopped_process(root: int, proc: Path = Path("/proc")) -> str | None:
    """A stopped process of the tree below ``root``, itself included, as "PID (NAME)"; None if all run or are gone."""
    waiting, seen = [root], 0
    while waiting and seen < MAX_PROCESSES:
        pid = waiting.pop()
        seen += 1
        try:
            name, _, rest = (proc / str(pid) / "stat").read_bytes().partition(b"(")[2].rpartition(b")")
        except OSError:  # ended meanwhile
            continue
        if rest.split()[0] == STOPPED:
            return f"{pid} ({name.decode(errors='replace')})"
        waiting += children_of(pid, proc)
    return None


def children_of(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Children of all threads of a process; none where the kernel does not list them."""
    found: list[int] = []
    try:
        threads = os.listdir(proc / str(pid) / "task")
    except OSError:
        return found
    for thread in threads:
        try:
            found += map(int, (proc / str(pid) / "task" / thread / "children").read_text().split())
        except OSError:
            continue
    return found

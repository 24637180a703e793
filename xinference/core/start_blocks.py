"""Blocks of shared memory that the actor system leaves when it is killed while it starts a process.

xoscar hands a new sub-pool its configuration through a block of 10 KiB in /dev/shm and removes it once the process runs. A server that is
killed in that second leaves the block, under a random name that says nothing of its owner. One that no process has mapped is nobody's: its
maker maps it when it creates it, and unmaps it when it removes it.
"""

import os
from pathlib import Path

BLOCK_BYTES = 10240
MARKS = (b"actor_pool_config", b"main_pool_pid")  # keys of the configuration: other programs' blocks do not hold them


def abandoned_blocks(directory: Path, processes: Path = Path("/proc")) -> list[Path]:
    """Start blocks in the directory that no process of this user has mapped."""
    found = [path for path in directory.glob("psm_*") if _is_start_block(path)]
    if not found:
        return []
    mapped = _mapped_files(processes)
    return [path for path in found if str(path) not in mapped]


def remove_abandoned_blocks(directory: Path) -> int:
    """Remove them; how many."""
    removed = 0
    for path in abandoned_blocks(directory):
        path.unlink(missing_ok=True)
        removed += 1
    return removed


def _is_start_block(path: Path) -> bool:
    try:
        info = path.stat()
        if info.st_size != BLOCK_BYTES or info.st_uid != os.getuid():
            return False
        content = path.read_bytes()
    except OSError:
        return False
    return all(mark in content for mark in MARKS)


def _mapped_files(processes: Path) -> set[str]:
    """Paths of all files that processes have mapped, as far as their maps may be read: those of the same user may."""
    mapped = set()
    for maps in processes.glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        mapped |= {line[line.index("/") :] for line in lines if "/" in line}
    return mapped

"""What a server occupies on this machine, so that a stop can be proven complete: its processes and its files in shared memory."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

POLL_SECONDS: Final = 0.05


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    created: float

    @classmethod
    def of(cls, process: psutil.Process) -> "ProcessId":
        return cls(process.pid, process.create_time())

    def process(self) -> psutil.Process | None:
        """The process if it lives; a zombie counts as dead."""
        try:
            found = psutil.Process(self.pid)
            alive = found.create_time() == self.created and found.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return None
        return found if alive else None


@dataclass(frozen=True)
class Footprint:
    """Processes (a server and all that it started) and the shared-memory files that they have mapped."""

    processes: frozenset[ProcessId]
    files: frozenset[Path]

    @classmethod
    def of(cls, root: ProcessId, shm_dir: Path) -> "Footprint":
        """Look at a server; empty if it does not run."""
        server = root.process()
        if server is None:
            return cls(frozenset(), frozenset())
        processes, files = set(), set()
        for process in (server, *server.children(recursive=True)):
            try:
                processes.add(ProcessId.of(process))
                files.update(_mapped_files(process.pid, shm_dir))
            except (psutil.Error, OSError):
                continue  # ended while we looked
        return cls(frozenset(processes), frozenset(files))

    def remains(self) -> list[str]:
        """What is still there, in words."""
        alive = [f"process {process.pid}" for process in self.processes if process.process() is not None]
        return sorted(alive) + sorted(f"file {path}" for path in self.files if path.exists())

    def wait_until_gone(self, seconds: float) -> list[str]:
        """Wait at most so long for everything to vanish; returns what did not."""
        deadline = time.monotonic() + seconds
        while (remains := self.remains()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return remains


def _mapped_files(pid: int, shm_dir: Path) -> set[Path]:
    """Files of a directory that a process has mapped; those unlinked meanwhile are gone already."""
    files = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{shm_dir}/") and not fields[5].endswith(" (deleted)"):
            files.add(Path(fields[5]))
    return files

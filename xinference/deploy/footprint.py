"""What a server occupies on this machine, so that a stop can be proven complete: its processes and its files in shared memory."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from xinference.model.llm.vllm.xavier.directory.names import parse_name

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
    """Processes (a server and all that it started), the shared-memory files that they have mapped, and the workers that those belong to.

    What a worker's name stands on belongs to it, mapped or not: a dead replica's segment waits for its successor unmapped.
    """

    processes: frozenset[ProcessId]
    files: frozenset[Path]
    worker_ids: frozenset[str]
    shm_dir: Path

    @classmethod
    def of(cls, root: ProcessId, shm_dir: Path) -> "Footprint":
        """Look at a server; empty if it does not run."""
        server = root.process()
        processes, files = set(), set()
        for process in (server, *server.children(recursive=True)) if server is not None else ():
            try:
                processes.add(ProcessId.of(process))
                files.update(_mapped_files(process.pid, shm_dir))
            except (psutil.Error, OSError):
                continue  # ended while we looked
        names = (parse_name(path.name) for path in files)
        return cls(frozenset(processes), frozenset(files), frozenset(name.worker_id for name in names if name), shm_dir)

    def remains(self) -> list[str]:
        """What is still there, in words."""
        alive = [f"process {process.pid}" for process in self.processes if process.process() is not None]
        files = {path for path in self.files if path.exists()} | set(self._files_of_workers())
        return sorted(alive) + sorted(f"file {path}" for path in files)

    def _files_of_workers(self) -> Iterator[Path]:
        for path in self.shm_dir.iterdir():
            name = parse_name(path.name)
            if name is not None and name.worker_id in self.worker_ids:
                yield path

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

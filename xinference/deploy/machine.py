"""What there is on this machine, as plain facts. Reads much, changes nothing, judges nothing (see doctor.py)."""

import os
import platform
import resource
import shutil
import socket
import stat
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import psutil

from xinference.client.presence import is_running
from xinference.model.llm.vllm.flavour import Flavour, FlavourRefused, detect_flavour, problems
from xinference.model.llm.vllm.xavier.directory.sweep import StaleFile, stale_files
from xinference.settings import Settings

DISTRIBUTIONS: Final = ("torch", "xoscar")
NVIDIA_DEVICE: Final = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class SharedMemory:
    """The directory of the shared cache: whether it can be written, its size and what is free, in bytes."""

    path: Path
    writable: bool
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Home:
    """The directory of keys, models and logs; permissions are None for what does not exist yet."""

    path: Path
    writable: bool
    mode: int | None
    key_mode: int | None
    free_bytes: int


@dataclass(frozen=True)
class Port:
    """A port that a server would bind, and who has it: nobody, one of our servers, or a stranger."""

    name: str
    number: int
    free: bool
    ours: bool


@dataclass(frozen=True)
class Machine:
    """All facts that doctor judges. Sizes in bytes; limits as the system gives them, -1 for unlimited.

    Args:
        vllm: the installed build, or why there is none that can be used.
        vllm_problems: what else keeps that build from starting, each with its fix.
    """

    python: tuple[int, int, int]
    system: str
    architecture: str
    vllm: Flavour | str
    vllm_problems: tuple[str, ...]
    versions: dict[str, str]
    has_gpu: bool
    available_memory_bytes: int
    shared_memory: SharedMemory
    stale: tuple[StaleFile, ...]
    open_files: int
    locked_memory_bytes: int
    ports: tuple[Port, ...]
    home: Home
    node: str | None


def survey(settings: Settings) -> Machine:
    """Look at this machine."""
    vllm = _vllm()
    return Machine(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        system=platform.system(),
        architecture=platform.machine(),
        vllm=vllm,
        vllm_problems=tuple(problems(vllm)) if isinstance(vllm, Flavour) else (),
        versions=_versions(),
        has_gpu=NVIDIA_DEVICE.exists(),
        available_memory_bytes=psutil.virtual_memory().available,
        shared_memory=_shared_memory(settings.shm_dir),
        stale=tuple(stale_files(str(settings.shm_dir), time.time())),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory_bytes=_limit(resource.RLIMIT_MEMLOCK),
        ports=_ports(settings),
        home=_home(settings.home_dir),
        node=shutil.which("node"),
    )


def cpu_flags() -> frozenset[str]:
    """What the processor can do, in Linux's words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _vllm() -> Flavour | str:
    try:
        return detect_flavour()
    except FlavourRefused as refusal:
        return str(refusal)


def _versions() -> dict[str, str]:
    """Installed versions of what a server needs. Metadata only: importing torch takes seconds."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _shared_memory(path: Path) -> SharedMemory:
    if not path.is_dir():
        return SharedMemory(path, writable=False, total_bytes=0, free_bytes=0)
    usage = shutil.disk_usage(path)
    return SharedMemory(path, os.access(path, os.W_OK | os.X_OK), usage.total, usage.free)


def _home(path: Path) -> Home:
    existing = next(part for part in (path, *path.parents) if part.exists())
    key = path / "admin.key"
    return Home(
        path=path,
        writable=os.access(existing, os.W_OK | os.X_OK),
        mode=stat.S_IMODE(path.stat().st_mode) if path.exists() else None,
        key_mode=stat.S_IMODE(key.stat().st_mode) if key.exists() else None,
        free_bytes=shutil.disk_usage(existing).free,
    )


def _ports(settings: Settings) -> tuple[Port, ...]:
    ours = is_running(f"http://{settings.host}:{settings.port}")
    named = (("API", settings.port), ("supervisor", settings.supervisor_port))
    # Port 0 means "any free one".
    return tuple(Port(name, number, _is_free(settings.host, number), ours) for name, number in named if number)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True

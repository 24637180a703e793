"""Real clusters with the fake engine, for tests of processes: start them, look at them, and check that nothing is left."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from xinference.core.cluster import LocalCluster, start_local
from xinference.core.machine import Machine
from xinference.core.runner import Watch
from xinference.settings import Settings

PATIENCE_SECONDS = 40.0  # for anything that has no limit of its own; the machine may be busy
BUDGET = "1MiB"


def settings_in(folder: Path, **changes: Any) -> Settings:
    """Settings of a cluster that keeps everything in a folder of its own."""
    shm = folder / "shm"
    shm.mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "home": folder / "home",
        "supervisor_port": 0,
        "shm_dir": shm,
        "allow_fake_engine": True,
        "heartbeat_seconds": 0.5,
        "worker_lost_seconds": 3.0,
        **changes,
    }
    return Settings(**values)


def spec(**changes: Any) -> dict[str, Any]:
    """Two sharing replicas of the fake engine."""
    return {
        "model_uid": "m",
        "model_path": "/models/m",
        "model_engine": "fake",
        "replica": 2,
        "enable_xavier": True,
        "xavier_cpu_cache_bytes": BUDGET,
        **changes,
    }


async def until(condition: Callable[[], Awaitable[Any]], seconds: float = PATIENCE_SECONDS) -> Any:
    """Poll until a condition gives something true, and return that."""
    async with asyncio.timeout(seconds):
        while not (found := await condition()):
            await asyncio.sleep(0.01)
    return found


class Cluster:
    """A running cluster and what tests ask of it."""

    def __init__(self, local: LocalCluster, settings: Settings) -> None:
        self.local = local
        self.settings = settings
        self.supervisor = local.supervisor
        worker_id = local.identity.worker_id if local.identity else ""
        self._sockets_dir = Machine(worker_id, str(settings.home_dir / "run" / worker_id), str(settings.shm_dir), Watch()).sockets_dir

    async def launch(self, expected: str = "ready", **changes: Any) -> None:
        """Launch and wait for the end of the launch."""
        model = await self.supervisor.launch_model(spec(**changes))
        stage = await self.end_of_launch(model["id"])
        cause = (await self.supervisor.describe_model(model["id"]))["cause"]
        assert stage == expected, f"{stage}: {cause}"

    async def end_of_launch(self, uid: str = "m") -> str:
        seen = 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                for event in await self.supervisor.events(uid, seen, 5.0):
                    seen = event["seq"]
                    if event["stage"] in ("ready", "failed", "cancelled", "terminated"):
                        stage: str = event["stage"]
                        return stage

    async def stages(self, uid: str = "m") -> list[str]:
        return [event["stage"] for event in await self.supervisor.events(uid, 0, 0.0)]

    async def replica(self, replica_uid: str = "m-0", uid: str = "m") -> dict[str, Any]:
        found: list[dict[str, Any]] = await self.supervisor.list_replicas(uid)
        return next(replica for replica in found if replica["replica_uid"] == replica_uid)

    async def until_state(self, state: str, replica_uid: str = "m-0", seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        async def in_state() -> dict[str, Any] | None:
            replica = await self.replica(replica_uid)
            return replica if replica["state"] == state else None

        found: dict[str, Any] = await until(in_state, seconds)
        return found

    def files(self) -> list[str]:
        """Names of this cluster's files in shared memory."""
        return sorted(os.listdir(self.settings.shm_dir))

    def sockets(self) -> list[Path]:
        return list(self._sockets_dir.glob("*.sock"))

    def assert_nothing_is_left(self) -> None:
        left = [*self.files(), *map(str, self.sockets()), *children()]
        assert not left, left


def children() -> list[str]:
    """Living descendants of this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline()):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        except psutil.NoSuchProcess:
            continue
    return found


@asynccontextmanager
async def running_cluster(folder: Path, **changes: Any) -> AsyncIterator[Cluster]:
    """Supervisor and worker in this process; stopped on every way out, and then nothing may be left."""
    settings = settings_in(folder, **changes)
    local = await start_local(settings)
    cluster = Cluster(local, settings)
    try:
        await until(local.supervisor.ready)
        yield cluster
    finally:
        await local.stop(2.0)
    cluster.assert_nothing_is_left()


@asynccontextmanager
async def steady_requests(uds: str) -> AsyncIterator[list[int]]:
    """Requests to one replica, one after the other; the statuses of their answers."""
    statuses: list[int] = []

    async def work() -> None:
        async with aiohttp.ClientSession("http://replica", connector=aiohttp.UnixConnector(uds)) as session:
            while True:
                async with session.post("/v1/completions", json={"model": "m", "prompt": "a b c", "max_tokens": 2}) as response:
                    await response.read()
                    statuses.append(response.status)
                await asyncio.sleep(0.01)

    task = asyncio.create_task(work())
    try:
        yield statuses
        assert not task.done(), "a request on the other replica failed"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert set(statuses) == {200}

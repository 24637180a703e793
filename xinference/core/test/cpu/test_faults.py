"""Processes are killed, stopped and cancelled at every point; the others go on, and nothing is left."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from xinference.core import processes
from xinference.core.errors import Unreachable
from xinference.core.orders import ReplicaReport
from xinference.core.processes import RemoteReplica
from xinference.core.runner import Watch
from xinference.core.test.clusters import Cluster, running_cluster, spec, steady_requests, until

HANG_SECONDS = 2.0
HEALTH_SECONDS = 0.25  # half of the heartbeat


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, replica_hang_seconds=HANG_SECONDS) as running:
        yield running


async def watcher_of(replica: dict[str, Any]) -> psutil.Process:
    """The process that watches an engine: the ancestor that is a sub-pool."""
    return next(p for p in psutil.Process(replica["pid"]).parents() if "start_sub_pool" in p.cmdline())


async def relaunched(cluster: Cluster, before: dict[str, Any]) -> dict[str, Any]:
    async def again() -> dict[str, Any] | None:
        replica = await cluster.replica(before["replica_uid"])
        return replica if replica["state"] == "ready" and replica["incarnation"] != before["incarnation"] else None

    found: dict[str, Any] = await until(again)
    return found


async def test_a_killed_engine_is_noticed_within_a_second_and_started_again_while_the_other_serves(cluster: Cluster) -> None:
    await cluster.launch()
    victim, other = await cluster.replica("m-0"), await cluster.replica("m-1")
    async with steady_requests(other["address"]):
        os.kill(victim["pid"], signal.SIGKILL)
        failed = await cluster.until_state("failed", "m-0", seconds=1.0)
        assert "SIGKILL" in failed["cause"]
        after = await relaunched(cluster, victim)
    assert after["restarts"] == 1
    assert (await cluster.replica("m-1"))["incarnation"] == other["incarnation"]
    assert (await cluster.supervisor.describe_model("m"))["state"] == "ready"


async def test_a_killed_watcher_takes_its_engine_along_and_is_replaced(cluster: Cluster) -> None:
    await cluster.launch()
    victim, other = await cluster.replica("m-0"), await cluster.replica("m-1")
    engine = psutil.Process(victim["pid"])
    async with steady_requests(other["address"]):
        (await watcher_of(victim)).kill()
        await relaunched(cluster, victim)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


async def test_a_stopped_engine_is_a_hang_and_is_replaced(cluster: Cluster) -> None:
    await cluster.launch()
    victim, other = await cluster.replica("m-0"), await cluster.replica("m-1")
    async with steady_requests(other["address"]):
        os.kill(victim["pid"], signal.SIGSTOP)
        failed = await cluster.until_state("failed", "m-0", seconds=HANG_SECONDS + 2.0)
        assert f"for {HANG_SECONDS - HEALTH_SECONDS:g} s (hung)" in failed["cause"]
        await relaunched(cluster, victim)
    assert not psutil.pid_exists(victim["pid"]) or psutil.Process(victim["pid"]).status() == psutil.STATUS_ZOMBIE


async def test_a_stopped_watcher_is_found_by_its_worker_and_is_replaced(cluster: Cluster) -> None:
    await cluster.launch()
    victim, other = await cluster.replica("m-0"), await cluster.replica("m-1")
    watcher = await watcher_of(victim)
    async with steady_requests(other["address"]):
        watcher.suspend()
        await cluster.until_state("failed", "m-0", seconds=HANG_SECONDS + 3.0)
        await relaunched(cluster, victim)
    assert not watcher.is_running()


async def test_an_engine_whose_core_is_dead_but_whose_server_answers_is_replaced(cluster: Cluster) -> None:
    await cluster.launch()
    victim = await cluster.replica("m-0")
    async with (
        aiohttp.ClientSession("http://replica", connector=aiohttp.UnixConnector(victim["address"])) as session,
        session.post("/fake/faults", json={"dead": True}) as response,
    ):
        assert response.status == 200
    await relaunched(cluster, victim)


async def test_a_replica_that_keeps_dying_is_given_up_and_the_model_says_so(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, restarts=1) as cluster:
        await cluster.launch()
        for _ in range(2):
            victim = await cluster.until_state("ready", "m-0")
            os.kill(victim["pid"], signal.SIGKILL)
            await cluster.until_state("failed", "m-0")

        async def given_up() -> bool:
            return "not started again" in ((await cluster.replica("m-0"))["cause"] or "")

        await until(given_up)
        assert (await cluster.supervisor.describe_model("m"))["state"] == "degraded"
        await cluster.supervisor.restart_replica("m", "m-0")
        await cluster.until_state("ready", "m-0")


@pytest.mark.parametrize("stage", ["accepted", "creating", "loading", "replica_ready"])
async def test_a_launch_cancelled_at_any_stage_leaves_nothing(cluster: Cluster, stage: str) -> None:
    configs = [{}, {"engine_config": {"start_delay_seconds": 60.0}}]
    await cluster.supervisor.launch_model(spec(replica_config=configs))

    async def reached() -> bool:
        return stage in await cluster.stages()

    await until(reached)
    assert await cluster.supervisor.cancel_launch("m") is True
    model = await cluster.supervisor.describe_model("m")
    assert model["state"] == "cancelled"
    assert (await cluster.stages())[-1] == "cancelled"
    cluster.assert_nothing_is_left()


async def test_a_launch_whose_engine_never_serves_fails_in_time_and_leaves_nothing(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, launch_seconds=2.0) as cluster:
        await cluster.launch("failed", engine_config={"start_delay_seconds": 60.0})
        assert "did not serve within 2 s" in (await cluster.supervisor.describe_model("m"))["cause"]
        cluster.assert_nothing_is_left()


async def test_a_termination_kills_an_engine_that_ignores_it(cluster: Cluster) -> None:
    await cluster.launch(engine_config={"ignore_sigterm": True})
    before = await cluster.replica("m-0")
    await cluster.local.stop(0.5)
    cluster.assert_nothing_is_left()
    assert not psutil.pid_exists(before["pid"]) or psutil.Process(before["pid"]).status() == psutil.STATUS_ZOMBIE


async def test_a_model_that_is_terminated_while_a_replica_is_down_leaves_nothing(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, restarts=0) as cluster:
        await cluster.launch()
        os.kill((await cluster.replica("m-0"))["pid"], signal.SIGKILL)
        await cluster.until_state("failed", "m-0")
        assert any(name.endswith(".seg") and ".m-0." in name for name in cluster.files())
        await cluster.supervisor.terminate_model("m", 0.0)
        cluster.assert_nothing_is_left()


async def test_a_probe_that_timed_out_because_the_worker_itself_was_stopped_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pause between them the two times mean a watching process that hangs."""
    report = ReplicaReport("m", "m-0", 7, "ready")

    class Actor:
        asked = 0

        async def report(self) -> dict[str, Any]:
            self.asked += 1
            if self.asked == 1:
                await asyncio.Event().wait()
            return report.to_wire()

    for paused_seconds, answered in ((0.0, False), (60.0, True)):
        actor, times = Actor(), iter([100.0, 100.2 + paused_seconds])
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda times=times: next(times)))
        replica = RemoteReplica(actor, "address", Watch(hang_seconds=0.2, probe_seconds=0.1))
        if answered:
            assert await replica.report() == report
        else:
            with pytest.raises(Unreachable):
                await replica.report()

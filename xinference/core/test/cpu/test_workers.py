"""Workers in processes of their own: killed, stopped and started again; and strangers that knock."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import xoscar as xo
from xoscar.backends.router import Router

from xinference.core.calls import call
from xinference.core.cluster import start_supervisor
from xinference.core.cluster_key import use_cluster_key
from xinference.core.errors import Unreachable
from xinference.core.supervisor import SUPERVISOR_UID
from xinference.core.test.clusters import Cluster, settings_in, spec, steady_requests, until
from xinference.errors import InvalidRequest

STRANGER = """
import asyncio, os, sys
if sys.argv[2] == "none":
    os.environ.pop("XOSCAR_AUTH_KEY", None)
else:
    os.environ["XOSCAR_AUTH_KEY"] = sys.argv[2]
import xoscar as xo
from xoscar.backends.router import Router

class Bomb:
    def __reduce__(self):
        return (open, (sys.argv[3], "w"))

async def main():
    ref = await xo.actor_ref(address=sys.argv[1], uid="supervisor")
    print(await ref.route_table(Bomb()))

async def limited():
    try:
        await asyncio.wait_for(main(), 10)
    except BaseException as error:
        print("refused", type(error).__name__)

asyncio.run(limited())
"""


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A supervisor in this process; workers come as processes."""
    settings = settings_in(tmp_path)
    local = await start_supervisor(settings)
    try:
        yield Cluster(local, settings)
    finally:
        await local.stop(0.0)


@asynccontextmanager
async def process_of(kind: str, folder: Path, where: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A supervisor or worker process; ended on every way out."""
    environment = {name: value for name, value in os.environ.items() if name != "XOSCAR_DIR"}  # a directory for each process
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "xinference.core.test.process_main", kind, str(folder), where, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            process.kill()
            raise


@asynccontextmanager
async def worker_process(cluster: Cluster) -> AsyncIterator[psutil.Process]:
    """A worker process, in the cluster."""
    before = len(await cluster.supervisor.workers())
    async with process_of("worker", cluster.settings.shm_dir.parent, cluster.local.address) as process:

        async def joined() -> bool:
            return len(await cluster.supervisor.workers()) > before

        await until(joined)
        yield psutil.Process(process.pid)


def tree(worker: psutil.Process) -> list[psutil.Process]:
    return list(worker.children(recursive=True))


async def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


async def test_a_worker_that_is_killed_takes_its_engines_along_and_its_replicas_come_up_on_the_next_one(cluster: Cluster) -> None:
    async with worker_process(cluster) as first:
        await cluster.launch()
        before = await cluster.replica("m-0")
        family = tree(first)
        assert len(family) >= 4
        first.kill()
        await until(lambda: all_gone(family), seconds=5.0)
        lost = await cluster.until_state("lost", "m-0")
        assert "has not been heard of" in lost["cause"]
        assert (await cluster.supervisor.describe_model("m"))["state"] == "unavailable"
        assert cluster.files() != []
    async with worker_process(cluster):
        after = await cluster.until_state("ready", "m-0")
        assert after["incarnation"] != before["incarnation"]
        await cluster.until_state("ready", "m-1")
        assert len([name for name in cluster.files() if name.endswith(".seg")]) == 2  # the dead worker's were swept
        await cluster.supervisor.terminate_model("m", 0.0)
        assert cluster.files() == []


async def test_a_worker_that_is_stopped_orderly_leaves_nothing_and_its_model_moves(cluster: Cluster) -> None:
    async with worker_process(cluster) as first, worker_process(cluster) as second:
        await cluster.launch()
        places = {replica["replica_uid"]: replica["worker_id"] for replica in await cluster.supervisor.list_replicas("m")}
        assert len(set(places.values())) == 2
        first.terminate()

        async def all_on_the_other() -> bool:
            replicas: list[dict[str, Any]] = await cluster.supervisor.list_replicas("m")
            return len({r["worker_id"] for r in replicas}) == 1 and all(r["state"] == "ready" for r in replicas)

        await until(all_on_the_other)
        workers = {name.split(".")[1] for name in cluster.files()}
        assert workers == {(await cluster.replica("m-0"))["worker_id"]}
        assert second.is_running()
        await cluster.supervisor.terminate_model("m", 0.0)
    assert cluster.files() == []


async def test_a_worker_on_a_port_that_a_pool_of_the_supervisor_had_once_is_reached(cluster: Cluster) -> None:
    async with worker_process(cluster):
        (worker,) = await cluster.supervisor.workers()
        stale = {worker["address"]: "unixsocket:///4242"}
        Router.get_instance_or_empty().add_router(Router([], None, mapping=stale))
        await cluster.launch()
        await cluster.supervisor.terminate_model("m", 0.0)


async def test_a_worker_that_was_away_and_returns_gives_up_what_is_not_wanted_any_more(cluster: Cluster) -> None:
    async with worker_process(cluster) as worker:
        await cluster.launch(replica=1, enable_xavier=False, xavier_cpu_cache_bytes=None)
        family = [process for process in tree(worker) if "fake.server" in " ".join(process.cmdline())]
        worker.suspend()
        await cluster.until_state("lost", "m-0")
        await cluster.supervisor.terminate_model("m", 0.0)
        worker.resume()
        await until(lambda: all_gone(family))

        async def back() -> bool:
            return bool(await cluster.supervisor.ready())

        await until(back)
        await cluster.launch()
        await cluster.supervisor.terminate_model("m", 0.0)


async def test_a_stranger_without_the_key_or_with_a_wrong_one_runs_nothing_and_stops_nothing(cluster: Cluster, tmp_path: Path) -> None:
    async with worker_process(cluster):
        for key in ("none", "wrong"):
            trace = tmp_path / f"trace-{key}"
            stranger = await asyncio.create_subprocess_exec(
                sys.executable, "-c", STRANGER, cluster.local.address, key, str(trace), stdout=asyncio.subprocess.PIPE
            )
            output, _ = await asyncio.wait_for(stranger.communicate(), 40)
            assert output.startswith(b"refused"), output
            assert not trace.exists()
        key = os.environ["XOSCAR_AUTH_KEY"]
        trace = tmp_path / "trace-right"
        friend = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STRANGER, cluster.local.address, key, str(trace), stdout=asyncio.subprocess.PIPE
        )
        await asyncio.wait_for(friend.communicate(), 40)
        assert trace.exists()  # so the two above were refused for their keys
        assert len(await cluster.supervisor.workers()) == 1


async def test_models_survive_the_death_of_their_supervisor_and_are_adopted_by_the_next_one(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    use_cluster_key(settings.home_dir)
    port = free_port()
    address = f"127.0.0.1:{port}"
    async with process_of("supervisor", tmp_path, str(port)) as first, process_of("worker", tmp_path, address):
        away = await until(lambda: reached(address))
        await until(away.ready)
        await away.launch_model(spec())

        async def serving() -> list[dict[str, Any]] | None:
            replicas: list[dict[str, Any]] = await away.list_replicas("m")
            return replicas if all(replica["state"] == "ready" for replica in replicas) else None

        before = await until(serving)
        await away.xavier_clear("m")
        first.kill()
        await first.wait()
        async with steady_requests(before[0]["address"]):
            local = await start_supervisor(settings_in(tmp_path, supervisor_port=port))
            cluster = Cluster(local, settings)
            try:
                await until(lambda: known(cluster))
                after = await cluster.supervisor.list_replicas("m")
                assert [(r["replica_uid"], r["incarnation"]) for r in after] == [(r["replica_uid"], r["incarnation"]) for r in before]
                model = await cluster.supervisor.describe_model("m")
                assert (model["state"], model["spec"]["replica"]) == ("ready", 2)
                assert (await cluster.supervisor.xavier_status("m"))["epoch"] == 2
                cleared = await cluster.supervisor.xavier_clear("m")
                assert (cleared["status"], cleared["epoch"]) == ("cleared", 3)
                os.kill(after[1]["pid"], signal.SIGKILL)
                await cluster.until_state("failed", "m-1")
                await cluster.until_state("ready", "m-1")
            except BaseException:
                await local.stop(0.0)
                raise
        await cluster.supervisor.terminate_model("m", 0.0)
        assert cluster.files() == []
        await local.stop(0.0)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def reached(address: str) -> Any:
    """The supervisor at an address, once it answers."""
    try:
        return await call(xo.actor_ref(address=address, uid=SUPERVISOR_UID), 2.0)
    except Unreachable:
        return None


async def known(cluster: Cluster) -> bool:
    return any(model["id"] == "m" and model["replica"] == 2 for model in await cluster.supervisor.list_models())


async def test_a_refusal_by_a_worker_in_another_process_arrives_as_it_was_made(cluster: Cluster) -> None:
    async with worker_process(cluster):
        with pytest.raises(InvalidRequest) as caught:
            await cluster.supervisor.launch_model(spec(engine_config={"faults": {"explode": True}}))
        assert caught.value.message.startswith("the fake engine refuses its arguments: unknown field 'explode'")
        assert caught.value.param == "engine_config"
        configs = [{}, {"engine_config": {"fail_start": "no weights"}}]
        await cluster.launch("failed", replica_config=configs)
        cause = (await cluster.supervisor.describe_model("m"))["cause"]
        assert cause.startswith("replica m-1: the engine ended with exit status 1: RuntimeError: no weights")

"""Each process of a server is killed and stopped in turn while streams, short requests and launches run against it."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import pytest

from xinference.client.sync_client import Client
from xinference.core.test.clusters import until
from xinference.core.test.mixed_load import mixed_load
from xinference.deploy.test.servers import ServerProcess
from xinference.errors import XinferenceError

HANG_SECONDS = 2.0
LOST_SECONDS = 3.0
SLACK_SECONDS = 3.0  # a machine of two busy cores
DEATH_SECONDS = 1.0  # the promise for a death
BACK_SECONDS = 5.0  # and for what the dead process held
MODEL = {
    "model_uid": "m",
    "model_path": "/models/m",
    "model_engine": "fake",
    "replica": 2,
    "enable_xavier": True,
    "xavier_cpu_cache_bytes": "1MiB",
    "engine_config": {"faults": {"decode_ms": 5.0}},
}
OTHER = {"model_uid": "other", "model_path": "/models/m", "model_engine": "fake", "replica": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all faults, with a model of two replicas; what they leave is seen at its end."""
    environment = {
        "XINFERENCE_REPLICA_HANG_SECONDS": str(HANG_SECONDS),
        "XINFERENCE_WORKER_LOST_SECONDS": str(LOST_SECONDS),
        "XINFERENCE_HEARTBEAT_SECONDS": "0.5",
        "XINFERENCE_RESTARTS": "100",
        "XINFERENCE_RESTART_WINDOW_SECONDS": "1",  # so that each relaunch waits half a second
        "XINFERENCE_SUPERVISOR_PORT": "0",
    }
    running = ServerProcess("local", tmp_path_factory.mktemp("server"), environment=environment)
    running.start("--port", str(running.port))
    try:
        running.wait_until_serving()
        with Client(running.endpoint) as client:
            client.launch(wait_ready=True, **MODEL)
        footprint = running.footprint()
        yield running
        assert running.stop() == 0, running.log
        assert footprint.wait_until_gone(10) == []
        assert list(running.shm.iterdir()) == []
    finally:
        running.kill()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.endpoint) as opened:
        yield opened


def replica_of(client: Client, uid: str) -> dict[str, Any]:
    return next(replica for replica in client.replicas("m") if replica["replica_uid"] == uid)


def process_of(replica: dict[str, Any], kind: str) -> psutil.Process:
    """One of the processes of a replica: its engine, the keeper above it, or the pool above that."""
    engine = psutil.Process(replica["pid"])
    if kind == "engine":
        return engine
    keeper = engine.parent()
    assert keeper is not None
    assert "keeper.py" in " ".join(keeper.cmdline())
    if kind == "keeper":
        return keeper
    pool = keeper.parent()
    assert pool is not None
    assert "start_sub_pool" in pool.cmdline()
    return pool


async def news(client: Client, after: int) -> list[dict[str, Any]]:
    """The model's events behind a sequence number, as far as there are any."""
    found: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as session:
        while True:  # each answer ends at the end of a launch
            url = f"{client.endpoint}/v1/models/m/events?after={found[-1]['seq'] if found else after}"
            async with session.get(url) as response:
                more = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
            if not more:
                return found
            found += more


async def ended(client: Client, uid: str, after: int, seconds: float) -> dict[str, Any]:
    """The event that says that the replica is no more."""

    async def found() -> dict[str, Any] | None:
        return next((e for e in await news(client, after) if e["replica_uid"] == uid and e["stage"] == "replica_failed"), None)

    event: dict[str, Any] = await until(found, seconds)
    return event


async def back(client: Client, before: dict[str, Any]) -> dict[str, Any]:
    async def ready() -> dict[str, Any] | None:
        replica = await asyncio.to_thread(replica_of, client, before["replica_uid"])
        return replica if replica["state"] == "ready" and replica["incarnation"] != before["incarnation"] else None

    found: dict[str, Any] = await until(ready)
    return found


def text_of(client: Client, uid: str) -> str:
    """What one replica answers to a prompt that all answer alike."""
    answer = client.generate("m", "a prompt that is long enough for blocks " * 10, max_tokens=8, temperature=0, replica_uid=uid)
    return str(answer["choices"][0]["text"])


def segments_of(server: ServerProcess, uid: str) -> list[str]:
    return [path.name for path in server.shm.iterdir() if path.name.endswith(".seg") and f".{uid}." in path.name]


FAULTS = [(kind, number) for number in (signal.SIGKILL, signal.SIGSTOP) for kind in ("engine", "keeper", "pool")]
FAULTS += [("all", signal.SIGSTOP)]


@pytest.mark.parametrize(("kind", "number"), FAULTS, ids=[f"{kind} {number.name}" for kind, number in FAULTS])
async def test_one_process_of_a_replica_fails_and_nobody_else_notices(
    server: ServerProcess, client: Client, kind: str, number: signal.Signals
) -> None:
    victim, other = replica_of(client, "m-0"), replica_of(client, "m-1")
    right = text_of(client, "m-0")
    seen = (await news(client, 0))[-1]["seq"]
    pool = process_of(victim, "pool")
    family = [pool, *pool.children(recursive=True)]
    async with mixed_load(server.endpoint, "m", "m-1", {**OTHER, "model_uid": f"beside-{kind}-{number.name}"}) as load:
        at = time.time()
        for process in family if kind == "all" else [process_of(victim, kind)]:
            process.send_signal(number)
        failed = await ended(client, "m-0", seen, HANG_SECONDS + 3 * SLACK_SECONDS)
        assert failed["time"] - at <= SLACK_SECONDS + (DEATH_SECONDS if number == signal.SIGKILL else HANG_SECONDS), failed
        assert set(load.cut) <= {"engine_dead"}
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, BACK_SECONDS)
        assert alive == []
        await back(client, victim)
    assert replica_of(client, "m-1")["incarnation"] == other["incarnation"]
    assert replica_of(client, "m-0")["restarts"] == victim["restarts"] + 1
    assert text_of(client, "m-0") == text_of(client, "m-1") == right
    assert client.xavier("m")["replicas"][0]["counters"]["adopted_blocks"] > 0
    assert len(segments_of(server, "m-0")) == 1


def everything(server: ServerProcess) -> list[psutil.Process]:
    assert server.process is not None
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


@pytest.mark.parametrize("whole", [False, True], ids=["the server", "the whole machine"])
async def test_a_pause_of_those_who_watch_is_not_held_against_those_they_watch(server: ServerProcess, client: Client, whole: bool) -> None:
    before = client.replicas("m")
    paused = everything(server)[: None if whole else 1]
    async with mixed_load(server.endpoint, "m", "m-1"):
        for process in paused:
            process.suspend()
        await asyncio.sleep(max(HANG_SECONDS, LOST_SECONDS) + 1.5)  # what is tested is what the passing of time does
        for process in reversed(paused):
            process.resume()
    async with mixed_load(server.endpoint, "m", "m-0"):
        pass
    kept = ("incarnation", "pid", "restarts", "state")
    assert [{key: r[key] for key in kept} for r in client.replicas("m")] == [{key: r[key] for key in kept} for r in before]
    assert len(client.read("/v1/workers")["data"]) == 1


async def test_a_killed_server_takes_everything_along_and_its_successor_sweeps_and_serves(server: ServerProcess, client: Client) -> None:
    right = text_of(client, "m-0")
    family = everything(server)
    assert server.process is not None
    async with aiohttp.ClientSession() as session:
        body = {"model": "m", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with session.post(f"{server.endpoint}/v1/completions", json=body) as response:
            assert await response.content.readline()
            server.process.kill()
            with pytest.raises(aiohttp.ClientError):
                await response.content.read()
    _, alive = psutil.wait_procs(family, BACK_SECONDS)
    assert alive == []
    assert server.process.poll() is not None
    server.start("--port", str(server.port))
    server.wait_until_serving()
    await until(lambda: asyncio.to_thread(is_ready, server))
    assert list(server.shm.iterdir()) == []
    client.launch(wait_ready=True, **MODEL)
    assert text_of(client, "m-0") == text_of(client, "m-1") == right


def is_ready(server: ServerProcess) -> bool:
    with Client(server.endpoint) as client:
        try:
            return client.read("/ready") == {"status": "ready"}
        except XinferenceError:
            return False

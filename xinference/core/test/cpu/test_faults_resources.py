"""A server without descriptors, without room for its log, or with a wall clock that jumps: what runs goes on, and it recovers by itself."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from xinference.client.presence import is_running
from xinference.client.sync_client import Client
from xinference.core.test.clusters import until
from xinference.core.test.mixed_load import mixed_load
from xinference.deploy.test.servers import ServerProcess

MODEL: dict[str, Any] = {
    "model_uid": "m",
    "model_path": "/models/m",
    "model_engine": "fake",
    "replica": 2,
    "enable_xavier": True,
    "xavier_cpu_cache_bytes": "1MiB",
    "engine_config": {"faults": {"decode_ms": 5.0}},
}
HELD = 60  # connections that are asked for while there is no descriptor for one
JUMPING_CLOCK = """
import time
real = time.time
def jumping():  # a year ahead in every other second, a day behind in the rest
    now = real()
    return now + (31_536_000 if int(now) % 2 else -86_400)
time.time = jumping
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    running = ServerProcess("local", tmp_path, environment={"XINFERENCE_SUPERVISOR_PORT": "0", "XINFERENCE_HEARTBEAT_SECONDS": "0.5"})
    try:
        yield running
    finally:
        running.kill()


def start(server: ServerProcess) -> None:
    server.start("--port", str(server.port))
    server.wait_until_serving()


def lives_of(client: Client) -> list[tuple[str, str, int]]:
    return [(replica["replica_uid"], replica["incarnation"], replica["restarts"]) for replica in client.replicas("m")]


@contextmanager
def without_descriptors(pid: int, spare: int) -> Iterator[None]:
    """A process that may open so many more files and connections."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = [number for number in range(max(used) + spare + 2) if number not in used]
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[spare], hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_server_out_of_descriptors_goes_on_with_what_it_has_and_serves_again_when_they_are_back(server: ServerProcess) -> None:
    start(server)
    assert server.process is not None
    with Client(server.endpoint) as client:
        client.launch(wait_ready=True, **MODEL)
        before = lives_of(client)
    body = {"model": "m", "prompt": "x y z", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    url = f"{server.endpoint}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as stream, aiohttp.ClientSession() as kept:
        await stream.content.readuntil(b"data: ")
        async with kept.get(f"{server.endpoint}/ready") as response:
            assert (response.status, bool(await response.read())) == (200, True)  # to its end, or the connection is not kept
        with without_descriptors(server.process.pid, 0):
            for _ in range(2):  # on the connection that is there
                async with kept.post(url, json={**body, "max_tokens": 2, "stream": False}) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (503, "out_of_descriptors")
                    assert "retry-after" in response.headers
            held = await asyncio.gather(*(come("127.0.0.1", server.port) for _ in range(HELD)), return_exceptions=True)
            for _ in range(20):
                await stream.content.readuntil(b"data: ")
            async with kept.get(f"{server.endpoint}/ready") as response:
                assert (response.status, bool(await response.read())) == (200, True)  # to its end, or the connection is not kept
        async with mixed_load(server.endpoint, "m", "m-1"):
            await stream.content.readuntil(b"data: ")
        for writer in held:
            if isinstance(writer, asyncio.StreamWriter):
                writer.close()
    with Client(server.endpoint) as client:
        assert lives_of(client) == before
        assert "broke a connection" not in server.log
        client.terminate("m", 0.0)
    assert server.stop() == 0
    assert list(server.shm.iterdir()) == []


async def come(host: str, port: int) -> asyncio.StreamWriter:
    """Connect, and ask; whether it is taken is another question."""
    _, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    return writer


def test_a_launch_without_descriptors_fails_with_a_cause_leaves_nothing_and_can_be_repeated(server: ServerProcess) -> None:
    start(server)
    assert server.process is not None
    with Client(server.endpoint) as client:
        assert client.read("/ready") == {"status": "ready"}
        with without_descriptors(server.process.pid, 2):
            client.launch(**MODEL)
            failed = next(event for event in client.events("m") if event["stage"] in ("failed", "ready"))
        assert failed["stage"] == "failed"
        assert "Too many open files" in client.model("m")["cause"]
        assert list(server.shm.iterdir()) == []
        client.launch(wait_ready=True, **MODEL)
        assert client.generate("m", "x", max_tokens=2)["usage"]["completion_tokens"] > 0
    assert server.stop() == 0
    assert list(server.shm.iterdir()) == []


async def test_a_server_without_room_for_its_log_serves_launches_and_stops_as_ever(server: ServerProcess) -> None:
    server.shm.mkdir()
    own = {"XINFERENCE_HOME": str(server.home), "XINFERENCE_SHM_DIR": str(server.shm), "XINFERENCE_ALLOW_FAKE_ENGINE": "1"}
    command = [sys.executable, "-m", "xinference.deploy.local", "--port", str(server.port), "--log-level", "debug"]
    with open("/dev/full", "wb") as full:
        server.process = subprocess.Popen(command, stdout=full, stderr=full, env={**os.environ, **server.environment, **own})
    await until(lambda: asyncio.to_thread(is_running, server.endpoint))
    with Client(server.endpoint) as client:
        client.launch(wait_ready=True, **MODEL)
        async with mixed_load(server.endpoint, "m", "m-1"):
            victim = client.replicas("m")[0]
            psutil.Process(victim["pid"]).kill()

            async def again() -> bool:
                return all(r["state"] == "ready" for r in client.replicas("m")) and client.replicas("m")[0]["restarts"] == 1

            await until(again)
        assert "serving" in client.logs("m", "m-0")
    assert server.stop() == 0
    assert list(server.shm.iterdir()) == []


async def test_a_wall_clock_that_jumps_changes_nothing(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(JUMPING_CLOCK)
    paths = [str(tmp_path / "clock"), *filter(None, [os.environ.get("PYTHONPATH")])]
    server.environment |= {"PYTHONPATH": os.pathsep.join(paths), "XINFERENCE_WORKER_LOST_SECONDS": "3"}
    start(server)
    with Client(server.endpoint) as client:
        client.launch(wait_ready=True, **MODEL)
        before = lives_of(client)
        seen = {event["time"] for event in client.events("m")}
        async with mixed_load(server.endpoint, "m", "m-1", {**MODEL, "model_uid": "beside"}) as load:
            while not load.kept["launch"]:
                await load.progress(("launch",))
        assert max(seen) - min(seen) > 86_400  # the clock did jump
        assert lives_of(client) == before
        assert len(client.read("/v1/workers")["data"]) == 1
        assert client.clear("m")["status"] == "cleared"
    assert server.stop() == 0
    assert list(server.shm.iterdir()) == []

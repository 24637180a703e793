"""A thousand clients that come and go at every moment of a request leave no descriptor, task, thread, block or shared memory behind."""

import asyncio
import gc
import json
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest_asyncio

from xinference.api.cluster import SupervisorClient
from xinference.api.test.fakes import serving
from xinference.core.test.clusters import Cluster, running_cluster, until

CYCLES = 1000
WARM_CYCLES = 200  # until caches, pools of connections and the allocator are as large as they get
AT_ONCE = 10
SLACK_TASKS = 4  # a heartbeat and two polls may be on their way
SLACK_FDS = 4
SLACK_BYTES = 12 * 2**20  # for all cycles: a leak of 12 KiB at each would show
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset instead of an end

BODY = json.dumps({"model": "m", "prompt": "a b c d e f " * 20, "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)


@dataclass(frozen=True)
class Holdings:
    """What this process, which is supervisor, worker and API at once, and its engines hold at rest."""

    fds: int
    tasks: int
    threads: int
    rss_bytes: int
    shm_files: int
    engine_fds: int
    engine_bytes: int

    @classmethod
    async def of(cls, cluster: Cluster) -> "Holdings":
        gc.collect()
        engines = [psutil.Process(replica["pid"]) for replica in await cluster.supervisor.list_replicas("m")]
        return cls(
            fds=len(os.listdir("/proc/self/fd")),
            tasks=len(asyncio.all_tasks()),
            threads=threading.active_count(),
            rss_bytes=psutil.Process().memory_info().rss,
            shm_files=len(cluster.files()),
            engine_fds=sum(engine.num_fds() for engine in engines),
            engine_bytes=sum(engine.memory_info().rss for engine in engines),
        )


class Visitors:
    """Clients that leave. Each way of leaving is counted."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self.ways = (self._at_once, self._in_the_head, self._after_the_head, self._before_the_first_byte, self._in_the_stream, self._half)

    async def come_and_go(self, cycles: int) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with gate:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    await self.ways[number % len(self.ways)](reader, writer)
                finally:
                    if number % 2:
                        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    writer.close()
                    await asyncio.gather(writer.wait_closed(), return_exceptions=True)

        await asyncio.gather(*(one(number) for number in range(cycles)))

    async def _at_once(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connected, and gone."""

    async def _in_the_head(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD[:40])
        await writer.drain()

    async def _after_the_head(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + BODY[:20])
        await writer.drain()

    async def _before_the_first_byte(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + BODY)
        await writer.drain()

    async def _in_the_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await reader.readuntil(b"data: ")
        await reader.readuntil(b"data: ")

    async def _half(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Sends everything, says that it sends no more, reads the beginning of the answer."""
        writer.write(HEAD + BODY)
        writer.write_eof()
        await reader.read(1)


async def state_of(uds: str) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession("http://replica", connector=aiohttp.UnixConnector(uds)) as session,
        session.get("/fake/state") as response,
    ):
        found: dict[str, Any] = await response.json()
        return found


async def at_rest(cluster: Cluster) -> None:
    """Wait until every request that its client left has ended in its engine, and the connections kept for others are closed."""
    sockets = [replica["address"] for replica in await cluster.supervisor.list_replicas("m")]

    async def idle() -> bool:
        states = [await state_of(uds) for uds in sockets]
        return all(state["running"] == state["waiting"] == state["loading"] == 0 for state in states)

    await until(idle, 5.0)


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path) as running:
        await running.launch(engine_config={"faults": {"decode_ms": 2.0}})
        yield running


async def test_a_thousand_clients_that_leave_leave_nothing(cluster: Cluster) -> None:
    async with serving(SupervisorClient(cluster.supervisor)) as server:
        visitors = Visitors(server.url)
        await visitors.come_and_go(WARM_CYCLES)
        await at_rest(cluster)
        free = [(await state_of(r["address"]))["free_blocks"] for r in await cluster.supervisor.list_replicas("m")]
        first = await Holdings.of(cluster)
        await visitors.come_and_go(CYCLES)
        await at_rest(cluster)

        async def settled() -> Holdings | None:
            now = await Holdings.of(cluster)
            return now if now.fds <= first.fds + SLACK_FDS and now.tasks <= first.tasks + SLACK_TASKS else None

        last: Holdings = await until(settled, 10.0)
        print(first, last, sep="\n")
        assert (last.threads, last.shm_files) == (first.threads, first.shm_files)
        assert last.rss_bytes - first.rss_bytes <= SLACK_BYTES
        assert last.engine_fds <= first.engine_fds + SLACK_FDS
        assert last.engine_bytes - first.engine_bytes <= SLACK_BYTES
        states = [await state_of(r["address"]) for r in await cluster.supervisor.list_replicas("m")]
        assert [state["free_blocks"] for state in states] == free == [state["num_blocks"] for state in states]
        assert sum(len(state["aborted"]) for state in states) > 0

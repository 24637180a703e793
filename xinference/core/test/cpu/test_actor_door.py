"""The ports on which the cluster's processes talk: whoever lacks the key runs nothing, crashes nothing and hangs nothing there."""

import asyncio
import os
import random
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import pytest_asyncio
from xoscar.serialization._security import pack_manifest, sign_buffers

from xinference.core.test.clusters import Cluster, running_cluster

UNSIGNED, SIGNED = 1, 2  # versions of xoscar's frames
ANSWER_SECONDS = 20.0
MAX_GROWTH_BYTES = 64 << 20
SILENT = 50
SEED = 20261203


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Supervisor and worker in this process, and the process of a replica with its engine."""
    async with running_cluster(tmp_path_factory.mktemp("door")) as found:
        await found.launch(replica=1, enable_xavier=False, xavier_cpu_cache_bytes=None)
        yield found


def doors() -> list[int]:
    """The TCP ports on which this process and all below it listen; each must be out of reach of other machines."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = [place for process in family for place in process.net_connections("tcp") if place.status == psutil.CONN_LISTEN]
    assert {place.laddr.ip for place in found} <= {"127.0.0.1", "::1"}
    return sorted({place.laddr.port for place in found})


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return open, (str(self._trace), "w")


def unsigned(trace: Path) -> bytes:
    """A frame as processes without a key send it, with code in the header, which is unpickled first."""
    header = cloudpickle.dumps([{"buf_sizes": [], "is_cuda_buffers": []}, Bomb(trace)])
    return struct.pack("<BQH", UNSIGNED, len(header), 0) + header


def signed(key: bytes, trace: Path) -> bytes:
    """The same as holders of a key send it."""
    header = cloudpickle.dumps([{"buf_sizes": [], "is_cuda_buffers": []}, Bomb(trace)])
    manifest = pack_manifest(len(header), [], [])
    prefix = struct.pack("<BQH", SIGNED, len(manifest), 0)
    macs = sign_buffers(key, (prefix, manifest)), sign_buffers(key, (prefix, manifest, header))
    return b"".join([prefix, *macs, manifest, header])


def spliced(key: bytes, trace: Path) -> bytes:
    """A manifest of somebody who has the key, before a header of somebody who has not: what a man in the middle could send."""
    harmless = signed(key, trace)
    header = cloudpickle.dumps([{"buf_sizes": [], "is_cuda_buffers": []}, Bomb(trace)])
    return harmless[: -len(header)] + header[:-1] + bytes([header[-1] ^ 1])


def garbage() -> list[bytes]:
    """What is no frame at all, or the beginning of one that claims much."""
    chance = random.Random(SEED)
    noise = [chance.randbytes(size) for size in (1, 10, 11, 12, 75, 1000, 100_000)]
    claims = [
        struct.pack("<BQH", version, size, 0) for version in (UNSIGNED, SIGNED) for size in (0, 1, 1 << 24, 1 << 40, 2**63, 2**64 - 1)
    ]
    huge_manifest = struct.pack("<BQH", SIGNED, 1 << 24, 0) + bytes(64) + bytes(1 << 20)
    return [b"", *noise, bytes(1000), b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", *claims, huge_manifest]


async def send(port: int, content: bytes) -> bytes:
    """Send something, say that no more comes, and return what is answered before the other end closes, or has had a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(content)
        await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(1):
            answer = await reader.read()
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return answer


async def healthy(cluster: Cluster) -> None:
    """Supervisor, worker and replica answer, and nothing was restarted."""
    async with asyncio.timeout(ANSWER_SECONDS):
        assert len(await cluster.supervisor.workers()) == 1
        replicas = await cluster.supervisor.list_replicas("m")
        assert [(replica["state"], replica["restarts"]) for replica in replicas] == [("ready", 0)]
        assert await cluster.supervisor.logs("m", None, 1, None)


@pytest.mark.asyncio(loop_scope="module")
async def test_code_runs_for_holders_of_the_key_alone_on_every_port(cluster: Cluster, tmp_path: Path) -> None:
    key = os.environ["XOSCAR_AUTH_KEY"].encode()
    ports = doors()
    assert len(ports) >= 2  # the main pool's and the replica's
    for port in ports:
        trace = tmp_path / str(port)
        for frame in (unsigned(trace), signed(b"wrong", trace), signed(b"", trace), signed(key[:-1], trace), spliced(key, trace)):
            await send(port, frame)
            assert not trace.exists(), (port, frame[:80])
        await healthy(cluster)
        assert not trace.exists()
        await send(port, signed(key, trace))
        assert trace.exists()  # so those above were refused for their signatures


@pytest.mark.asyncio(loop_scope="module")
async def test_garbage_and_wild_claims_crash_and_hang_nothing(cluster: Cluster) -> None:
    for port in doors():
        answers = await asyncio.gather(*(send(port, content) for content in garbage()))
        assert b"".join(answers) == b""  # nobody is told anything
    await healthy(cluster)


@pytest.mark.asyncio(loop_scope="module")
async def test_strangers_that_stay_and_say_nothing_keep_nobody_from_being_heard_and_cost_little(cluster: Cluster) -> None:
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    before = {process.pid: process.memory_info().rss for process in family}
    beginnings = [struct.pack("<BQH", SIGNED, 1 << 24, 0), struct.pack("<BQH", UNSIGNED, 1 << 40, 0), b"\x02", b""]
    writers = []
    try:
        for port in doors():
            for number in range(SILENT):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(beginnings[number % len(beginnings)])
                await writer.drain()
                writers.append(writer)
        await healthy(cluster)
        assert {
            process.pid: grown for process in family if (grown := process.memory_info().rss - before[process.pid]) > MAX_GROWTH_BYTES
        } == {}
    finally:
        for writer in writers:
            writer.close()
    await healthy(cluster)

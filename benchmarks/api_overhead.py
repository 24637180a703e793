"""What the API adds to a replica: `python -m benchmarks.api_overhead [--pairs 20]`.

A fake engine in a process of its own, the API in another, a client that only counts bytes in a third. Each pair measures both sides, in
alternating order: straight at the engine's Unix socket, and at a Unix socket of the API, so that the two differ in the API alone. The
API runs in the event loop that the server uses. Three loads:

    one      one stream at a time, an engine that costs nothing: what is added to the time to first token
    paced    32 streams, an engine that makes a token for each every 20 ms, as real ones do: is throughput kept?
    flat     32 streams, an engine that costs nothing: the most tokens a second that go through

The API's own CPU time per token is measured too; unlike the rest it hardly depends on who else uses the machine.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.report import interval, keep, median_difference, ratio_of_medians, spread
from xinference.api.app import create_app
from xinference.api.server import BACKLOG, ApiServer, server_config
from xinference.api.test.fakes import OPEN_RING, FakeCluster, model, replica
from xinference.settings import Limits, Settings

STREAMS = 32
START_SECONDS = 20.0
PROMPT = "river stone cloud garden window paper silver mountain"


@dataclass(frozen=True)
class Load:
    """A load: streams at once, tokens each, and what a step of the engine costs."""

    name: str
    streams: int
    tokens: int
    decode_ms: float


LOADS = (Load("one", 1, 8, 0.0), Load("paced", STREAMS, 50, 20.0), Load("flat", STREAMS, 200, 0.0))


@dataclass(frozen=True)
class Target:
    """Where requests go: a Unix socket."""

    uds: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.uds)


def request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def stream(target: Target, number: int, tokens: int) -> tuple[float, int]:
    """One stream, read to its end; returns seconds to the first token and the number of tokens."""
    body = {"model": "m", "prompt": f"{number} {PROMPT}", "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    begin = time.perf_counter()
    reader, writer = await target.connect()
    writer.write(request("/v1/completions", body))
    first, count, data = 0.0, 0, b""
    while more := await reader.read(1 << 16):
        data = data[-32:] + more if count else data + more
        found = more.count(b'"text":')
        if found and not first:
            first = time.perf_counter() - begin
        count += found
    writer.close()
    if b"[DONE]" not in data:
        raise RuntimeError(f"a stream ended early: {data[-200:]!r}")
    return first, count


async def run(target: Target, load: Load, number: int) -> tuple[float, float]:
    """One side of a pair; returns the median time to first token in seconds, and tokens a second."""
    begin = time.perf_counter()
    found = await asyncio.gather(*(stream(target, 1000 * number + index, load.tokens) for index in range(load.streams)))
    seconds = time.perf_counter() - begin
    return statistics.median(first for first, _ in found), sum(count for _, count in found) / seconds


async def measure(direct: Target, through: Target, load: Load, pairs: int, api: psutil.Process) -> dict[str, Any]:
    """All pairs of one load; the first one is not counted."""
    ttft: list[tuple[float, float]] = []
    rate: list[tuple[float, float]] = []
    cpu_seconds = 0.0
    for number in range(pairs + 1):
        sides: dict[bool, tuple[float, float]] = {}
        for via_api in (False, True) if number % 2 else (True, False):
            before = api.cpu_times()
            sides[via_api] = await run(through if via_api else direct, load, 2 * number + via_api)
            after = api.cpu_times()
            if via_api and number:
                cpu_seconds += after.user + after.system - before.user - before.system
        if number:
            ttft.append((sides[False][0], sides[True][0]))
            rate.append((sides[False][1], sides[True][1]))
    return {
        "streams": load.streams,
        "tokens_each": load.tokens,
        "ttft_seconds": {"engine": spread([a for a, _ in ttft]), "api": spread([b for _, b in ttft])},
        "ttft_added_seconds": interval(ttft, median_difference),
        "tokens_per_second": {"engine": spread([a for a, _ in rate]), "api": spread([b for _, b in rate])},
        "throughput_ratio": interval(rate, ratio_of_medians),
        "api_cpu_microseconds_per_token": 1e6 * cpu_seconds / (pairs * load.streams * load.tokens),
    }


@contextlib.asynccontextmanager
async def process(*arguments: str, ready: str) -> AsyncIterator[int]:
    """A Python process: its id, once it has printed a line that starts with ``ready``. Ended at the end."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            while not (line := (await child.stdout.readline()).decode()).startswith(ready):
                if not line:
                    raise RuntimeError(f"{arguments[0]} did not start")
        yield child.pid
    finally:
        child.terminate()
        await child.wait()


async def serve_api(own: str, uds: str) -> None:
    """The API's process: it listens at ``own``, and the replica of its one model at ``uds``."""
    cluster = FakeCluster()
    await cluster.put(model(), replica("m-0", uds))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(own)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    print("listening", flush=True)
    app = create_app(cluster, Settings(), Limits(), OPEN_RING)
    await ApiServer(server_config(app), app).serve([listener])


async def set_pace(direct: Target, decode_ms: float) -> None:
    reader, writer = await direct.connect()
    writer.write(request("/fake/faults", {"decode_ms": decode_ms}))
    answer = await reader.read()
    writer.close()
    if b" 200 " not in answer:
        raise RuntimeError(f"the engine refused its pace: {answer!r}")


async def main(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        uds, own = str(Path(folder) / "engine"), str(Path(folder) / "api")
        config = json.dumps({"max_num_seqs": 64, "eos_every": 0, "enable_prefix_caching": False, "num_blocks": 4096})
        options = ("--uds", uds, "--model-name", "m", "--config", config)
        engine = process("xinference.model.llm.fake.server", *options, ready="INFO xinference.fake: serving")
        async with engine, process("benchmarks.api_overhead", "--serve", own, uds, ready="listening") as pid:
            direct, through = Target(uds), Target(own)
            result: dict[str, Any] = {}
            for load in LOADS:
                await set_pace(direct, load.decode_ms)
                result[load.name] = await measure(direct, through, load, pairs, psutil.Process(pid))
                show(load, result[load.name])
    print(f"written to {keep('api_overhead', {'pairs': pairs, 'loads': result})}")


def show(load: Load, result: dict[str, Any]) -> None:
    added, ratio = result["ttft_added_seconds"], result["throughput_ratio"]
    ttft, rate = result["ttft_seconds"], result["tokens_per_second"]
    print(f"{load.name}: {load.streams} streams of {load.tokens} tokens")
    print(f"  time to first token   engine {1e3 * ttft['engine']['p50']:8.2f} ms   API {1e3 * ttft['api']['p50']:8.2f} ms   "
          f"added {1e3 * added['value']:.2f} ms (95 %: {1e3 * added['low']:.2f} to {1e3 * added['high']:.2f})")  # fmt: skip
    print(f"  tokens a second       engine {rate['engine']['p50']:8.0f}      API {rate['api']['p50']:8.0f}      "
          f"ratio {ratio['value']:.3f} (95 %: {ratio['low']:.3f} to {ratio['high']:.3f})")  # fmt: skip
    print(f"  CPU time of the API   {result['api_cpu_microseconds_per_token']:.1f} us a token", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="at least 10, or the interval says nothing")
    parser.add_argument("--serve", nargs=2, metavar=("OWN", "UDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_api(*args.serve))
    else:
        asyncio.run(main(args.pairs))

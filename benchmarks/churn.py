"""Does a server grow that never rests? `python -m benchmarks.churn --minutes 60 [--seed 1]`.

Supervisor, worker and API in this process, fake engines in theirs. A steady model with two sharing replicas is asked all the time: short
answers, streams, and clients that leave in the middle; none of those that stay may fail. Beside it, round after round, another model is
launched, asked, scaled up and down, cleared and terminated, while one of its processes (engine, keeper, pool) is killed or stopped.

After each round the load rests for a moment and everything is counted that could grow: descriptors, tasks, threads, memory of every
process that lives for the whole run, processes in all, files and bytes in shared memory. The medians of the first and the last quarter of
the rounds are compared, a few rounds of warming up left out; growth beyond the limits below makes the command fail. The result says how
long it ran.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.report import keep
from xinference.api.cluster import SupervisorClient
from xinference.api.test.fakes import serving
from xinference.core.test.clusters import Cluster, running_cluster, spec, until

WARM_ROUNDS = 3
PATIENCE_SECONDS = 300.0  # for one step of a round, on a machine that does other things as well
LEAST_ROUNDS = WARM_ROUNDS + 4  # two quarters of at least one round, and something between
WORKERS = 2  # of each kind of request
MAX_FAILURES = 20  # that are kept in words
ENDS = ("replica_failed", "replica_lost")  # of the steady model: nobody touches it, so there should be none
KINDS = ("engine", "keeper", "pool")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)
# What the last quarter may hold more than the first, at rest. Bytes are those of one process.
LIMITS = {"fds": 6, "tasks": 6, "threads": 1, "processes": 0, "shm_files": 0, "shm_bytes": 0, "bytes": 16 * 2**20}
SETTINGS: dict[str, Any] = {"worker_lost_seconds": 30.0, "restarts": 1000, "restart_window_seconds": 1.0}


@dataclass
class Load:
    """Requests to the steady model. While ``open`` is not set nothing new begins."""

    url: str
    kept: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    num_running: int = 0

    async def run(self) -> None:
        works = [self._repeat(kind) for kind in ("short", "stream", "left") for _ in range(WORKERS)]
        await asyncio.gather(*works)

    async def rest(self) -> None:
        self.open.clear()

        async def none() -> bool:
            return self.num_running == 0

        await until(none, PATIENCE_SECONDS)

    async def _repeat(self, kind: str) -> None:
        number = 0
        while True:
            await self.open.wait()
            number += 1
            self.num_running += 1
            try:
                await self._one(kind, number)
                self.kept[kind] += 1
            except (aiohttp.ClientError, OSError, RuntimeError) as error:
                self.failures.append(f"{kind} {number}: {type(error).__name__}: {error}")
            finally:
                self.num_running -= 1
            await asyncio.sleep(0.05)

    async def _one(self, kind: str, number: int) -> None:
        body = {"model": "m", "prompt": f"{kind} {number % 50} of words that repeat " * 8, "max_tokens": 8, "stream": kind != "short"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v1/completions", json={**body, "ignore_eos": True}) as response,
        ):
            if response.status != 200:
                raise RuntimeError(f"{response.status} {await response.text()}")
            if kind == "left":
                await response.content.readline()
                return
            text = await response.text()
            if kind == "stream" and not text.rstrip().endswith("data: [DONE]"):
                raise RuntimeError(f"a stream without an end: {text[-200:]}")


class Churn:
    """The other model, round after round."""

    def __init__(self, cluster: Cluster, url: str, seed: int) -> None:
        self._cluster = cluster
        self._url = url
        self._draw = random.Random(seed)
        self.done: Counter[str] = Counter()

    async def round(self, number: int) -> None:
        uid = f"churn-{number}"
        sharing = self._draw.random() < 0.7
        share: dict[str, Any] = {"enable_xavier": True} if sharing else {"enable_xavier": False, "xavier_cpu_cache_bytes": None}
        await self._cluster.supervisor.launch_model(spec(model_uid=uid, **share))
        await self._all_ready(uid, 2)
        self.done["launch"] += 1
        await self._ask(uid)
        await self._scale(uid, 3)
        await self._break(uid)
        if sharing:
            await self._cluster.supervisor.xavier_clear(uid)
            self.done["clear"] += 1
        await self._ask(uid)
        await self._scale(uid, 1)
        await self._cluster.supervisor.terminate_model(uid, 0.0)
        self.done["terminate"] += 1

    async def _ask(self, uid: str) -> None:
        async with aiohttp.ClientSession() as session:
            for number in range(6):
                body = {"model": uid, "prompt": f"{number} words " * 30, "max_tokens": 2}
                async with session.post(f"{self._url}/v1/completions", json=body) as response:
                    if response.status != 200:
                        raise RuntimeError(f"{uid}: {response.status} {await response.text()}")
                    await response.read()

    async def _scale(self, uid: str, replica: int) -> None:
        await self._cluster.supervisor.scale_model(uid, replica)
        await self._all_ready(uid, replica)
        self.done[f"scale to {replica}"] += 1

    async def _all_ready(self, uid: str, replica: int) -> None:
        async def reached() -> bool:
            found = await self._cluster.supervisor.list_replicas(uid)
            return len(found) == replica and all(one["state"] == "ready" for one in found)

        await until(reached, PATIENCE_SECONDS)

    async def _break(self, uid: str) -> None:
        """Kill or stop one process of one replica, and wait for its successor."""
        victim = self._draw.choice(await self._cluster.supervisor.list_replicas(uid))
        kind, number = self._draw.choice(KINDS), self._draw.choice(SIGNALS)
        line = [psutil.Process(victim["pid"]), *psutil.Process(victim["pid"]).parents()]
        line[KINDS.index(kind)].send_signal(number)

        async def again() -> bool:
            found = await self._cluster.supervisor.list_replicas(uid)
            return all(one["state"] == "ready" for one in found) and all(one["incarnation"] != victim["incarnation"] for one in found)

        await until(again, PATIENCE_SECONDS)
        self.done[f"{number.name} {kind}"] += 1


async def sample(cluster: Cluster) -> dict[str, dict[str, int]]:
    """What there is at rest, by process of the steady model; ``all`` is what they have in common."""
    gc.collect()
    roles = {"server": psutil.Process()}
    for replica in await cluster.supervisor.list_replicas("m"):
        line = [psutil.Process(replica["pid"]), *psutil.Process(replica["pid"]).parents()]
        roles |= {f"{kind} of {replica['replica_uid']}": line[index] for index, kind in enumerate(KINDS)}
    shm = [Path(cluster.settings.shm_dir) / name for name in cluster.files()]
    found = {
        role: {"fds": process.num_fds(), "threads": process.num_threads(), "bytes": process.memory_full_info().uss}
        for role, process in roles.items()
    }
    found["server"]["tasks"] = len(asyncio.all_tasks())
    found["server"]["threads"] = threading.active_count()
    found["all"] = {
        "processes": len(psutil.Process().children(recursive=True)),
        "shm_files": len(shm),
        "shm_bytes": sum(path.stat().st_blocks * 512 for path in shm),
    }
    return found


def growth(samples: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, float]]:
    """For each figure of each process: the medians of the first and the last quarter, and what came on top."""
    quarter = max(1, len(samples) // 4)
    table: dict[str, dict[str, float]] = {}
    for role, figures in samples[0].items():
        for name in figures:
            first = statistics.median(one[role][name] for one in samples[:quarter])
            last = statistics.median(one[role][name] for one in samples[-quarter:])
            table[f"{role}: {name}"] = {"first": first, "last": last, "more": last - first, "limit": LIMITS[name]}
    return table


async def settled(cluster: Cluster, processes: int) -> dict[str, dict[str, int]]:
    """A sample once ended processes are reaped and kept connections have timed out, or after ten seconds as it is."""
    latest: dict[str, dict[str, int]] = {}

    async def calm() -> bool:
        nonlocal latest
        before, latest = latest, await sample(cluster)
        same = (
            bool(before) and before["server"]["fds"] == latest["server"]["fds"] and before["server"]["tasks"] == latest["server"]["tasks"]
        )
        await asyncio.sleep(0.5)
        return same and latest["all"]["processes"] <= processes

    try:
        await until(calm, 10.0)
    except TimeoutError:
        print("not calm within 10 s", file=sys.stderr)
    return latest


async def run(minutes: float, seed: int) -> dict[str, Any]:
    """Churn for so many minutes; what was done, what failed, what grew."""
    samples: list[dict[str, dict[str, int]]] = []
    with tempfile.TemporaryDirectory(prefix="xinference-churn-") as folder:
        async with running_cluster(Path(folder), **SETTINGS) as cluster, serving(SupervisorClient(cluster.supervisor)) as server:  # type: ignore[arg-type]
            await cluster.launch(engine_config={"faults": {"decode_ms": 2.0}})
            load, churn = Load(server.url), Churn(cluster, server.url, seed)
            asking = asyncio.create_task(load.run())
            processes = len(psutil.Process().children(recursive=True))
            began, number = time.monotonic(), 0
            try:
                while time.monotonic() - began < minutes * 60 or number < LEAST_ROUNDS:
                    load.open.set()
                    await churn.round(number)
                    await load.rest()
                    samples.append(await settled(cluster, processes))
                    number += 1
                    server_now = samples[-1]["server"]
                    print(
                        f"{time.monotonic() - began:6.0f} s, round {number}: {json.dumps(server_now)}, {len(load.failures)} failed",
                        flush=True,
                    )
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            seconds = time.monotonic() - began
            ends = [event["message"] for event in await cluster.supervisor.events("m", 0, 0.0) if event["stage"] in ENDS]
    return {
        "command": f"python -m benchmarks.churn --minutes {minutes:g} --seed {seed}",
        "seconds": round(seconds, 1),
        "rounds": number,
        "done": dict(churn.done),
        "requests": dict(load.kept),
        "failures": load.failures[:MAX_FAILURES],
        "num_failures": len(load.failures),
        "ends_of_steady_replicas": ends,
        "growth": growth(samples[WARM_ROUNDS:]),
        "server_bytes": [one["server"]["bytes"] for one in samples],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ.pop("XINFERENCE_HOME", None)
    result = asyncio.run(run(args.minutes, args.seed))
    grown = {name: row for name, row in result["growth"].items() if row["more"] > row["limit"]}
    for name, row in result["growth"].items():
        print(f"{name:28} {row['first']:>14.0f} {row['last']:>14.0f} {row['more']:>+12.0f}  limit {row['limit']:.0f}")
    print(f"{result['rounds']} rounds in {result['seconds']:g} s: {result['done']}; requests: {result['requests']}")
    print(
        f"{result['num_failures']} requests failed {result['failures'][:5]}; ends of steady replicas: {result['ends_of_steady_replicas']}"
    )
    print(f"grown: {sorted(grown) or 'nothing'}")
    print(keep("churn", {**result, "passed": not grown and not result["failures"]}))
    return 1 if grown or result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

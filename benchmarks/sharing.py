"""What sharing gives and costs on real CPU engines: `python -m benchmarks.sharing MODEL_DIR [--pairs 12]`.

One server, one model, two launches after each other: with Xavier (time to first token of a peer hit against cold, and of a one-block peer
hit against a one-block local hit, which is what an asynchronous load costs when it moves next to nothing; hook time per step; memory), then
without (memory), each with two replicas. Pairs alternate which replica computes and which one loads, so both orders are in them.
"""

import argparse
import asyncio
import statistics
from pathlib import Path
from typing import Any

from benchmarks.report import interval, keep, median_difference, ratio_of_medians, spread
from benchmarks.served import Served, prose, server
from xinference.deploy.machine import cpu_flags
from xinference.deploy.quickstart import cpu_dtype

PORT = 18997
LONG_WORDS = 1130  # as many tokens and one, of the demonstration model
SHORT_WORDS = 45  # one full block and a remainder
CPU_CACHE_BYTES = 512 * 2**20
KV_CACHE_BYTES = 512 * 2**20
OWN_MEMORY_BYTES = 100 * 10**6


def spec(uid: str, model: Path, *, xavier: bool) -> dict[str, Any]:
    """The launch body: equal but for the switch."""
    engine = {"dtype": cpu_dtype(cpu_flags()), "kv_cache_memory_bytes": KV_CACHE_BYTES, "max_model_len": 4096}
    body: dict[str, Any] = {"model_uid": uid, "model_path": str(model), "replica": 2, "enable_xavier": xavier, "engine_config": engine}
    if xavier:
        body["xavier_cpu_cache_bytes"] = CPU_CACHE_BYTES
    return body


async def settled(served: Served, model: str) -> None:
    """Saving goes on for a moment after an answer: wait until the number of saved blocks stands still."""
    before, now = -1, 0
    while before != now:
        await asyncio.sleep(0.1)
        before, now = now, (await counters(served, model))["saves_blocks"]


async def hit_against_cold(served: Served, model: str, replicas: list[str], pairs: int, words: int) -> dict[str, Any]:
    """Each pair: a prompt nobody has seen on one replica, then the same prompt on the other.

    A repeat on the first replica, a hit in vLLM's own prefix cache, is the control: the peer's hit must give its very log probabilities.
    The cold answer cannot be the control in 16-bit numbers: a prefill cut into other chunks rounds otherwise, with or without sharing.
    """
    measured, tokens = [], {}
    for number in range(pairs + 1):
        first, second = replicas if number % 2 == 0 else reversed(replicas)
        prompt = prose(1000 * words + number, words)
        cold = await served.complete(model, prompt, replica=first)
        await settled(served, model)
        hit = await served.complete(model, prompt, replica=second)
        local = await served.complete(model, prompt, replica=first)
        if not hit.logprobs or (hit.text, hit.logprobs) != (local.text, local.logprobs):
            raise RuntimeError(f"pair {number}: a peer's hit gives {hit.logprobs}, a local one {local.logprobs}")
        if number:  # the first pair warms both engines
            measured.append((cold.ttft_seconds, hit.ttft_seconds))
        tokens = hit.extra["sources"]
    return {
        "cold_seconds": spread([a for a, _ in measured]),
        "peer_hit_seconds": spread([b for _, b in measured]),
        "ratio": interval(measured, ratio_of_medians),
        "sources_of_the_last_hit": tokens,
    }


async def null_asynchronous_load(served: Served, model: str, replicas: list[str], pairs: int) -> dict[str, Any]:
    """Each pair: one block from a peer, then the same again, which is local by then."""
    measured = []
    for number in range(pairs + 1):
        first, second = replicas if number % 2 == 0 else reversed(replicas)
        prompt = prose(77_000 + number, SHORT_WORDS)
        await served.complete(model, prompt, replica=first)
        await settled(served, model)
        loaded = await served.complete(model, prompt, replica=second)
        local = await served.complete(model, prompt, replica=second)
        if not loaded.extra["sources"]["peer_cpu"] or not local.extra["sources"]["local"]:
            raise RuntimeError(f"not what is compared: {loaded.extra} {local.extra}")
        if number:
            measured.append((local.ttft_seconds, loaded.ttft_seconds))
    return {
        "local_hit_seconds": spread([a for a, _ in measured]),
        "one_block_peer_hit_seconds": spread([b for _, b in measured]),
        "difference_seconds": interval(measured, median_difference),
    }


async def counters(served: Served, model: str) -> dict[str, int]:
    """All replicas' counters, summed."""
    status = await served.call("GET", f"/v1/models/{model}/xavier")
    names = {name for replica in status["replicas"] for name in replica["counters"]}
    return {name: sum(replica["counters"].get(name, 0) for replica in status["replicas"]) for name in names}


async def hook_time(served: Served, model: str, replicas: list[str], requests: int) -> dict[str, Any]:
    """Requests with nothing to reuse, prefill and decode: time in all hooks per step, and as a share of the wall clock."""
    before = await counters(served, model)
    answers = [await served.complete(model, prose(55_000 + n, 300), replica=replicas[n % 2], max_tokens=64) for n in range(requests)]
    after = await counters(served, model)
    steps = after["steps"] - before["steps"]
    hook_seconds = (after["hook_ns_total"] - before["hook_ns_total"]) / 1e9
    engine_seconds = sum(answer.total_seconds for answer in answers)
    return {
        "steps": steps,
        "hook_microseconds_per_step": 1e6 * hook_seconds / steps,
        "share_of_step": hook_seconds / engine_seconds,
        "step_milliseconds": 1e3 * engine_seconds / steps,
    }


async def api_added(served: Served, model: str, replicas: list[dict[str, Any]], pairs: int) -> dict[str, Any]:
    """A warm short prompt straight at the engine and through the API, in turns and in both orders."""
    replica, prompt = replicas[0], prose(99, SHORT_WORDS)

    async def once(through_api: bool) -> float:
        where = {"replica": replica["replica_uid"]} if through_api else {"uds": replica["address"].removeprefix("unix:")}
        return (await served.complete(model, prompt, **where)).ttft_seconds

    for _ in range(4):
        await once(True)
        await once(False)
    measured = []
    for number in range(pairs):
        order = (False, True) if number % 2 == 0 else (True, False)
        seen = {through: await once(through) for through in order}
        measured.append((seen[False], seen[True]))
    return {
        "engine_seconds": spread([a for a, _ in measured]),
        "api_seconds": spread([b for _, b in measured]),
        "difference_seconds": interval(measured, median_difference),
    }


async def memory(served: Served, model: str, replicas: list[dict[str, Any]]) -> dict[str, Any]:
    """Proportional set size of each replica's process tree after the same work."""
    for number in range(4):
        for replica in replicas:
            await served.complete(model, prose(31_000 + number, LONG_WORDS), replica=replica["replica_uid"], max_tokens=8)
    now = (await served.call("GET", f"/v1/models/{model}/replicas"))["data"]
    return {"pss_bytes": [served.tree_pss_bytes(replica["pid"]) for replica in now]}


async def run(model: Path, pairs: int) -> dict[str, Any]:
    """Both launches, one after the other."""
    command = f"python -m benchmarks.sharing <model> --pairs {pairs}"
    result: dict[str, Any] = {"command": command, "model": model.name, "dtype": cpu_dtype(cpu_flags())}
    async with server(PORT) as served:
        replicas = await served.launch(spec("shared", model, xavier=True))
        uids = [replica["replica_uid"] for replica in replicas]
        result["peer_hit"] = await hit_against_cold(served, "shared", uids, pairs, LONG_WORDS)
        result["null_asynchronous_load"] = await null_asynchronous_load(served, "shared", uids, pairs)
        result["hooks"] = await hook_time(served, "shared", uids, 6)
        result["api"] = await api_added(served, "shared", replicas, max(pairs, 20))
        with_xavier = await memory(served, "shared", replicas)
        await served.call("DELETE", "/v1/models/shared?drain=0")
        replicas = await served.launch(spec("alone", model, xavier=False))
        without = await memory(served, "alone", replicas)
    added = statistics.mean(with_xavier["pss_bytes"]) - statistics.mean(without["pss_bytes"])
    bound = CPU_CACHE_BYTES * 1.02 + OWN_MEMORY_BYTES
    result["memory"] = {"with_xavier": with_xavier, "without": without, "added_bytes": added, "bound_bytes": bound, "holds": added <= bound}
    return result


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=12)
    chosen = parser.parse_args()
    result = asyncio.run(run(chosen.model, chosen.pairs))
    path = keep("sharing", result)
    for name, figures in result.items():
        print(name, figures)
    print(path)


if __name__ == "__main__":
    main()

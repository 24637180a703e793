"""Two vLLM engines on one GPU share blocks through their CPU tiers, against one without any cache: `python -m benchmarks.gpu_sharing`.

Correctness, not speed: mixed requests with aborts, small KV pools (preemptions, evictions) and small tiers, under asynchronous
scheduling. Every token is compared with the engine that has neither prefix caching nor a connector. It is asked twice, in two orders, and a
fourth engine has vLLM's own prefix caching with the same small pool and no connector: what these two contradict is rounding, since kernels
round differently for other shapes of a batch, and is the measure for the replicas.

With `--invariant` all engines run vLLM's batch-invariant kernels, and any difference is an error: of a replica, or of the engines that it
is measured by, which then are no measure.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.report import keep
from xinference.model.llm.random_model import make_random_model
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.names import control_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES

BLOCK = 16
LOADED = ("peer_gpu", "gpu_tier", "cpu_tier", "peer_cpu", "remote", "handed_over")
NUM_LAYERS = 16
SMALL_POOL_BLOCKS = 400
LARGE_POOL_BLOCKS = 40_000
KV_CACHE_BYTES = 4 << 30
TIER_BYTES = 48 << 20
MAX_TOKENS = 48
CONCURRENT = 48
RECORDS = 4096
START_SECONDS = 400.0
# Compiled with CUDA graphs as vLLM does it by itself; CUDA graphs of what is not compiled; neither.
EXECUTIONS = ("compiled", "graphs", "eager")


@dataclass(frozen=True)
class Modes:
    """How the engines run: with batch-invariant kernels or not; ``execution`` is one of EXECUTIONS."""

    invariant: bool
    execution: str


@dataclass(frozen=True)
class Kind:
    """An engine to start: what the connector is told (None: no connector), the KV pool in blocks, and vLLM's own prefix caching."""

    name: str
    wire: dict[str, Any] | None
    num_blocks: int
    prefix_caching: bool


class Engine:
    """A running engine process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._log = log / f"{name}.out"
        self._process = process
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, kind: Kind, model: Path, modes: Modes, log: Path) -> "Engine":
        """Start the process. ``ready`` comes later."""
        name = kind.name
        start = {
            "execution": modes.execution,
            "model": str(model),
            "wire": kind.wire,
            "num_blocks": kind.num_blocks,
            "prefix_caching": kind.prefix_caching,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
        }
        environment = {**os.environ, "PYTHONHASHSEED": "0", "VLLM_BATCH_INVARIANT": str(int(modes.invariant))}
        with open(log / f"{name}.log", "wb") as errors:  # noqa: ASYNC230  (the child writes to it)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.gpu_engine", json.dumps(start), env=environment,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, limit=1 << 24,
            )  # fmt: skip
        return cls(name, process, log)

    def _expect(self, key: str) -> asyncio.Future[dict[str, Any]]:
        return self._waiting.setdefault(key, asyncio.get_running_loop().create_future())

    async def ready(self) -> None:
        """Until it can be asked."""
        await asyncio.wait_for(self._expect("ready"), START_SECONDS)

    async def ask(self, call: dict[str, Any]) -> dict[str, Any]:
        """One request."""
        future = self._expect(call["id"])
        self._write(call)
        return await future

    async def stats(self) -> dict[str, float]:
        """vLLM's own counters."""
        future = self._expect("stats")
        self._write({"op": "stats"})
        found: dict[str, float] = (await asyncio.wait_for(future, 30))["stats"]
        return found

    async def close(self) -> None:
        """End it in the ordinary way, or by force."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 30)
        except TimeoutError:
            self._process.kill()
        self._reader.cancel()

    def _write(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        with open(self._log, "wb", buffering=0) as log:  # noqa: ASYNC230  (a local file, a line at a time)
            async for line in self._process.stdout:
                if not line.startswith(b"@"):
                    log.write(line)
                    continue
                told = json.loads(line[1:])
                self._expect(told.get("id") or next(iter(told))).set_result(told)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RuntimeError(f"engine {self.name} ended"))


@dataclass
class Outcome:
    """How a set of answers compares with the reference."""

    requests: int = 0
    aborted: int = 0
    tokens: int = 0
    wrong_requests: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)

    def summary(self) -> dict[str, Any]:
        """The figures and five examples."""
        shown = ("requests", "aborted", "tokens", "wrong_requests")
        return {**{name: getattr(self, name) for name in shown}, "examples": self.examples[:5]}

    def note(self, call: dict[str, Any], told: dict[str, Any], reference: list[int]) -> None:
        """Compare one answer."""
        self.requests += 1
        self.aborted += told["aborted"]
        tokens = told["tokens"]
        self.tokens += len(tokens)
        if tokens != reference[: len(tokens)] or (not told["aborted"] and len(tokens) != call["max_tokens"]):
            self.wrong_requests += 1
            self.wrong.add(call["request"])
            first = next((n for n, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b), len(tokens))
            self.examples.append({"id": call["id"], "prompt_tokens": len(call["prompt"]), "first_difference": first})


def prompts(seed: int, count: int) -> list[tuple[list[int], str]]:
    """Prompts of few families, cut anywhere and continued: they share prefixes, and fork. Some are exact multiples of a block."""
    draw = random.Random(seed)
    stems = [[draw.randrange(5, 480) for _ in range(1600)] for _ in range(24)]
    made = []
    for _ in range(count):
        length = draw.choice(
            (draw.randrange(1, 1600), draw.randrange(1, 400), BLOCK * draw.randrange(1, 60), BLOCK * draw.randrange(1, 30) + 1)
        )
        tail = [draw.randrange(5, 480) for _ in range(draw.choice((0, 0, 1, BLOCK, draw.randrange(1, 100))))]
        made.append((draw.choice(stems)[:length] + tail, draw.choice(("", "", "", "salt"))))
    return made


def calls(seed: int, name: str, pool: list[tuple[list[int], str]], count: int) -> list[tuple[int, dict[str, Any]]]:
    """Requests over the pool, some of which are aborted at some stage."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        index = draw.randrange(len(pool))
        prompt, salt = pool[index]
        abort = draw.random() < 0.12
        call = {
            "id": f"{name}-{number}", "prompt": prompt, "salt": salt, "max_tokens": draw.randrange(1, MAX_TOKENS + 1),
            "request": f"{draw.getrandbits(128):032x}", "abort_after": draw.choice((0, 0, 1, 2, 8)) if abort else None,
            "abort_delay": draw.choice((0.0, 0.002, 0.01, 0.05, 0.2)),
        }  # fmt: skip
        made.append((index, call))
    return made


async def load(
    engine: Engine, wanted: list[tuple[int, dict[str, Any]]], reference: dict[int, list[int]] | None
) -> tuple[Outcome, dict[int, list[int]]]:
    """Ask all, CONCURRENT at a time. Without a reference the answers become one."""
    outcome, answers, gate = Outcome(), dict[int, list[int]](), asyncio.Semaphore(CONCURRENT)

    async def one(index: int, call: dict[str, Any]) -> None:
        async with gate:
            told = await engine.ask(call)
        if reference is not None:
            outcome.note(call, told, reference[index])
        else:
            answers[index] = told["tokens"]

    await asyncio.gather(*(one(index, call) for index, call in wanted))
    return outcome, answers


def all_of(name: str, pool: list[tuple[list[int], str]], order: list[int]) -> list[tuple[int, dict[str, Any]]]:
    """Each prompt once, to its longest answer."""
    return [
        (i, {"id": f"{name}-{i}", "prompt": pool[i][0], "salt": pool[i][1], "max_tokens": MAX_TOKENS, "request": "", "abort_after": None})
        for i in order
    ]


def origin(sources: dict[str, int]) -> str:
    """What a request's prompt was made of, by the farthest source."""
    for kind, names in (("loaded", LOADED), ("local hit", ("local",))):
        if any(sources[name] for name in names):
            return kind
    return "computed"


def books(config: XavierConfig, outcome: Outcome) -> dict[str, Any]:
    """A replica's counters, whether each of its records adds up, and how many answers differ by where the prompt came from."""
    (path,) = Path(config.shm_dir).glob(f"xinference.w.{config.replica_uid}.*.seg")
    reader = SegmentReader.open(str(path), expected_incarnation=config.incarnation)
    counters = {name: value for name, value in reader.counters().items() if value and "seconds_le" not in name}
    records, _ = reader.requests_since(0)
    finished = [entry for entry in records if entry.state == "finished"]
    differ: dict[str, dict[str, int]] = {}
    for entry in finished:
        row = differ.setdefault(origin(dict(zip(SOURCES, entry.sources, strict=False))), {"requests": 0, "wrong": 0})
        row["requests"] += 1
        row["wrong"] += entry.request.hex() in outcome.wrong
    return {
        "differ_by_origin": differ,
        "counters": counters,
        "records": len(records),
        "records_that_do_not_add_up": sum(sum(entry.sources) != entry.prompt_tokens for entry in finished),
        "sources": dict(zip(SOURCES, (sum(column) for column in zip(*(entry.sources for entry in finished), strict=True)), strict=False)),
        "header": {name: reader.header()[name] for name in ("used_places", "num_places", "leased_places") if name in reader.header()},
    }


async def run(count: int, unique: int, seed: int, pool_blocks: int, modes: Modes, logs: Path) -> dict[str, Any]:
    """Start four engines, compare, close."""
    with tempfile.TemporaryDirectory(prefix="xavier-gpu-", dir="/dev/shm") as shm, tempfile.TemporaryDirectory() as home:
        model = make_random_model(Path(home) / "model", num_layers=NUM_LAYERS)
        configs = [
            XavierConfig("w", uid, number, shm, TIER_BYTES, "random", request_ring_records=RECORDS)
            for number, uid in enumerate(("a", "b"), 1)
        ]
        peers = tuple(PeerEntry("w", config.replica_uid, config.incarnation) for config in configs)
        for config in configs:
            ControlPageWriter.create(control_path(shm, "w", config.replica_uid), ControlState(epoch=1, peers=peers))
        kinds = [Kind("plain", None, LARGE_POOL_BLOCKS, prefix_caching=False), Kind("prefix", None, pool_blocks, prefix_caching=True)]
        kinds += [Kind(config.replica_uid, config.to_wire(), pool_blocks, prefix_caching=True) for config in configs]
        began = time.monotonic()
        engines = [await Engine.start(kind, model, modes, logs) for kind in kinds]
        try:
            await asyncio.gather(*(engine.ready() for engine in engines))
            started = time.monotonic() - began
            return {"seconds_to_start": started, **await compare(engines, configs, count, unique, seed)}
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))


async def compare(engines: list[Engine], configs: list[XavierConfig], count: int, unique: int, seed: int) -> dict[str, Any]:
    """The reference first, its own repeat, then prefix caching alone, then both replicas at once."""
    plain, prefix, *shared = engines
    pool = prompts(seed, unique)
    order = list(range(unique))
    _, reference = await load(plain, all_of("first", pool, order), None)
    random.Random(seed).shuffle(order)
    itself, _ = await load(plain, all_of("again", pool, order), reference)
    print(f"plain against itself: {itself.wrong_requests} of {itself.requests} differ", flush=True)
    control, _ = await load(prefix, calls(seed + 1, prefix.name, pool, count), reference)
    print(f"prefix caching: {control.wrong_requests} of {control.requests} differ", flush=True)
    began = time.monotonic()
    outcomes = await asyncio.gather(
        *(load(engine, calls(seed + n, engine.name, pool, count), reference) for n, engine in enumerate(shared, 1))
    )
    seconds = time.monotonic() - began
    await asyncio.sleep(1.0)  # the last saves
    result: dict[str, Any] = {
        "plain_against_itself": itself.summary(),
        "prefix_caching_alone": {**control.summary(), "vllm": await prefix.stats()},
        "seconds_of_load": seconds,
        "replicas": {},
    }
    for engine, config, (outcome, _) in zip(shared, configs, outcomes, strict=True):
        result["replicas"][engine.name] = {**outcome.summary(), "vllm": await engine.stats(), **books(config, outcome)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--requests", type=int, default=1500, help="for each of the two replicas")
    parser.add_argument("--prompts", type=int, default=1000, help="different prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--invariant", action="store_true", help="batch-invariant kernels")
    parser.add_argument("--execution", choices=EXECUTIONS, default=EXECUTIONS[0])
    parser.add_argument("--pool", type=int, default=SMALL_POOL_BLOCKS, help="KV blocks of an engine that caches")
    parser.add_argument("--label", default="", help="end of the result file's name")
    parser.add_argument("--logs", type=Path, default=Path("."), help="directory of the engines' logs")
    chosen = parser.parse_args()
    modes = Modes(chosen.invariant, chosen.execution)
    result = asyncio.run(run(chosen.requests, chosen.prompts, chosen.seed, chosen.pool, modes, chosen.logs))
    kind = f"{'invariant' if chosen.invariant else 'default'}_{chosen.execution}"
    command = (
        f"python -m benchmarks.gpu_sharing --requests {chosen.requests} --prompts {chosen.prompts} --pool {chosen.pool}"
        f" --seed {chosen.seed}{' --invariant' * chosen.invariant} --execution {chosen.execution}"
    )
    path = keep(f"gpu_sharing_{version('vllm').split('+')[0]}_{kind}{chosen.label}", {"command": command, **result})
    print(json.dumps(result, indent=1))
    print(path)
    wrong = sum(replica["wrong_requests"] for replica in result["replicas"].values())
    broken = sum(replica["records_that_do_not_add_up"] for replica in result["replicas"].values())
    rounding = result["plain_against_itself"]["wrong_requests"] + result["prefix_caching_alone"]["wrong_requests"]
    if broken or (chosen.invariant and (wrong or rounding)):
        raise SystemExit(f"{wrong} answers of replicas and {rounding} without a connector differ; {broken} records do not add up")


if __name__ == "__main__":
    main()

"""What looking up, admitting and giving up blocks costs, by the number of blocks held: `python -m benchmarks.directory [--places N ...]`.

A segment of tiny places in /dev/shm is filled with chains of 512 blocks through the CPU tier, as an engine fills it, so every lookup meets
the records, hints and books of that many blocks. No bytes of blocks are copied. Times are of the calling thread, one call at a time, each
measured call with other keys than the one before, so that lines come from memory and not from the cache. Targets (SPEC G6): a prefix of 512
keys in less than 50 us, admission and eviction less than 5 us a block, whatever is held.
"""

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.report import keep
from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory.geometry import segment_geometry
from xinference.model.llm.vllm.xavier.directory.names import segment_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.store.tier import CpuTier, ReserveRequest

CHAIN_BLOCKS = 512
RUN_BLOCKS = 64
LOOKUPS = 4000
EPOCH = 1


def draw_chain(draw: random.Random, num_blocks: int) -> list[BlockKey]:
    """Keys as random as hashes."""
    return [BlockKey(draw.getrandbits(64), draw.getrandbits(64)) for _ in range(num_blocks)]


def save(tier: CpuTier, chain: Sequence[BlockKey], parent: BlockKey | None = None) -> int:
    """Take places for a run and publish it; how many blocks got in."""
    reserved = tier.reserve(ReserveRequest(parent, chain))
    for index, place in enumerate(reserved.places, reserved.first):
        tier.publish(place, chain[index], chain[index - 1] if index else parent)
    return len(reserved.places)


def timed(calls: Sequence[Callable[[], object]], blocks: int = 1) -> dict[str, float]:
    """Microseconds of each call divided by the blocks it handles. The 5th percentile is what it costs when nobody else wants the core."""
    gc.collect()
    gc.disable()
    samples = []
    for call in calls:
        started = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - started) / 1000 / blocks)
    gc.enable()
    samples.sort()
    at = {"p05": 0.05, "p50": 0.5, "p99": 0.99}
    return {**{name: samples[int(len(samples) * share)] for name, share in at.items()}, "mean": statistics.fmean(samples)}


def measure_lookups(reader: SegmentReader, chains: list[list[BlockKey]], draw: random.Random) -> dict[str, dict[str, float]]:
    """Prefixes of 512 keys: all there, half there, none there; and of 32."""
    absent = [draw_chain(draw, CHAIN_BLOCKS) for _ in range(200)]
    half = [chain[: CHAIN_BLOCKS // 2] + absent[index % 200][: CHAIN_BLOCKS // 2] for index, chain in enumerate(chains[:400])]

    def prefix(chain: list[BlockKey], stop: int, expected: int) -> Callable[[], object]:
        def call() -> None:
            if reader.longest_prefix(chain, 0, stop, EPOCH) != expected:
                raise AssertionError("a stored chain was not found")

        return call

    order = [draw.randrange(len(chains)) for _ in range(LOOKUPS)]
    return {
        "prefix_512_all": timed([prefix(chains[index], 512, 512) for index in order]),
        "prefix_512_half": timed([prefix(half[index % len(half)], 512, 256) for index in order]),
        "prefix_512_none": timed([prefix(absent[index % 200], 512, 0) for index in order]),
        "prefix_32_all": timed([prefix(chains[index], 32, 32) for index in order]),
        "find_one": timed([partial(reader.find, chains[index][index % 512], EPOCH) for index in order]),
    }


def measure_changes(tier: CpuTier, chains: list[list[BlockKey]], draw: random.Random) -> dict[str, dict[str, float]]:
    """On a full tier, where each new block pushes another out: whole cycles, and their two halves, in runs of 64 blocks."""

    def pin_and_unpin(chain: list[BlockKey]) -> None:
        tier.unpin(tier.pin(chain[:RUN_BLOCKS]))

    touched = timed([partial(tier.touch, chain) for chain in chains[-150:]], CHAIN_BLOCKS)
    pinned = timed([partial(pin_and_unpin, chain) for chain in chains[-150:]], RUN_BLOCKS)
    fresh = [draw_chain(draw, RUN_BLOCKS) for _ in range(600)]
    cycles = timed([partial(save, tier, chain) for chain in fresh[:300]], RUN_BLOCKS)
    reserved: list[tuple[list[BlockKey], list[int]]] = []

    def reserve(chain: list[BlockKey]) -> None:
        reserved.append((chain, tier.reserve(ReserveRequest(None, chain)).places))

    def publish() -> None:
        chain, places = reserved.pop()
        for index, place in enumerate(places):
            tier.publish(place, chain[index], chain[index - 1] if index else None)

    reserves: list[dict[str, float]] = []
    publishes: list[dict[str, float]] = []
    for start in range(300, 600, 10):  # few at once: what is on its way is bounded
        reserves.append(timed([partial(reserve, chain) for chain in fresh[start : start + 10]], RUN_BLOCKS))
        publishes.append(timed([publish] * 10, RUN_BLOCKS))
    return {
        "admit_and_evict": cycles,
        "reserve": {name: statistics.median(part[name] for part in reserves) for name in reserves[0]},
        "publish": {name: statistics.median(part[name] for part in publishes) for name in publishes[0]},
        "touch": touched,
        "pin_and_unpin": pinned,
    }


def measure(num_places: int, directory: str) -> dict[str, Any]:
    """All figures at one size, microseconds a call or a block; adoption in seconds."""
    draw = random.Random(num_places)
    geometry = segment_geometry(num_places, 64, 512)
    path = segment_path(directory, "bench", str(num_places), "0" * 16)
    segment = SegmentWriter.open(path, geometry, incarnation=1, epoch=EPOCH)
    tier = CpuTier.of(segment)
    chains = [draw_chain(draw, CHAIN_BLOCKS) for _ in range(num_places // CHAIN_BLOCKS)]
    filled = sum(save(tier, chain) for chain in chains)
    filled += sum(save(tier, draw_chain(draw, RUN_BLOCKS)) for _ in range((num_places - filled) // RUN_BLOCKS + 1))
    found = [chain for chain in chains if tier.prefix(chain, 0, CHAIN_BLOCKS) == CHAIN_BLOCKS]
    reader = SegmentReader.open(path, expected_incarnation=1)
    result: dict[str, Any] = {"places": num_places, "held": tier.used_blocks, "file_bytes": geometry.file_bytes}
    result["microseconds"] = {**measure_lookups(reader, found, draw), **measure_changes(tier, found, draw)}
    reader.close()
    segment.close()
    started = time.perf_counter()
    segment = SegmentWriter.open(path, geometry, incarnation=2, epoch=EPOCH)
    opened = time.perf_counter()
    tier = CpuTier.of(segment)
    entered = time.perf_counter()
    tier.clear(EPOCH + 1)
    result["seconds"] = {"adopt_records": opened - started, "rebuild_books": entered - opened, "clear": time.perf_counter() - entered}
    segment.close(unlink=True)
    return result


def print_table(results: list[dict[str, Any]]) -> None:
    """One row a figure, percentiles at each size."""
    print("microseconds".ljust(20), *(f"{result['held']:,} held: p05 / p50 / p99".rjust(34) for result in results))
    for name in results[0]["microseconds"]:
        cells = (result["microseconds"][name] for result in results)
        print(name.ljust(20), *(f"{cell['p05']:.2f} / {cell['p50']:.2f} / {cell['p99']:.2f}".rjust(34) for cell in cells))
    for name in results[0]["seconds"]:
        print(f"{name} (seconds)".ljust(20), *(f"{result['seconds'][name]:>34.3f}" for result in results))


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--places", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--pin-core", type=int, help="run on this core only")
    chosen = parser.parse_args()
    if chosen.pin_core is not None:
        os.sched_setaffinity(0, {chosen.pin_core})
    load = os.getloadavg()[0]  # of others: above 1 or so the figures are theirs as well
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="xavier-bench-") as directory:
        results = [measure(num_places, directory) for num_places in chosen.places]
    print_table(results)
    command = "python -m benchmarks.directory --places " + " ".join(map(str, chosen.places))
    print(keep("directory", {"command": command, "load_average": load, "sizes": results}))


if __name__ == "__main__":
    main()

"""What a decision about one block costs by the number of places held: `python -m benchmarks.placement [--places N ...]`.

The placement book and the doorkeeper alone, on a full book: no records, no lock, no bytes. `benchmarks.directory` measures the whole tier.
A cycle asks the doorkeeper, reserves 64 blocks by evicting as many, and commits them. Sizes take turns within each round, so that they
meet the same disturbances. Target (SPEC G6): admission and eviction below 5 us a block, whatever is held.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.report import keep, spread
from xinference.model.llm.vllm.xavier.policy.admission import Doorkeeper
from xinference.model.llm.vllm.xavier.policy.placement import DECISION_BYTES_PER_PLACE, PlacementBook

RUN_BLOCKS = 64
ROUNDS = 30
CALLS_A_ROUND = 20


class FullBook:
    """A full book whose chains are laid over all of memory, and calls on it that keep it full."""

    def __init__(self, num_places: int) -> None:
        self._draw = random.Random(num_places)
        self._book = PlacementBook(num_places)
        self._doorkeeper = Doorkeeper(num_places)
        self._chains: list[list[int]] = []
        while self._book.counts().free:
            places = self._book.reserve(None, RUN_BLOCKS).places
            for place in places:
                self._book.commit(place)
            self._chains.append(places)
        # Touched in random order, so that neighbours in the order are not neighbours in memory.
        self._draw.shuffle(self._chains)
        for chain in self._chains:
            self._book.touch(chain, reused=False)
        self._keys: list[tuple[int, int]] = []

    def draw(self) -> None:
        """New keys for the next cycle, outside the measured time."""
        self._keys = [(self._draw.getrandbits(64), self._draw.getrandbits(64)) for _ in range(RUN_BLOCKS)]

    def admit_and_evict(self) -> None:
        """Ask, note, reserve with evictions, commit."""
        num_seen = self._doorkeeper.num_seen(self._keys)
        self._doorkeeper.note(self._keys)
        got = self._book.reserve(None, RUN_BLOCKS, num_seen)
        if len(got.evicted) != RUN_BLOCKS:
            raise AssertionError(f"{got.refused}: {len(got.evicted)} evicted")
        for place in got.places:
            self._book.commit(place)

    def touch(self) -> None:
        """A hit on a stored prefix."""
        self._book.touch(self._chains[-1 - self._draw.randrange(len(self._chains) // 4)])

    def pin_and_unpin(self) -> None:
        """Hold a prefix for a load and let it go."""
        chain = self._chains[-1 - self._draw.randrange(len(self._chains) // 4)]
        for place in chain:
            self._book.pin(place)
        for place in chain:
            self._book.unpin(place)

    def clear_seconds(self) -> float:
        """Take everything out of service at once; ends the book's use here."""
        started = time.perf_counter()
        self._book.clear()
        return time.perf_counter() - started


def microseconds_a_block(call: Callable[[], None], prepare: Callable[[], None]) -> list[float]:
    """One round of calls."""
    samples = []
    for _ in range(CALLS_A_ROUND):
        prepare()
        started = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - started) / 1000 / RUN_BLOCKS)
    return samples


def measure(sizes: list[int]) -> list[dict[str, Any]]:
    """All verbs at all sizes."""
    books = {size: FullBook(size) for size in sizes}
    samples: dict[int, dict[str, list[float]]] = {size: {"admit_and_evict": [], "touch": [], "pin_and_unpin": []} for size in sizes}
    gc.collect()
    gc.disable()
    for number in range(ROUNDS):
        for size in sizes if number % 2 else reversed(sizes):
            book = books[size]
            # Hits are measured first: cycles evict the oldest chains, and the rounds together fewer than the hits avoid.
            samples[size]["touch"] += microseconds_a_block(book.touch, book.draw)
            samples[size]["pin_and_unpin"] += microseconds_a_block(book.pin_and_unpin, book.draw)
            samples[size]["admit_and_evict"] += microseconds_a_block(book.admit_and_evict, book.draw)
    gc.enable()
    return [
        {
            "places": size,
            "book_bytes": size * DECISION_BYTES_PER_PLACE,
            "microseconds_a_block": {verb: spread(values) for verb, values in samples[size].items()},
            "clear_seconds": books[size].clear_seconds(),
        }
        for size in sizes
    ]


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--places", type=int, nargs="+", default=[64_000, 256_000, 1_000_000])
    sizes = [size // RUN_BLOCKS * RUN_BLOCKS for size in parser.parse_args().places]
    results = measure(sizes)
    print(f"{'us a block, p50 (p25-p75)':<26}", *(f"{result['places']:>24,}" for result in results))
    for verb in results[0]["microseconds_a_block"]:
        cells = (result["microseconds_a_block"][verb] for result in results)
        print(f"{verb:<26}", *(f"{cell['p50']:.2f} ({cell['p25']:.2f}-{cell['p75']:.2f})".rjust(24) for cell in cells))
    print(f"{'clear, ms':<26}", *(f"{result['clear_seconds'] * 1000:>24.2f}" for result in results))
    command = "python -m benchmarks.placement --places " + " ".join(map(str, sizes))
    print(keep("placement", {"command": command, "sizes": results}))


if __name__ == "__main__":
    main()

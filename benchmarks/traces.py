"""Hit rates of the cache policies on request traces: `python -m benchmarks.traces --traces DIR`.

DIR holds `conversation_trace.jsonl` and `synthetic_trace.jsonl` of the public Mooncake release (FAST'25): a JSON object a line with
`hash_ids`, one id for each block of 512 tokens of a prompt. Requests go to the replicas in turn. Ours (the placement book with its
doorkeeper) and plain LRU get the same number of places. The views:

    isolated    each replica finds what it keeps itself
    shared      and what the others keep; the owner of a block does not know that it served another
    told        as if it did; the product does not do this
    pool        one cache with the places of all replicas

The figures depend on nothing but the traces and the code.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.report import keep
from xinference.model.llm.vllm.xavier.test.replay import BookedCache, LruCache, ReplayedCache, View, replay

TRACES = ("conversation", "synthetic")
TOKENS_PER_BLOCK = 512
MILLIONS_OF_TOKENS = (1, 4, 16)
REPLICAS = (1, 2, 4)
VIEWS: tuple[View | Literal["pool"], ...] = ("isolated", "shared", "told", "pool")
CACHES: dict[str, Callable[[int], ReplayedCache]] = {"lru": LruCache, "ours": BookedCache}


@dataclass(frozen=True)
class Case:
    """One cell of the table: a trace, a number of replicas, tokens that each of them can keep, and what they see of each other."""

    trace: str
    num_replicas: int
    cache_tokens: int
    view: View | Literal["pool"]


@dataclass(frozen=True)
class Outcome:
    """Share of prompt blocks found, in percent."""

    case: Case
    lru: float
    ours: float


def cases() -> list[Case]:
    """All cells, in the order of the table."""
    return [
        Case(trace, num_replicas, millions * 10**6, view)
        for trace in TRACES
        for num_replicas in REPLICAS
        for millions in MILLIONS_OF_TOKENS
        for view in (VIEWS[:1] if num_replicas == 1 else VIEWS)
    ]


def run(directory: Path, case: Case) -> Outcome:
    """Replay one cell with both policies."""
    with open(directory / f"{case.trace}_trace.jsonl") as lines:
        trace = [json.loads(line)["hash_ids"] for line in lines]
    num_places = case.cache_tokens // TOKENS_PER_BLOCK
    percents = {}
    for name, make in CACHES.items():
        if case.view == "pool":
            replayed = replay(trace, partial(make, num_places * case.num_replicas), 1)
        else:
            replayed = replay(trace, partial(make, num_places), case.num_replicas, case.view)
        percents[name] = replayed.hit_percent
    return Outcome(case, round(percents["lru"], 2), round(percents["ours"], 2))


def print_row(outcome: Outcome) -> None:
    """One cell."""
    case = outcome.case
    print(
        f"{case.trace:<13} {case.num_replicas:>8} {case.cache_tokens // 10**6:>6}M  {case.view:<9} "
        f"{outcome.lru:>6.2f} {outcome.ours:>6.2f} {outcome.ours - outcome.lru:>+6.2f}",
        flush=True,
    )


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="folder of the two trace files")
    parser.add_argument("--processes", type=int, default=1, help="cells replayed at once")
    chosen = parser.parse_args()
    print(f"{'trace':<13} {'replicas':>8} {'tokens':>7}  {'view':<9} {'LRU %':>6} {'ours %':>6} {'diff':>6}")
    outcomes = []
    with ProcessPoolExecutor(chosen.processes) as pool:
        for outcome in pool.map(partial(run, chosen.traces), cases()):
            print_row(outcome)
            outcomes.append(outcome)
    differences = [outcome.ours - outcome.lru for outcome in outcomes]
    summary = {
        "cells": len(outcomes),
        "cells_below_lru": sum(difference < -0.005 for difference in differences),
        "mean_difference": round(sum(differences) / len(differences), 3),
        "least_difference": round(min(differences), 2),
        "greatest_difference": round(max(differences), 2),
    }
    print(summary)
    command = "python -m benchmarks.traces --traces DIR"
    print(keep("traces", {"command": command, "summary": summary, "outcomes": [asdict(outcome) for outcome in outcomes]}))


if __name__ == "__main__":
    main()

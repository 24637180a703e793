"""Load or recompute: whether what was found is worth loading, how much of it, and whether beside the steps or within one.

A load within a step (synchronous) reads only this replica's own slab, pinned, and holds the step up; it is kept short. Everything else
runs beside the steps (asynchronous): it costs a few turns of the engine's loop, whatever its size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from xinference.model.llm.vllm.xavier.policy.rates import Rates

# Nothing but this engine's own step thread evicts from it, so bytes that were found and pinned cannot change under a copy.
CERTAIN_SOURCES = frozenset({"cpu_tier"})


class Run(NamedTuple):
    """Blocks [start, stop) of a request, found in one kind of source."""

    source: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Bounds on loads.

    Attributes:
        sync_max_blocks: most blocks of a synchronous load.
        sync_max_seconds: longest synchronous load, by its expected copy time.
        min_blocks: least blocks worth a load.
    """

    sync_max_blocks: int
    sync_max_seconds: float
    min_blocks: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to load.

    Attributes:
        kind: not at all, within the step, or beside the steps.
        stop: end of the blocks to load; they begin where the first run does. Without a load, that beginning.
        expected_seconds: how long it should take, from the start of the load.
        reason: why so, for a counter or a log line.
    """

    kind: Literal["none", "sync", "async"]
    stop: int
    expected_seconds: float
    reason: Literal["nothing_found", "too_few_blocks", "slower_than_prefill", "certain_and_short", "faster_than_prefill"]


def plan_load(found: Sequence[Run], rates: Rates, limits: LoadLimits) -> LoadPlan:
    """Choose the load that saves the most time against computing the same blocks.

    Args:
        found: runs that follow each other without a gap, in order.
        rates: what copies and prefills cost here. While the prefill rate is unknown, what is found is loaded.
        limits: bounds, from the configuration.

    Raises:
        ValueError: the runs leave a gap or overlap.
    """
    for before, after in pairwise(found):
        if before.stop != after.start:
            raise ValueError(f"runs do not follow each other: {before} and {after}")
    if not found:
        return LoadPlan("none", 0, 0.0, "nothing_found")
    start, stop = found[0].start, found[-1].stop
    if stop - start < max(1, limits.min_blocks):
        return LoadPlan("none", start, 0.0, "too_few_blocks")
    sync = _sync_plan(start, _certain_stop(found), rates, limits)
    beside = LoadPlan("async", stop, rates.copy_seconds(stop - start) + rates.null_async_seconds, "faster_than_prefill")
    if sync is not None and (sync.stop == stop or _saved_seconds(sync, start, rates) >= _saved_seconds(beside, start, rates)):
        best = sync
    else:
        best = beside
    if _saved_seconds(best, start, rates) <= 0:
        return LoadPlan("none", start, 0.0, "slower_than_prefill")
    return best


def _certain_stop(found: Sequence[Run]) -> int:
    """End of the leading blocks that lie in certain sources."""
    stop = found[0].start
    for run in found:
        if run.source not in CERTAIN_SOURCES:
            break
        stop = run.stop
    return stop


def _sync_plan(start: int, stop: int, rates: Rates, limits: LoadLimits) -> LoadPlan | None:
    """The synchronous load of all certain blocks, if it is large enough to be worth one and short enough for a step."""
    num_blocks = stop - start
    seconds = rates.copy_seconds(num_blocks)
    if num_blocks < max(1, limits.min_blocks) or num_blocks > limits.sync_max_blocks or seconds > limits.sync_max_seconds:
        return None
    return LoadPlan("sync", stop, seconds, "certain_and_short")


def _saved_seconds(plan: LoadPlan, start: int, rates: Rates) -> float:
    """Time saved against computing the same blocks. While the prefill rate is unknown, more blocks save more."""
    num_blocks = plan.stop - start
    prefill_seconds = rates.prefill_seconds(num_blocks)
    return float(num_blocks) if prefill_seconds is None else prefill_seconds - plan.expected_seconds

"""Random schedules on vLLM's real schedulers: ``python -m xinference.model.llm.vllm.xavier.test.schedules --count 20000``.

Needs vLLM, a directory in shared memory, and about 50 ms a schedule. A schedule that fails is repeated with fewer and fewer events while it
still fails; what is left is printed with its seed.
"""

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from xinference.model.llm.random_model import make_random_model
from xinference.model.llm.vllm.xavier.connector import connector
from xinference.model.llm.vllm.xavier.policy.rates import MeasuredRates
from xinference.model.llm.vllm.xavier.test.schedule_coverage import Coverage
from xinference.model.llm.vllm.xavier.test.schedule_events import Event, draw_events, draw_sizes
from xinference.model.llm.vllm.xavier.test.schedule_world import Clock, World
from xinference.model.llm.vllm.xavier.transfer.copier import Copier

SCHEDULERS = {1: "Scheduler", 2: "AsyncScheduler"}
SHRINK_RUNS = 300
# What the launcher sets too, or what no run here needs.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Failure:
    """A schedule that broke something."""

    depth: int
    seed: int
    events: Sequence[Event]
    error: BaseException

    def __str__(self) -> str:
        where = traceback.extract_tb(self.error.__traceback__)[-1]
        what = f"{type(self.error).__name__} in {where.name}, line {where.lineno}: {self.error or where.line}"
        lines = [f"{SCHEDULERS[self.depth]}, seed {self.seed}: {what}", f"  {draw_sizes(self.seed)}"]
        lines += [f"  {event.kind} {'ab'[event.replica]} {event.number}" for event in self.events]
        lines.append(f"repeat: python -m {__spec__.name if __spec__ else __name__} --depth {self.depth} --seed {self.seed} --count 1")
        return "\n".join(lines)


@contextmanager
def by_hand() -> Iterator[Clock]:
    """No thread starts, no clock runs, and what was measured decides nothing."""
    clock = Clock()
    kept = connector.time, Copier.start, MeasuredRates.observe_prefill, MeasuredRates.observe_copy
    quiet = [logging.getLogger(name) for name in ("vllm", "xinference")]
    levels = [logger.level for logger in quiet]
    connector.time = clock  # type: ignore[assignment]
    Copier.start = lambda self: None  # type: ignore[method-assign]
    MeasuredRates.observe_prefill = MeasuredRates.observe_copy = lambda self, amount, seconds: None  # type: ignore[method-assign, assignment]
    for logger in quiet:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield clock
    finally:
        connector.time, Copier.start, MeasuredRates.observe_prefill, MeasuredRates.observe_copy = kept  # type: ignore[method-assign]
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)


class Schedules:
    """Runs schedules of one scheduler.

    Args:
        directory: in shared memory; each schedule has it for itself.
        model: directory of any model.
        depth: steps in flight.
        clock: from ``by_hand``.
    """

    def __init__(self, directory: Path, model: Path, depth: int, clock: Clock) -> None:
        self._directory = directory
        self._model = model
        self._depth = depth
        self._clock = clock
        self.coverage = Coverage()
        self.num_counted = 0

    def run(self, seed: int) -> Failure | None:
        """One schedule; what it broke, with as few events as still break it."""
        events = draw_events(seed)
        error = self._try(seed, events, self.coverage)
        if error is None:
            return None
        return Failure(self._depth, seed, self._shrink(seed, events, error), error)

    def _try(self, seed: int, events: Sequence[Event], coverage: Coverage) -> BaseException | None:
        mine = Coverage()
        world = None
        try:
            world = World(self._directory, self._model, self._depth, draw_sizes(seed), self._clock, mine)
            for event in events:
                world.happen(event)
            world.finish()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # wrong bytes and wrong tokens are no Exceptions, so that nothing swallows them
            return error
        finally:
            if world is not None:
                world.close()
            for path in self._directory.iterdir():
                path.unlink()
        coverage.merge(mine)
        self.num_counted += mine.counts()
        return None

    def _shrink(self, seed: int, events: Sequence[Event], error: BaseException) -> Sequence[Event]:
        """Leave out ever smaller runs of events while the same kind of error remains."""
        left = SHRINK_RUNS
        size = len(events) // 2
        while size and left:
            start = 0
            while start < len(events) and left:
                fewer = [*events[:start], *events[start + size :]]
                left -= 1
                if type(self._try(seed, fewer, Coverage())) is type(error):
                    events = fewer
                else:
                    start += size
            size //= 2
        return events


def main(arguments: Sequence[str] | None = None) -> int:
    """Run schedules until one fails or all are done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="schedules of each scheduler that count")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--depth", type=int, choices=sorted(SCHEDULERS), help="one scheduler only: steps in flight")
    wanted = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT)
    directory = Path(tempfile.mkdtemp(prefix="xavier-schedules-", dir="/dev/shm"))
    shared = directory / "shm"
    shared.mkdir()
    failed = False
    try:
        model = make_random_model(directory / "model")
        with by_hand() as clock:
            for depth in [wanted.depth] if wanted.depth else sorted(SCHEDULERS):
                schedules = Schedules(shared, model, depth, clock)
                failed |= not _run_many(schedules, depth, wanted.seed, wanted.count)
    finally:
        shutil.rmtree(directory)
    return int(failed)


def _run_many(schedules: Schedules, depth: int, seed: int, count: int) -> bool:
    started = time.perf_counter()
    first = seed
    while schedules.num_counted < count:
        failure = schedules.run(seed)
        if failure is not None:
            print(failure)
            return False
        seed += 1
        if (seed - first) % 1000 == 0:
            print(f"{SCHEDULERS[depth]}: {schedules.num_counted} schedules, {time.perf_counter() - started:.0f} s", flush=True)
        if seed - first > 2 * count + 10:
            print("most schedules reach nothing")
            return False
    print(f"{SCHEDULERS[depth]}: {schedules.num_counted} schedules of seeds {first} to {seed - 1} in {time.perf_counter() - started:.1f} s")
    print(schedules.coverage.table())
    empty = schedules.coverage.empty(depth)
    if empty and count >= 500:
        print(f"empty: {empty}")
    return not schedules.coverage.wrongly_impossible(depth) and not (empty and count >= 500)


if __name__ == "__main__":
    sys.exit(main())

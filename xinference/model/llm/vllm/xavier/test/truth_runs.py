"""Carrying schedules out: many of them, and what to say of one that fails."""

import gc
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from xinference.model.llm.vllm.xavier.test.mini_blocks import WrongBytes
from xinference.model.llm.vllm.xavier.test.truth_coverage import Coverage
from xinference.model.llm.vllm.xavier.test.truth_events import Event, Pause
from xinference.model.llm.vllm.xavier.test.truth_replica import Killed
from xinference.model.llm.vllm.xavier.test.truth_schedule import Run, Schedule, draw
from xinference.model.llm.vllm.xavier.test.truth_world import World

GC_EVERY = 40
SHRINK_RUNS = 2000  # schedules tried to make one smaller


def run(schedule: Schedule, coverage: Coverage, directory: Path) -> None:
    """Carry a schedule out in an empty directory, and leave it empty. Whatever is not as it must be is raised."""
    world = World(directory, schedule.shapes, coverage)
    try:
        with world.processes():
            try:
                Run(world)(schedule.events)
                world.settle()
            finally:
                world.close()
    finally:
        for path in directory.iterdir():
            path.unlink()


class Failure(Exception):
    """A schedule found something.

    Args:
        schedule: as it was drawn.
        smallest: with everything left out that does not matter.
        error: what the smallest one ends with.
    """

    def __init__(self, schedule: Schedule, smallest: Schedule, error: BaseException) -> None:
        super().__init__(
            f"{type(error).__name__}: {error}\n{smallest}\n"
            f"again: python -m xinference.model.llm.vllm.xavier.test.churn --seed {schedule.seed}"
        )
        self.schedule, self.smallest, self.error = schedule, smallest, error


def failure_of(schedule: Schedule, directory: Path) -> BaseException | None:
    """What is wrong with a schedule, if anything."""
    try:
        run(schedule, Coverage(), directory)
    except (Exception, WrongBytes, Killed) as error:
        return error
    return None


def shrink(schedule: Schedule, directory: Path) -> Failure:
    """Leave out what can be left out while it still fails."""
    error = failure_of(schedule, directory)
    if error is None:
        raise ValueError(f"seed {schedule.seed} does not fail")
    smallest, tried, changed = schedule, 0, True
    while changed and tried < SHRINK_RUNS:
        changed = False
        for events in smaller(smallest.events):
            candidate = replace(smallest, events=events)
            found = failure_of(candidate, directory)
            tried += 1
            if found is not None and type(found) is type(error):
                smallest, error, changed = candidate, found, True
                break
            if tried >= SHRINK_RUNS:
                break
    return Failure(schedule, smallest, error)


def smaller(events: tuple[Event, ...]) -> Iterator[tuple[Event, ...]]:
    """The same events without some of them: large parts first, then one at a time, then what happens within one."""
    size = len(events) // 2
    while size:
        for start in range(0, len(events), size):
            yield events[:start] + events[start + size :]
        size //= 2
    for index, event in enumerate(events):
        for number, pause in enumerate(event.pauses):
            yield (*events[:index], *pause.events, *events[index + 1 :])
            rest = event.pauses[:number], event.pauses[number + 1 :]
            for inner in (*smaller(pause.events), ()):
                pauses = (*rest[0], Pause(pause.at, inner), *rest[1]) if inner else rest[0] + rest[1]
                yield (*events[:index], replace(event, pauses=pauses), *events[index + 1 :])


@contextmanager
def quiet() -> Iterator[Path]:
    """An empty directory in memory; injected failures are not logged."""
    logger = logging.getLogger("xinference")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    directory = Path(tempfile.mkdtemp(prefix="xavier-truth-", dir="/dev/shm"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        logger.setLevel(level)


def run_many(count: int, first_seed: int, coverage: Coverage, progress: Callable[[int, int], None] = lambda counted, seed: None) -> int:
    """Run schedules from this seed on until so many of them reached something; the number of those that did not.

    Raises:
        Failure: with the smallest schedule that fails alike.
    """
    counted, seed = 0, first_seed
    with quiet() as directory:
        while counted < count:
            schedule = draw(seed)
            coverage.reached = False
            try:
                run(schedule, coverage, directory)
            except (Exception, WrongBytes, Killed):
                raise shrink(schedule, directory) from None
            counted += coverage.reached
            seed += 1
            if seed % GC_EVERY == 0:
                gc.collect()
                progress(counted, seed)
    return seed - first_seed - counted

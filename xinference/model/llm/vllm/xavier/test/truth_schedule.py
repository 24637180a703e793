"""Schedules: drawn from a seed, carried out in a world, made small when they fail."""

import gc
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from xinference.model.llm.vllm.xavier.test.mini_blocks import WrongBytes
from xinference.model.llm.vllm.xavier.test.truth_coverage import Coverage
from xinference.model.llm.vllm.xavier.test.truth_replica import Killed, LastStores, Replica
from xinference.model.llm.vllm.xavier.test.truth_world import Shape, Slot, World, prompt

GC_EVERY = 40
MAX_DEPTH = 3  # events within events

# kind -> weight
KINDS = {
    "add": 24,
    "step": 40,
    "copy": 20,
    "poll": 5,
    "forget": 6,
    "abort": 3,
    "clear": 2,
    "crash": 1,
    "crash_at_a_store": 1.5,
    "stop": 0.5,
    "restart": 5,
    "no_room": 0.5,
    "unfinished": 0.5,
    "tell": 3,
    "freeze": 1,
    "thaw": 2,
    "save_fails": 1,
    "load_fails": 3,
}
# Events of one thread of one engine, which others may overtake.
THREADS = frozenset({"step", "copy", "poll"})


class Pause(NamedTuple):
    """At this stop of a thread (counted from its start) these events come first."""

    at: int
    events: "tuple[Event, ...]"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens. ``who`` and ``what`` mean what the kind makes of them, and never nothing: so any event may be left out."""

    kind: str
    who: int
    what: int
    pauses: tuple[Pause, ...] = ()

    def __str__(self) -> str:
        inner = "".join(f" [{pause.at}: {'; '.join(map(str, pause.events))}]" for pause in self.pauses)
        return f"{self.kind} {'abc'[self.who]} {self.what}{inner}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a seed means."""

    seed: int
    shapes: tuple[Shape, ...]
    events: tuple[Event, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {len(self.events)} events, replicas {[tuple(shape) for shape in self.shapes]}"]
        return "\n".join([*lines, *(f"  {event}" for event in self.events)])


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    num_replicas = rng.choice((2, 2, 3))
    shapes = tuple(
        Shape(rng.choice((9, 10, 12, 16)), rng.choice((2, 4, 6, 6, 12, 20)), rng.choice((8, 16, 32))) for _ in range(num_replicas)
    )
    focus = rng.random() < 0.5  # half of the schedules crowd one engine
    events = tuple(_draw_events(rng, num_replicas, rng.randrange(14, 30), 0, focus))
    return Schedule(seed, shapes, events)


def _draw_events(rng: random.Random, num_replicas: int, count: int, depth: int, focus: bool) -> Iterator[Event]:
    for kind in rng.choices(list(KINDS), list(KINDS.values()), k=count):
        who = 0 if focus and rng.random() < 0.5 else rng.randrange(num_replicas)
        pauses: tuple[Pause, ...] = ()
        if kind in THREADS and depth < MAX_DEPTH and rng.random() < 0.4:
            inner = tuple(_draw_events(rng, num_replicas, rng.randrange(1, 5), depth + 1, focus))
            pauses = (Pause(rng.randrange(10), inner),)
        yield Event(kind, who, rng.getrandbits(24), pauses)


class Frame:
    """One thread's turn: how often it has stopped, and what is to happen at its next stops."""

    def __init__(self, pauses: tuple[Pause, ...]) -> None:
        self.left = list(pauses)
        self.stops = 0


class Run:
    """Carries one schedule out. Any exception is a failure."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._frames: list[Frame] = []
        world.pauses = self._paused

    def __call__(self, events: tuple[Event, ...]) -> None:
        for event in events:
            slot = self._world.slots[event.who % len(self._world.slots)]
            getattr(self, f"_{event.kind}")(slot, event)
            self._world.check()

    def _paused(self, replica: Replica) -> None:
        if not self._frames:
            return
        frame = self._frames[-1]
        due = [pause for pause in frame.left if pause.at == frame.stops]
        frame.stops += 1
        for pause in due:
            frame.left.remove(pause)
            self(pause.events)

    def _turn(self, slot: Slot, event: Event, action: Callable[[Replica], None], thread: str) -> bool:
        """One thread's turn; what was to happen at stops that it did not reach happens after it."""
        replica = slot.replica
        if replica is None:
            return False
        frame = Frame(event.pauses)
        self._frames.append(frame)
        try:
            happened = replica.act(lambda: action(replica), thread)
        finally:
            self._frames.pop()
        for pause in frame.left:
            self(pause.events)
        return happened

    # ---- threads

    def _step(self, slot: Slot, event: Event) -> None:
        """One to three steps, the copier with them or not."""

        def steps(replica: Replica) -> None:
            for _ in range(1 + event.what % 3):
                replica.step()
                if event.what // 3 % 2:
                    replica.act(replica.engine.copier.run_one, "copier")

        self._turn(slot, event, steps, "step")

    def _copy(self, slot: Slot, event: Event) -> None:
        self._turn(slot, event, lambda replica: replica.engine.copier.run_one(), "copier")

    def _poll(self, slot: Slot, event: Event) -> None:
        before = self._world.starts
        if self._turn(slot, event, lambda replica: replica.poll(), "copier") and self._world.starts == before and not event.pauses:
            self._world.check_peers(slot)

    # ---- requests

    def _add(self, slot: Slot, event: Event) -> None:
        if slot.replica is None or slot.replica.step_works:
            return
        kinds = {"salt": b"s" if event.what % 7 == 0 else b"", "prompt_logprobs": event.what % 13 == 0}
        states = slot.replica.states()
        tokens, max_tokens = prompt(event.what // 128), 1 + event.what % 6
        if self._turn(slot, event, lambda _: self._world.add(slot, tokens, max_tokens, **kinds), "step"):
            self._world.coverage.note("add", states)

    def _abort(self, slot: Slot, event: Event) -> None:
        replica = slot.replica
        wanted = [] if replica is None else [request for request in replica.requests.values() if request.status != "ended"]
        if replica is not None and wanted and not replica.step_works:
            request = wanted[event.what % len(wanted)]
            self._world.coverage.note("abort", replica.states_around(request))
            self._turn(slot, event, lambda _: replica.abort(request.request_id), "step")

    def _forget(self, slot: Slot, event: Event) -> None:
        """Somebody resets the engine's own prefix cache, which it allows while no block is in use."""
        if slot.replica is not None and not slot.replica.step_works and slot.replica.idle():
            slot.replica.reset()

    # ---- the supervisor

    def _clear(self, slot: Slot, event: Event) -> None:
        for each in self._world.slots:
            self._world.note("clear", each)
        self._world.clear()

    def _tell(self, slot: Slot, event: Event) -> None:
        before = len(slot.peers)
        self._world.tell(slot, event.what % 7 | event.what // 7 % 7)
        if len(slot.peers) != before:
            self._world.note("peer_added" if len(slot.peers) > before else "peer_removed", slot)

    # ---- ends and starts

    def _crash(self, slot: Slot, event: Event) -> None:
        if slot.replica is not None:
            self._world.note("crash", slot)
            self._world.kill(slot)

    def _crash_at_a_store(self, slot: Slot, event: Event) -> None:
        """Its next stores, or those of a start that is due, are the last."""
        last = self._world.last_stores(slot, event.what % 40)
        if slot.replica is not None:
            last.watch(slot.replica.engine.state.segment)
        else:
            self._start(slot, event, last)

    def _stop(self, slot: Slot, event: Event) -> None:
        replica = slot.replica
        if replica is not None and not replica.step_works and not replica.copier_works:
            self._world.note("stop", slot)
            self._frames.append(Frame(()))
            try:
                self._world.stop(slot, unlink=event.what % 3 == 0)
            finally:
                self._frames.pop()

    def _restart(self, slot: Slot, event: Event) -> None:
        if slot.replica is None:
            self._world.note("restart", slot)
            self._start(slot, event, None)
            for each in self._world.slots if event.what % 4 else ():
                self._world.tell(each, 0xFF)

    def _start(self, slot: Slot, event: Event, last: LastStores | None) -> None:
        """Sometimes with another budget, so that the file of before is of no use."""
        if event.what % 11 == 0:
            slot.shape = slot.shape._replace(cache_blocks=3 + event.what % 5)
        self._frames.append(Frame(()))
        try:
            self._world.start(slot, last)
        except Killed:
            pass
        finally:
            self._frames.pop()

    def _no_room(self, slot: Slot, event: Event) -> None:
        """What the predecessor left was removed."""
        if slot.replica is None:
            self._world.note("no_room", slot)
            self._world.forget_file(slot)
            self._world.start_without_room(slot)

    def _unfinished(self, slot: Slot, event: Event) -> None:
        if slot.replica is None:
            self._world.leave_unfinished(slot)

    # ---- faults

    def _freeze(self, slot: Slot, event: Event) -> None:
        if slot.replica is not None:
            self._world.note("freeze", slot)
            slot.replica.frozen = True

    def _thaw(self, slot: Slot, event: Event) -> None:
        if slot.replica is not None:
            slot.replica.frozen = False

    def _save_fails(self, slot: Slot, event: Event) -> None:
        if slot.replica is not None:
            slot.replica.failing.add("save")

    def _load_fails(self, slot: Slot, event: Event) -> None:
        if slot.replica is not None:
            slot.replica.failing.add("load")


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
    changed = True
    smallest = schedule
    while changed:
        changed = False
        for events in smaller(smallest.events):
            candidate = replace(smallest, events=events)
            found = failure_of(candidate, directory)
            if found is not None and type(found) is type(error):
                smallest, error, changed = candidate, found, True
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

"""Schedules: drawn from a seed, and what each of their events does to a world."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xinference.model.llm.vllm.xavier.test.truth_events import INNER_KINDS, KINDS, STOPS, THREADS, Event, Pause, draw_opening
from xinference.model.llm.vllm.xavier.test.truth_replica import Killed, LastStores, Replica
from xinference.model.llm.vllm.xavier.test.truth_world import Shape, Slot, World, prompt

MAX_DEPTH = 3  # events within events


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
        Shape(rng.choice((9, 10, 12, 16)), rng.choice((2, 4, 6, 8, 12, 20)), rng.choice((8, 16, 32))) for _ in range(num_replicas)
    )
    focus = rng.random() < 0.5  # half of the schedules crowd one engine
    opening = draw_opening(rng, num_replicas) if rng.random() < 0.6 else _draw_warm(rng, num_replicas)
    return Schedule(seed, shapes, (*opening, *_draw_events(rng, num_replicas, rng.randrange(12, 28), 0, focus)))


def _draw_warm(rng: random.Random, num_replicas: int) -> list[Event]:
    """Tiers that hold something."""
    return [Event("warm", rng.randrange(num_replicas), rng.getrandbits(24)) for _ in range(rng.randrange(4))]


def _draw_events(rng: random.Random, num_replicas: int, count: int, depth: int, focus: bool) -> Iterator[Event]:
    kinds = INNER_KINDS if depth else KINDS
    for kind in rng.choices(list(kinds), list(kinds.values()), k=count):
        who = 0 if focus and rng.random() < 0.5 else rng.randrange(num_replicas)
        pauses: tuple[Pause, ...] = ()
        if kind in THREADS and depth < MAX_DEPTH and rng.random() < 0.5:
            inner = tuple(_draw_events(rng, num_replicas, rng.randrange(1, 5), depth + 1, focus))
            pauses = (Pause(rng.choice(STOPS), inner),)
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

    def _burst(self, slot: Slot, event: Event) -> None:
        """Requests with one prompt, at once."""
        for _ in range(2 + event.what % 2):
            self._add(slot, event)

    def _warm(self, slot: Slot, event: Event) -> None:
        """A request from arrival to end; the engine forgets it, its tier does not."""
        if slot.replica is not None:
            self._turn(slot, event, lambda _: self._world.warm(slot, prompt(event.what // 128)), "step")

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
            if event.what % 3 == 0:
                self._damage(slot, event)

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

    def _damage(self, slot: Slot, event: Event) -> None:
        """A record of a file without an owner is torn."""
        if slot.replica is None:
            self._world.tear(slot, event.what)

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

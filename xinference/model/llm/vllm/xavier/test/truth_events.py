"""The events that schedules consist of, and openings: engines brought into states that chance rarely makes."""

import random
from dataclasses import dataclass
from typing import NamedTuple

# kind -> weight
KINDS = {
    "add": 18,
    "burst": 6,
    "warm": 2,
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
    "damage": 1,
    "tell": 3,
    "freeze": 1,
    "thaw": 2,
    "save_fails": 1,
    "load_fails": 3,
}
# While a thread is stopped, clears and those who hear of them matter more.
INNER_KINDS = KINDS | {"poll": 14, "clear": 5, "abort": 5, "forget": 2, "warm": 8}
# At which stop of a thread others go on: most turns have few.
STOPS = (0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10)
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


# Added to an opening, on the engine that it is about; what they need was warmed before.
PIECES = ("taint", "taint", "own", "fresh", "again", "leave", "late", "clear", "renew", "follow", "die", "grow", "overwrite")
COPYING = frozenset({"load_copying", "save_copying"})
OPENINGS = {
    "load_queued": 2,
    "load_copying": 5,
    "load_ended": 1,
    "ending": 3,
    "following": 3,
    "preempted": 3,
    "save_copying": 4,
    "frozen": 1,
}


class Opening:
    """One engine in some state, and what then happens to it.

    Args:
        rng: chance.
        keeper: a peer that keeps a prompt.
        who: the engine.
    """

    def __init__(self, rng: random.Random, keeper: int, who: int) -> None:
        self._rng, self._keeper, self._who = rng, keeper, who
        family = rng.randrange(2)
        # Numbers of prompts, see ``prompt``: what the peer keeps; and of the other family, a short one in the own tier, and a longer one.
        self._kept = family + 2 * rng.randrange(8, 20)
        self._short, self._long = (1 - family) + 2 * rng.randrange(7, 12), (1 - family) + 2 * 19

    def draw(self) -> list[Event]:
        """The events."""
        rng = self._rng
        state = rng.choices(list(OPENINGS), list(OPENINGS.values()))[0]
        events = [Event("warm", self._keeper, self._kept * 128), self._do("warm", self._short * 128)]
        if state == "preempted":
            events += [self._add(number) for number in (self._kept, self._long, self._long + 40 * 5)]
            events += [self._do("step", 5)] * rng.randrange(2, 6)
        elif state == "frozen":
            events.append(self._do("freeze"))
        for _ in range(rng.choice((0, 0, 1, 2))):
            events += self._piece()
        if state != "save_copying" and state != "preempted":
            events += self._piece_of("follow")
        then = self._then()
        if state in COPYING:
            stops = (0, 0, 0, 0, 1) if state == "load_copying" else (0, 1, 1, 1, 2)
            if rng.random() < 0.5:
                then = [event for _ in range(3) for event in self._piece()]
            if state == "save_copying":
                events += self._piece_of("fresh")
            return [*events, Event("copy", self._who, 0, (Pause(rng.choice(stops), tuple(then)),))]
        if state == "load_ended":
            events.append(self._do("copy"))
        elif state == "ending":
            events.append(self._do("abort"))
        elif state == "following":
            events += self._piece_of("follow")
        return [*events, *then]

    def _then(self) -> list[Event]:
        """Anything, each kind as often as any other; or something that leads further."""
        rng = self._rng
        chance = rng.random()
        if chance < 0.35:
            return [self._do(kind, rng.getrandbits(24)) for kind in rng.choices(list(KINDS), k=rng.randrange(1, 3))]
        if chance < 0.5:
            end = self._do(rng.choice(("crash", "stop", "crash")), 1)
            return [end, self._do(rng.choice(("no_room", "restart")), rng.getrandbits(24))]
        if chance < 0.6:
            return [self._do("tell", 0), self._do(rng.choice(("tell", "poll")), 7), self._do("tell", 7)]
        return [event for _ in range(rng.randrange(1, 4)) for event in self._piece()]

    def _do(self, kind: str, what: int = 0) -> Event:
        return Event(kind, self._who, what)

    def _add(self, number: int) -> Event:
        what = number * 128 + self._rng.randrange(128)
        while what % 7 == 0 or what % 13 == 0:  # without a salt, and it may read
            what = number * 128 + self._rng.randrange(128)
        return self._do("add", what)

    def _piece(self) -> list[Event]:
        return self._piece_of(self._rng.choice(PIECES))

    def _piece_of(self, piece: str) -> list[Event]:
        step = self._do("step", 0)
        return {
            "taint": [self._do("load_fails"), self._add(self._long), step],
            "own": [self._add(self._long), step],
            "fresh": [self._add(self._rng.getrandbits(10)), step],
            "again": [self._do("step", self._rng.randrange(6))],
            "leave": [self._do("abort", self._rng.randrange(6))],
            "late": [Event("poll", self._keeper, 0), step],
            "clear": [self._do("clear"), self._do("poll"), step],
            "renew": [self._do("clear"), self._do("poll")],
            "follow": [self._add(self._kept), step],
            "die": [self._do("crash_at_a_store", self._rng.randrange(8)), step],
            "overwrite": [Event("warm", self._keeper, self._rng.getrandbits(24)) for _ in range(3)],
            "grow": [self._do("save_fails"), self._do("step", 2)],
        }[piece]


def draw_opening(rng: random.Random, num_replicas: int) -> list[Event]:
    """The beginning of a schedule."""
    keeper, who = rng.sample(range(num_replicas), 2)
    return Opening(rng, keeper, who).draw()

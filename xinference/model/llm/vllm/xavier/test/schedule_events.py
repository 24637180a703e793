"""What a random schedule consists of, drawn from its seed.

Every event names its replica and carries a number that decides the rest, whatever came before it: so events can be left out and the others
stay what they are.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

# What is drawn, and how often relative to the others.
WEIGHTS = {
    "dispatch": 28,
    "outcome": 20,
    "copy": 12,
    "ask": 14,
    "ask_long": 5,
    "run": 5,
    "steps": 5,
    "brink": 2,
    "forget": 6,
    "abort": 6,
    "poll": 3,
    "fail_load": 4,
    "fail_save": 1,
    "during_load": 6,
    "during_save": 2,
    "clear": 1,
    "crash": 1,
    "restart": 1,
}


class Event(NamedTuple):
    """One thing that happens."""

    kind: str
    replica: int
    number: int


@dataclass(frozen=True)
class Sizes:
    """How small everything is."""

    num_blocks: int
    cache_blocks: int
    budget: int
    batch_blocks: int
    share: float


def draw_sizes(seed: int) -> Sizes:
    """The replicas of a schedule."""
    rng = random.Random(f"sizes {seed}")
    return Sizes(rng.randint(9, 13), rng.randint(2, 12), rng.choice((32, 64, 128)), rng.choice((1, 2, 64)), rng.choice((0.25, 0.5, 1.0)))


def draw_events(seed: int) -> list[Event]:
    """The events of a schedule."""
    rng = random.Random(f"events {seed}")
    kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=rng.randint(20, 60))
    return _prelude(rng) + [Event(kind, rng.randrange(2), rng.getrandbits(32)) for kind in kinds]


def _prelude(rng: random.Random) -> list[Event]:
    """One replica computes a prompt; often the other is asked for the same at once, twice, with little room left for the load."""
    prompt, other = rng.getrandbits(32), rng.getrandbits(32)
    events = [Event("ask", 0, prompt), Event("ask", 0, other), Event("run", 0, 39)]
    if rng.random() < 0.25:
        return events + _staggered(rng, prompt, other)
    tight = rng.random() < 0.5
    if tight:
        events += [Event("ask_long", 1, rng.getrandbits(32)), Event("ask_long", 1, rng.getrandbits(32)), Event("run", 1, 3)]
    if tight or rng.random() < 0.6:
        events += [Event("ask", 1, number) for number in rng.choice(((prompt,), (prompt, prompt), (prompt, other, prompt)))]
        events += [Event("fail_load", 1, 0)] * (rng.random() < 0.3) + [Event("dispatch", 1, 0)]
    if tight:
        kinds = rng.choice((("copy", "steps"), ("copy", "dispatch"), ("abort", "steps"), ("steps",), ("copy", "ask", "steps")))
        events += [Event(kind, 1, rng.getrandbits(32)) for kind in ("brink", *kinds)]
    return events


def _staggered(rng: random.Random, prompt: int, other: int) -> list[Event]:
    """Two loads, one of which has ended when the other one fails, and a client that leaves between the two reports."""
    first = [("ask", prompt), ("dispatch", 0), ("copy", 0), ("dispatch", 0), ("fail_load", 0), ("ask", other)]
    turns = [("dispatch", 0)] * rng.randint(1, 2)
    last = [("copy", 0), ("outcome", 0), (rng.choice(("abort", "abort", "outcome", "dispatch")), rng.getrandbits(32))]
    return [Event(kind, 1, number) for kind, number in (*first, *turns, *last)]

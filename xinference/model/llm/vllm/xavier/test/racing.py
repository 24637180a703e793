"""Processes that own or read a segment at full speed, for tests of what happens between them.

Run as ``python -m <this module> ROLE PATH ...``. Blocks are made of their key, so any wrong byte shows. A role prints one line of JSON
when it is ready or done. The rules that a role can be told to break are those of directory/records.py.
"""

import json
import random
import sys
import time
from collections.abc import Callable

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory.geometry import SegmentGeometry
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.store.tier import CpuTier, ReserveRequest
from xinference.model.llm.vllm.xavier.test.segments import content, keys, small

PLACE_BYTES = 16384
NUM_PLACES = 12
NUM_KEYS = 18
EPOCH = 1
KEYS = keys(range(NUM_KEYS))
CONTENT = {key: content(key, PLACE_BYTES) for key in KEYS}
# Four chains of six blocks for owners that run a whole tier.
CHAINS = [keys(range(100 * chain, 100 * chain + 6)) for chain in range(1, 5)]
CHAIN_CONTENT = {key: content(key, PLACE_BYTES) for chain in CHAINS for key in chain}


def geometry() -> SegmentGeometry:
    """The geometry that all roles use."""
    return small(NUM_PLACES, PLACE_BYTES, request_records=4)


def say(**values: object) -> None:
    """One line for the test that started this process."""
    print(json.dumps(values), flush=True)


class Writer:
    """An owner that replaces the blocks in its places as fast as it can."""

    def __init__(self, path: str) -> None:
        self.segment = SegmentWriter.open(path, geometry(), incarnation=random.getrandbits(63) + 1, epoch=EPOCH)
        self.slab = self.segment.slab_view()

    def write(self, place: int, key: BlockKey) -> None:
        self.slab[place * PLACE_BYTES : (place + 1) * PLACE_BYTES] = CONTENT[key]

    def by_the_rules(self, place: int, key: BlockKey) -> None:
        self.segment.invalidate(place)
        self.write(place, key)
        self.segment.publish(place, key, None)

    def withdraw_late(self, place: int, key: BlockKey) -> None:
        self.write(place, key)
        self.segment.invalidate(place)
        self.segment.publish(place, key, None)

    def publish_early(self, place: int, key: BlockKey) -> None:
        self.segment.invalidate(place)
        self.segment.publish(place, key, None)
        self.write(place, key)

    def keep_generation(self, place: int, key: BlockKey) -> None:
        table = self.segment._table
        old = table.record(place)
        if old is not None:
            table.drop_hint(place, old.key.k0)
        self.segment._published[place] = 0
        self.write(place, key)
        self.segment.publish(place, key, None)

    def run(self, replace: Callable[[int, BlockKey], None]) -> None:
        """Until killed. Keys stay unique: a key that is somewhere else is left alone."""
        say(ready=True)
        while True:
            place, key = random.randrange(NUM_PLACES), random.choice(KEYS)
            if self.segment.place_of(key) is None and self.segment.has_room(key):
                replace(place, key)


def read(path: str, rule: str, seconds: float, enough: int) -> None:
    """Read blocks until enough were accepted and some were refused, one was wrong, or the time is over."""
    reader = SegmentReader.open(path, expected_incarnation=None)
    slab = reader.slab_view()
    accepted = caught = 0
    deadline = time.monotonic() + seconds
    say(ready=True)
    while time.monotonic() < deadline and not (accepted >= enough and caught):
        key = random.choice(KEYS)
        found = reader.find(key, EPOCH)
        if found is None:
            continue
        early = reader.still(*found)
        raw = bytes(slab[found.place * PLACE_BYTES : (found.place + 1) * PLACE_BYTES])
        good = {"by_the_rules": reader.still(*found), "look_once": True, "look_before": early}[rule]
        if not good:
            caught += 1
        elif raw == CONTENT[key]:
            accepted += 1
        else:
            say(accepted=accepted, caught=caught, wrong=1)
            return
    say(accepted=accepted, caught=caught, wrong=0)


def run_tier(path: str) -> None:
    """An owner with a whole tier that saves, gives up and clears until it is killed. First it looks at what it adopted."""
    segment = SegmentWriter.open(path, geometry(), incarnation=random.getrandbits(63) + 1, epoch=EPOCH)
    num_adopted = len(segment.adopted)
    tier = CpuTier.of(segment)
    tier.check()
    slab = segment.slab_view()
    wrong = 0
    for key, expected in CHAIN_CONTENT.items():
        place = segment.place_of(key)
        wrong += place is not None and slab[place * PLACE_BYTES : (place + 1) * PLACE_BYTES] != expected
    say(ready=True, adopted=num_adopted, kept=tier.used_blocks, wrong=wrong)
    while True:
        chain = random.choice(CHAINS)
        tier.touch(chain, reused=random.random() < 0.5)
        reserved = tier.reserve(ReserveRequest(None, chain))
        for index, place in enumerate(reserved.places, reserved.first):
            slab[place * PLACE_BYTES : (place + 1) * PLACE_BYTES] = CHAIN_CONTENT[chain[index]]
            tier.publish(place, chain[index], chain[index - 1] if index else None)


def hold(path: str) -> None:
    """Own the segment and wait."""
    segment = SegmentWriter.open(path, geometry(), incarnation=1, epoch=EPOCH)
    say(ready=True, adopted=len(segment.adopted))
    sys.stdin.read()


def main(role: str, path: str, *rest: str) -> None:
    """Play a role."""
    if role == "write":
        writer = Writer(path)
        writer.run(getattr(writer, rest[0]))
    elif role == "read":
        read(path, rest[0], float(rest[1]), int(rest[2]))
    elif role == "tier":
        run_tier(path)
    else:
        hold(path)


if __name__ == "__main__":
    main(*sys.argv[1:])

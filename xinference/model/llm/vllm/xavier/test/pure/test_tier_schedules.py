"""Random schedules of everything that can happen to a CPU tier, with its books checked after every step.

Beside the tier runs a model that knows which block's bytes each place should hold. Copies take time here: a reserved place is filled and
published, or given back, whenever the schedule says so, in the order in which places were handed out, as one copying thread does.
"""

import shutil
import tempfile
from collections import deque
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory.geometry import segment_geometry
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.store.tier import CpuTier, ReserveRequest
from xinference.model.llm.vllm.xavier.test.segments import content, key, open_segment

NUM_CHAINS, CHAIN_BLOCKS = 4, 6
# Chains that share their first two blocks pairwise, as prompts with a common beginning do.
CHAINS = [[key(10 * (chain // 2) + i if i < 2 else 100 * (chain + 1) + i) for i in range(CHAIN_BLOCKS)] for chain in range(NUM_CHAINS)]


class Filling(NamedTuple):
    place: int
    key: BlockKey
    parent: BlockKey | None
    epoch: int


class Copied(NamedTuple):
    """A reader in the middle of a validated read."""

    key: BlockKey
    epoch: int
    place: int
    generation: int
    raw: bytes


class TierSchedules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.epoch, self.incarnation = 1, 1
        self.filling: deque[Filling] = deque()
        self.pins: list[list[int]] = []
        self.copied: Copied | None = None

    @initialize(num_places=st.integers(1, 9))
    def start(self, num_places: int) -> None:
        self.geometry = segment_geometry(num_places, 64, 4)
        self.open()
        self.reader = SegmentReader.open(self.segment.path, expected_incarnation=1)

    def open(self) -> None:
        self.segment = open_segment(self.directory, self.geometry, incarnation=self.incarnation, epoch=self.epoch)
        self.tier = CpuTier.of(self.segment)

    @rule(
        chain=st.integers(0, NUM_CHAINS - 1),
        start=st.integers(0, CHAIN_BLOCKS - 1),
        count=st.integers(1, CHAIN_BLOCKS),
        fragment=st.booleans(),
    )
    def reserve(self, chain: int, start: int, count: int, fragment: bool) -> None:
        blocks = CHAINS[chain]
        parent = blocks[start - 1] if start and not fragment else None
        wanted = blocks[start : start + count]
        reserved = self.tier.reserve(ReserveRequest(parent, wanted))
        assert not {filling.place for filling in self.filling} & set(reserved.places)
        assert not {place for places in self.pins for place in places} & set(reserved.places)
        for index, place in enumerate(reserved.places, reserved.first):
            before = wanted[index - 1] if index else parent
            self.filling.append(Filling(place, wanted[index], before, self.epoch))
            self.write(place, key(9999))  # what was there before is overwritten from now on
        if reserved.refused is None:
            assert reserved.end == len(wanted) or reserved.places

    def write(self, place: int, block: BlockKey) -> None:
        with self.segment.slab_view() as slab:
            slab[place * 64 : place * 64 + 64] = content(block, 64)

    @precondition(lambda self: self.filling)
    @rule()
    def publish(self) -> None:
        filling = self.filling.popleft()
        self.write(filling.place, filling.key)
        published = self.tier.publish(filling.place, filling.key, filling.parent)
        assert published <= (filling.epoch == self.epoch)
        assert (self.segment.place_of(filling.key) == filling.place) == published

    @precondition(lambda self: self.filling)
    @rule()
    def give_back(self) -> None:
        self.tier.give_back(self.filling.popleft().place)

    @rule(chain=st.integers(0, NUM_CHAINS - 1), count=st.integers(1, CHAIN_BLOCKS))
    def pin(self, chain: int, count: int) -> None:
        places = self.tier.pin(CHAINS[chain][:count])
        for place, block in zip(places, CHAINS[chain], strict=False):
            assert bytes(self.segment.slab_view()[place * 64 : place * 64 + 64]) == content(block, 64)
        self.pins.append(places)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.tier.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @rule(chain=st.integers(0, NUM_CHAINS - 1), count=st.integers(1, CHAIN_BLOCKS), reused=st.booleans())
    def touch(self, chain: int, count: int, reused: bool) -> None:
        self.tier.touch(CHAINS[chain][:count], reused=reused)

    @rule()
    def clear(self) -> None:
        self.epoch += 1
        used = self.tier.used_bytes
        freed = self.tier.clear(self.epoch)
        assert self.tier.used_bytes == used - freed
        assert all(self.tier.prefix(chain, 0, CHAIN_BLOCKS) == 0 for chain in CHAINS)

    @rule()
    def die_and_be_adopted(self) -> None:
        """What was being filled stays half written; pins die with their process."""
        if self.filling:
            self.write(self.filling[0].place, key(9998))
        stored = [chain[: self.tier.prefix(chain, 0, CHAIN_BLOCKS)] for chain in CHAINS]
        self.segment.close()
        self.filling.clear()
        self.pins.clear()
        self.incarnation += 1
        self.open()
        assert [chain[: self.tier.prefix(chain, 0, CHAIN_BLOCKS)] for chain in CHAINS] == stored

    @rule(chain=st.integers(0, NUM_CHAINS - 1), index=st.integers(0, CHAIN_BLOCKS - 1))
    def begin_to_read(self, chain: int, index: int) -> None:
        block = CHAINS[chain][index]
        found = self.reader.find(block, self.epoch)
        if found is not None:
            raw = bytes(self.reader.slab_view()[found.place * 64 : found.place * 64 + 64])
            self.copied = Copied(block, self.epoch, found.place, found.generation, raw)

    @precondition(lambda self: self.copied)
    @rule()
    def finish_reading(self) -> None:
        copied, self.copied = self.copied, None
        assert copied is not None
        now = bytes(self.reader.slab_view()[copied.place * 64 : copied.place * 64 + 64])
        if self.reader.still(copied.place, copied.generation):
            assert copied.raw == now == content(copied.key, 64)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.check()
        assert self.tier.used_blocks <= self.geometry.num_places
        if not self.filling and not self.pins:
            found = {block for chain in CHAINS for block in chain if self.segment.place_of(block) is not None}
            assert self.tier.used_blocks == len(found), "a place is neither free nor findable although nobody fills or reads it"

    @invariant()
    def everything_findable_holds_its_own_bytes(self) -> None:
        if not hasattr(self, "tier"):
            return
        slab = self.segment.slab_view()
        for chain in CHAINS:
            for block in chain:
                place = self.segment.place_of(block)
                assert place is None or bytes(slab[place * 64 : place * 64 + 64]) == content(block, 64)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            while self.filling:
                self.give_back()
            while self.pins:
                self.tier.unpin(self.pins.pop())
            self.tier.clear(self.epoch + 1)
            self.tier.check()
            assert self.tier.used_blocks == 0
            self.reader.close()
            self.segment.close()
        shutil.rmtree(self.directory)


TestTierSchedules = TierSchedules.TestCase
TestTierSchedules.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)

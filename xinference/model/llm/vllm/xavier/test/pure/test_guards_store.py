"""Guards of the CPU tier that nothing else here would miss: each test is red without one of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.errors import BookImbalance
from xinference.model.llm.vllm.xavier.store.tier import CpuTier, ReserveRequest
from xinference.model.llm.vllm.xavier.test.pure.test_tier import CHAIN, make, save


def test_all_that_a_refusal_leaves_out_is_counted_also_behind_a_run_that_is_kept(tmp_path: Path) -> None:
    tier, segment = make(tmp_path, num_places=2)
    save(tier, CHAIN[4:6])  # a run of its own, whose beginning is kept elsewhere
    tier.pin(CHAIN[4:6])
    assert tier.reserve(ReserveRequest(None, CHAIN[3:8])).refused == "capacity"
    assert segment.counters.value("drops_capacity") == 5


def test_only_leading_blocks_are_pinned(tmp_path: Path) -> None:
    tier, _ = make(tmp_path)
    save(tier, CHAIN[:1])
    save(tier, CHAIN[2:3])
    assert tier.pin(CHAIN[:3]) == [0]
    tier.unpin([0])
    tier.check()


def damage_the_book(tier: CpuTier) -> None:
    tier._book._table.num_pinned += 1


def fill_what_is_stored(tier: CpuTier) -> None:
    tier._filling[CHAIN[5]] = 0
    tier._key_by_filling[0] = CHAIN[5]


def forget_a_place(tier: CpuTier) -> None:
    tier._key_by_filling.clear()


@pytest.mark.parametrize("damage", [damage_the_book, fill_what_is_stored, forget_a_place])
def test_a_tier_whose_books_were_damaged_says_so(tmp_path: Path, damage: Callable[[CpuTier], None]) -> None:
    tier, _ = make(tmp_path)
    save(tier, CHAIN[:1])
    tier.reserve(ReserveRequest(CHAIN[0], CHAIN[1:2]))
    tier.check()
    damage(tier)
    with pytest.raises(BookImbalance):
        tier.check()

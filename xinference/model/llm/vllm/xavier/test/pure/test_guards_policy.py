"""Guards of decisions that nothing else here would miss: each test is red without one of them."""

import pytest

from xinference.model.llm.vllm.xavier.errors import BookImbalance
from xinference.model.llm.vllm.xavier.policy.leaders import LoadBoard
from xinference.model.llm.vllm.xavier.policy.loading import LoadLimits, Run, plan_load
from xinference.model.llm.vllm.xavier.policy.placement import PlacementBook
from xinference.model.llm.vllm.xavier.policy.rates import Rates

NOW = 70_001.0


def test_who_leads_another_load_is_waited_for_no_more() -> None:
    board = LoadBoard(followers_max=8, patience_factor=2.0)
    board.lead(1, "a", 10.0, NOW)
    board.lead(2, "a", 10.0, NOW)
    assert board.verdict(1, "b", NOW) == "lead"
    assert board.verdict(2, "b", NOW) == "wait"


def test_too_few_certain_blocks_are_not_loaded_within_a_step_in_place_of_a_longer_load_that_is_not_worth_it() -> None:
    rates = Rates(
        copy_bytes_per_second=1e9, null_async_seconds=0.1, prefill_tokens_per_second=32_000, block_bytes=10_000, tokens_per_block=32
    )
    found = [Run("cpu_tier", 0, 2), Run("peer_cpu", 2, 4)]
    assert plan_load(found, rates, LoadLimits(64, 0.005, min_blocks=2)).kind == "sync"
    assert plan_load(found, rates, LoadLimits(64, 0.005, min_blocks=3)).kind == "none"


def test_a_stored_place_whose_parent_is_not_stored_is_found() -> None:
    book = PlacementBook(4)
    first, second = book.reserve(None, 2).places
    book.commit(first)
    table = book._table
    table.flags[first], table.flags[second] = table.flags[second], table.flags[first]
    with pytest.raises(BookImbalance, match="without its parent"):
        table.check()

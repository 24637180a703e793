"""Load or recompute, by example and over random findings."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from xinference.model.llm.vllm.xavier.policy.loading import LoadLimits, LoadPlan, Run, plan_load
from xinference.model.llm.vllm.xavier.policy.rates import Rates

LIMITS = LoadLimits(sync_max_blocks=64, sync_max_seconds=0.005, min_blocks=1)
# A block copies in 10 us and computes in 1 ms.
FAST = Rates(copy_bytes_per_second=1e9, null_async_seconds=0.003, prefill_tokens_per_second=32_000, block_bytes=10_000, tokens_per_block=32)


def rates(copy: float = 1e9, prefill: float | None = 32_000, null: float = 0.003) -> Rates:
    return Rates(copy, null, prefill, block_bytes=10_000, tokens_per_block=32)


def test_nothing_found_is_not_loaded() -> None:
    assert plan_load([], FAST, LIMITS) == LoadPlan("none", 0, 0.0, "nothing_found")


def test_a_short_run_of_the_own_slab_is_loaded_within_the_step() -> None:
    plan = plan_load([Run("cpu_tier", 2, 66)], FAST, LIMITS)
    assert (plan.kind, plan.stop, plan.reason) == ("sync", 66, "certain_and_short")
    assert plan.expected_seconds == pytest.approx(64 * 10e-6)


def test_one_block_more_is_loaded_beside_the_steps() -> None:
    plan = plan_load([Run("cpu_tier", 2, 67)], FAST, LIMITS)
    assert (plan.kind, plan.stop, plan.reason) == ("async", 67, "faster_than_prefill")
    assert plan.expected_seconds == pytest.approx(65 * 10e-6 + 0.003)


def test_a_run_that_takes_longer_than_a_step_may_wait_is_loaded_beside_the_steps() -> None:
    slow = rates(copy=64 * 10_000 / 0.0051)
    assert plan_load([Run("cpu_tier", 0, 64)], slow, LIMITS).kind == "async"
    assert plan_load([Run("cpu_tier", 0, 62)], slow, LIMITS).kind == "sync"


@pytest.mark.parametrize("source", ["peer_cpu", "peer_gpu", "remote"])
def test_what_somebody_else_may_overwrite_is_never_loaded_within_a_step(source: str) -> None:
    assert plan_load([Run(source, 0, 5)], FAST, LIMITS).kind == "async"


def test_a_long_continuation_at_a_peer_makes_the_whole_load_asynchronous() -> None:
    plan = plan_load([Run("cpu_tier", 0, 10), Run("peer_cpu", 10, 30)], FAST, LIMITS)
    assert (plan.kind, plan.stop) == ("async", 30)


def test_a_continuation_that_is_not_worth_an_asynchronous_load_is_left_out() -> None:
    plan = plan_load([Run("cpu_tier", 0, 10), Run("peer_cpu", 10, 12)], FAST, LIMITS)
    assert (plan.kind, plan.stop) == ("sync", 10)


def test_what_is_computed_faster_is_not_loaded() -> None:
    assert plan_load([Run("peer_cpu", 4, 6)], FAST, LIMITS) == LoadPlan("none", 4, 0.0, "slower_than_prefill")
    assert plan_load([Run("peer_cpu", 4, 8)], FAST, LIMITS).kind == "async"
    assert plan_load([Run("cpu_tier", 0, 2)], rates(copy=11e6), LIMITS).kind == "sync"
    slow = plan_load([Run("cpu_tier", 0, 2)], rates(copy=10e6), LoadLimits(64, 1.0, 1))
    assert (slow.kind, slow.reason) == ("none", "slower_than_prefill")


def test_while_the_prefill_rate_is_unknown_all_that_was_found_is_loaded() -> None:
    unknown = rates(copy=1.0, prefill=None)
    assert plan_load([Run("peer_cpu", 0, 1)], unknown, LIMITS).kind == "async"
    plan = plan_load([Run("cpu_tier", 0, 10), Run("peer_cpu", 10, 12)], rates(prefill=None), LIMITS)
    assert (plan.kind, plan.stop) == ("async", 12)


def test_fewer_blocks_than_the_least_are_not_loaded() -> None:
    limits = LoadLimits(64, 0.005, min_blocks=8)
    assert plan_load([Run("cpu_tier", 3, 10)], FAST, limits) == LoadPlan("none", 3, 0.0, "too_few_blocks")
    assert plan_load([Run("cpu_tier", 3, 11)], FAST, limits).kind == "sync"
    assert plan_load([Run("cpu_tier", 3, 10), Run("peer_cpu", 10, 40)], FAST, limits).kind == "async"


@pytest.mark.parametrize("second", [Run("peer_cpu", 11, 20), Run("peer_cpu", 9, 20)])
def test_runs_that_do_not_follow_each_other_are_refused(second: Run) -> None:
    with pytest.raises(ValueError, match="do not follow"):
        plan_load([Run("cpu_tier", 0, 10), second], FAST, LIMITS)


@given(
    lengths=st.lists(st.tuples(st.sampled_from(["cpu_tier", "peer_cpu"]), st.integers(1, 100)), min_size=1, max_size=6),
    start=st.integers(0, 50),
    copy=st.floats(1e5, 1e10),
    prefill=st.none() | st.floats(1.0, 1e6),
    limits=st.builds(LoadLimits, st.integers(1, 100), st.floats(1e-4, 1e-2), st.integers(1, 20)),
)
def test_a_plan_keeps_to_what_was_found_and_to_the_limits(
    lengths: list[tuple[str, int]], start: int, copy: float, prefill: float | None, limits: LoadLimits
) -> None:
    found, position = [], start
    for source, length in lengths:
        found.append(Run(source, position, position + length))
        position += length
    cost = rates(copy, prefill)
    plan = plan_load(found, cost, limits)
    num_blocks = plan.stop - start
    if plan.kind == "none":
        assert num_blocks == 0
        return
    assert limits.min_blocks <= num_blocks <= position - start
    computed = cost.prefill_seconds(num_blocks)
    assert computed is None or plan.expected_seconds < computed
    if plan.kind == "sync":
        assert all(run.source == "cpu_tier" for run in found if run.start < plan.stop)
        assert num_blocks <= limits.sync_max_blocks
        assert plan.expected_seconds <= limits.sync_max_seconds
    else:
        assert plan.stop == position

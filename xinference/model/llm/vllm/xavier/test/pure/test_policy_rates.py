"""Measured rates: what a sample is worth, and that a bad one is not for ever."""

import pytest

from xinference.model.llm.vllm.xavier.policy.rates import (
    EXPECTED_COPY_BYTES_PER_SECOND,
    NULL_ASYNC_SECONDS,
    FadingRate,
    MeasuredRates,
    Rates,
)

MIB = 1 << 20


def copy_rate(measured: MeasuredRates) -> float:
    return measured.rates(1, 1).copy_bytes_per_second


def test_before_anything_is_measured_a_copy_is_expected_and_a_prefill_unknown() -> None:
    rates = MeasuredRates().rates(4096, 32)
    assert rates.copy_bytes_per_second == pytest.approx(EXPECTED_COPY_BYTES_PER_SECOND)
    assert rates == Rates(rates.copy_bytes_per_second, NULL_ASYNC_SECONDS, None, 4096, 32)


def test_a_block_costs_its_bytes_to_copy_and_its_tokens_to_compute() -> None:
    rates = Rates(1000.0, 0.0, 50.0, block_bytes=100, tokens_per_block=10)
    assert rates.copy_seconds(3) == pytest.approx(0.3)
    assert rates.prefill_seconds(3) == pytest.approx(0.6)
    assert Rates(1000.0, 0.0, None, 100, 10).prefill_seconds(3) is None


def test_the_rate_is_that_of_the_samples() -> None:
    measured = MeasuredRates()
    for _ in range(20):
        measured.observe_copy(100 * MIB, 0.02)
        measured.observe_prefill(512, 0.25)
    rates = measured.rates(1, 1)
    assert rates.copy_bytes_per_second == pytest.approx(100 * MIB / 0.02, rel=0.05)
    assert rates.prefill_tokens_per_second == pytest.approx(2048)


def test_a_large_sample_counts_for_more_than_a_small_one() -> None:
    rate = FadingRate()
    rate.observe(1000, 1.0)
    rate.observe(1, 0.1)
    assert rate.per_second() == pytest.approx(901 / 1.0)


def test_the_latest_samples_count_most() -> None:
    rate = FadingRate()
    for _ in range(50):
        rate.observe(100, 1.0)
    for _ in range(10):
        rate.observe(300, 1.0)
    assert 200 < (rate.per_second() or 0) < 300


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1.0), (10, 0.0), (10, -1.0), (-10, 1.0)])
def test_a_sample_that_says_nothing_changes_nothing(amount: int, seconds: float) -> None:
    rate = FadingRate()
    rate.observe(amount, seconds)
    assert rate.per_second() is None


def test_a_copy_once_measured_as_slow_is_tried_again_after_some_hundred_prefills() -> None:
    measured = MeasuredRates()
    measured.observe_copy(64 * MIB, 64.0)
    assert copy_rate(measured) < 2 * MIB
    for _ in range(1500):
        measured.observe_prefill(512, 0.1)
    assert copy_rate(measured) > 0.9 * EXPECTED_COPY_BYTES_PER_SECOND


def test_prefills_do_not_outweigh_copies_that_go_on() -> None:
    measured = MeasuredRates()
    for _ in range(300):
        measured.observe_copy(16 * MIB, 0.4)
        measured.observe_prefill(512, 0.1)
    assert copy_rate(measured) == pytest.approx(40 * MIB, rel=0.05)

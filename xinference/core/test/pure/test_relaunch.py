"""When a replica is started again, and the log that survives it."""

import pytest

from xinference.core.log_ring import LogRing
from xinference.core.relaunch import GiveUp, Relaunch, RelaunchLimits, decide

LIMITS = RelaunchLimits(max_restarts=3, window_seconds=600.0, first_wait_seconds=0.5, longest_wait_seconds=30.0)


def test_the_first_end_is_followed_by_a_start_after_half_a_second() -> None:
    assert decide([1000.0], 1000.0, LIMITS) == Relaunch(0.5, 1)


def test_the_wait_doubles() -> None:
    assert decide([1000.0, 1010.0], 1010.0, LIMITS) == Relaunch(1.0, 2)
    assert decide([1000.0, 1010.0, 1020.0], 1020.0, LIMITS) == Relaunch(2.0, 3)


def test_the_wait_has_an_upper_bound() -> None:
    many = RelaunchLimits(max_restarts=100)
    assert decide([1000.0] * 50, 1000.0, many) == Relaunch(30.0, 50)


def test_too_many_ends_within_the_window_are_given_up_with_the_reason() -> None:
    decision = decide([1000.0, 1001.0, 1002.0, 1003.0], 1003.0, LIMITS)
    assert decision == GiveUp("it ended 4 times within 600 s (limit: 3 restarts)")


def test_ends_before_the_window_do_not_count() -> None:
    assert decide([100.0, 200.0, 300.0, 1003.0], 1003.0, LIMITS) == Relaunch(0.5, 1)


def test_a_limit_of_zero_never_starts_again() -> None:
    assert isinstance(decide([1000.0], 1000.0, RelaunchLimits(max_restarts=0)), GiveUp)


@pytest.mark.parametrize(
    ("tail", "after", "lines"),
    [(2, None, ["d", "e"]), (9, None, ["c", "d", "e"]), (9, 4, ["e"]), (9, 0, ["c", "d", "e"]), (0, None, []), (9, 99, [])],
)
def test_a_log_is_read_from_its_end_or_from_a_number(tail: int, after: int | None, lines: list[str]) -> None:
    ring = LogRing(3)
    ring.extend(["a", "b", "c", "d", "e"])
    assert ring.read(tail, after) == (lines, 5)


def test_a_successors_log_goes_on_with_its_predecessors_numbers() -> None:
    ring = LogRing(10, start=7)
    ring.add("x")
    assert ring.read(5, 7) == (["x"], 8)
    assert ring.read(5, 3) == (["x"], 8)


def test_a_very_long_line_is_cut() -> None:
    ring = LogRing(1)
    ring.add("x" * 10000)
    assert len(ring.read(1)[0][0]) == LogRing.MAX_LINE_CHARACTERS

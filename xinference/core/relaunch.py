"""When a replica that ended is started again, and when it is given up. Pure: a plan from the times of its ends."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RelaunchLimits:
    """``max_restarts`` within ``window_seconds``; the wait doubles from ``first_wait_seconds`` to ``longest_wait_seconds``."""

    max_restarts: int = 3
    window_seconds: float = 600.0
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 30.0


@dataclass(frozen=True)
class Relaunch:
    """Start again after ``wait_seconds``; this is attempt ``attempt`` within the window, from 1."""

    wait_seconds: float
    attempt: int


@dataclass(frozen=True)
class GiveUp:
    reason: str


def decide(ends: Sequence[float], now: float, limits: RelaunchLimits) -> Relaunch | GiveUp:
    """What to do after the newest of ``ends``.

    Args:
        ends: monotonic times at which the replica ended by itself, oldest first, the present end included.
        now: the present, same clock.
    """
    recent = [end for end in ends if now - end < limits.window_seconds]
    attempt = max(1, len(recent))
    if attempt > limits.max_restarts:
        return GiveUp(f"it ended {attempt} times within {limits.window_seconds:g} s (limit: {limits.max_restarts} restarts)")
    return Relaunch(min(limits.first_wait_seconds * 2.0 ** (attempt - 1), limits.longest_wait_seconds), attempt)

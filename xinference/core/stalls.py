"""Time in which this process did not run: stopped by a signal, or with its whole machine (a virtual machine that is moved).

Whoever measures the silence of others with a clock that went on meanwhile blames them for its own absence: after six seconds of pause every
engine would have been silent for six seconds, and all of them would be killed at once. Pure: times are arguments.
"""

STALL_SECONDS = 1.0  # lateness below this is a busy machine


def missed_seconds(began: float, now: float, expected_seconds: float) -> float:
    """How much later than expected a wait came to its end, if that is more than a busy machine explains; else 0.

    Args:
        began: when the wait began, monotonic.
        expected_seconds: the longest that it could take by its own timeout.
    """
    late = now - began - expected_seconds
    return late if late > STALL_SECONDS else 0.0

"""What stands around every hook: an error in the cache must never end the engine, and a hook's time is measured."""

import time
from collections.abc import Callable
from typing import TypeVar

from xinference.model.llm.vllm.xavier.transfer.state import TransferState

Answer = TypeVar("Answer")

FLUSH_CALLS = 32


class Guard:
    """Runs hook bodies. Used by the step thread only.

    Args:
        state: where errors are reported and sums are counted.

    Copies that a hook makes itself are no overhead of hooks: their time is counted apart. Sums are kept here and written to the segment
    now and then, since a counter in shared memory costs more than a number.
    """

    def __init__(self, state: TransferState) -> None:
        self._state = state
        self._calls = 0
        self._nanoseconds = 0
        self._copy_nanoseconds = 0

    def run(self, hook: str, body: Callable[[], Answer], on_error: Callable[[], Answer]) -> Answer:
        """The body's answer, or what ``on_error`` gives if it raises, and after the engine was closed."""
        if self._state.closed:
            return on_error()
        copied = self._state.hook_copy_ns
        started = time.perf_counter_ns()
        try:
            return body()
        except Exception as error:
            self._state.report(f"hook {hook}", error)
            return on_error()
        finally:
            self._calls += 1
            copied = self._state.hook_copy_ns - copied
            self._nanoseconds += time.perf_counter_ns() - started - copied
            self._copy_nanoseconds += copied

    def flush(self) -> None:
        """Count what was summed, once it is enough to be worth the lock."""
        if self._calls < FLUSH_CALLS:
            return
        with self._state.lock:
            self._state.count("hook_calls", self._calls)
            self._state.count("hook_ns_total", self._nanoseconds)
            self._state.count("hook_copy_ns", self._copy_nanoseconds)
        self._calls = self._nanoseconds = self._copy_nanoseconds = 0

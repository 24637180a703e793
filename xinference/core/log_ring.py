"""The last lines of a replica's log, numbered, so that a follower can ask for what is new."""

from collections import deque
from collections.abc import Sequence


class LogRing:
    """Keeps the newest ``max_lines`` lines.

    Args:
        max_lines: older lines are dropped.
        start: number of the first line; a relaunched replica goes on where its predecessor stopped, so followers keep following.
    """

    MAX_LINE_CHARACTERS = 4096

    def __init__(self, max_lines: int, start: int = 0) -> None:
        self._lines: deque[str] = deque(maxlen=max_lines)
        self.next = start

    def add(self, line: str) -> None:
        self._lines.append(line[: self.MAX_LINE_CHARACTERS])
        self.next += 1

    def extend(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.add(line)

    def read(self, tail: int, after: int | None = None) -> tuple[list[str], int]:
        """Lines, and the number to pass as ``after`` next time.

        Args:
            tail: at most this many, the newest.
            after: only lines from this number on; None for the tail of everything.
        """
        first = self.next - len(self._lines)
        skip = 0 if after is None else max(0, after - first)
        lines = list(self._lines)[skip:]
        return (lines[-tail:] if tail > 0 else []), self.next

"""What the fake scheduler asks of a KV connector, in the order in which vLLM's scheduler asks; and the connector that shares nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from xinference.model.llm.fake.request import Sequence as Request


@dataclass(frozen=True)
class Step:
    """A step about to be dispatched.

    ``scheduled`` holds (request, tokens computed after the step, new block ids) each; ``num_tokens`` are computed in it.
    """

    scheduled: Sequence[tuple[Request, int, list[int]]]
    preempted: Sequence[str]
    finished: Sequence[str]
    num_tokens: int


class Sharing(Protocol):
    """Both halves of a connector. All methods are called from the engine's loop."""

    def arrived(self, request: Request, now: float) -> None:
        """A request entered the queue."""

    def matched_tokens(self, request: Request, num_computed: int, now: float) -> tuple[int | None, bool]:
        """Tokens beyond the local prefix that can be had from elsewhere (None: ask again), and whether they are loaded asynchronously."""

    def allocated(self, request: Request, num_external: int, now: float) -> None:
        """The request has its blocks; ``num_external`` tokens of them are to be loaded."""

    def build(self, step: Step, now: float) -> None:
        """A step was scheduled. Blocks handed out in it may be overwritten after this."""

    def before_forward(self) -> None:
        """Synchronous loads happen here."""

    def after_forward(self) -> tuple[set[str], set[int]]:
        """Saves start here. Returns ended asynchronous loads (request ids) and blocks whose load failed."""

    def output(self, finished_loads: set[str], invalid_blocks: set[int], now: float) -> None:
        """The scheduler's half learns what ``after_forward`` reported."""

    def finished(self, request: Request, status: str, now: float) -> None:
        """The request ended; its blocks are released after this."""

    def close(self) -> None:
        """Drain and release everything."""


class NoSharing:
    """An engine without a connector."""

    def arrived(self, request: Request, now: float) -> None:
        pass

    def matched_tokens(self, request: Request, num_computed: int, now: float) -> tuple[int | None, bool]:
        return 0, False

    def allocated(self, request: Request, num_external: int, now: float) -> None:
        pass

    def build(self, step: Step, now: float) -> None:
        pass

    def before_forward(self) -> None:
        pass

    def after_forward(self) -> tuple[set[str], set[int]]:
        return set(), set()

    def output(self, finished_loads: set[str], invalid_blocks: set[int], now: float) -> None:
        pass

    def finished(self, request: Request, status: str, now: float) -> None:
        pass

    def close(self) -> None:
        pass

"""Do things in order; on failure or cancellation take back what was done, in reverse.

    do a -> do b -> do c fails -> undo c -> undo b -> undo a -> raise c's error

A step whose ``do`` was interrupted is undone too: after a cancelled call to another process nobody knows whether it took effect, so every
undo is idempotent and copes with a step that never happened. Undoing is shielded: a second cancellation does not interrupt it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


async def nothing() -> None:
    """The undo of a step that takes nothing."""


@dataclass(frozen=True)
class Step:
    """One thing to do and how to take it back."""

    name: str
    do: Callable[[], Awaitable[None]]
    undo: Callable[[], Awaitable[None]] = nothing


class Taken:
    """The steps that were begun, and so must be taken back some day: at once on failure, or when their owner is done."""

    def __init__(self) -> None:
        self._begun: list[Step] = []

    async def run(self, steps: Sequence[Step], on_begin: Callable[[str], None] = lambda name: None) -> None:
        """Do the steps in order.

        Raises:
            Whatever a step raised, or CancelledError; by then every step that was begun has been taken back.
        """
        try:
            for step in steps:
                self._begun.append(step)
                on_begin(step.name)
                await step.do()
        except BaseException:
            await self.release()
            raise

    def hold(self, steps: Sequence[Step]) -> None:
        """Take over steps that somebody else has done."""
        self._begun.extend(steps)

    async def release(self) -> None:
        """Take back everything, newest first. Failures are logged; they never hide the error that led here nor stop the rest."""
        await finish(self._release())

    async def _release(self) -> None:
        while self._begun:
            step = self._begun.pop()
            try:
                await step.undo()
            except Exception:
                logger.exception("could not take back step %s", step.name)

    @property
    def names(self) -> list[str]:
        return [step.name for step in self._begun]


async def finish(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run to the end even if the caller is cancelled, repeatedly; the cancellation is raised afterwards."""
    task = asyncio.create_task(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()

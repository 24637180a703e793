"""A version number that many can wait on: the base of every long poll."""

import asyncio


class Changes:
    """Counts changes and wakes those who wait for a newer count than they know.

    One event loop only. Waiters come back with the present version; what changed is theirs to look up, so no change is queued anywhere
    and a slow waiter costs nothing.

    Args:
        version: where to begin.
    """

    def __init__(self, version: int = 1) -> None:
        self.version = version
        self._waiters: set[asyncio.Future[None]] = set()

    def bump(self) -> None:
        self.version += 1
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_newer(self, known: int, timeout_seconds: float) -> int:
        """The version once it differs from ``known``, or the same after ``timeout_seconds``."""
        if self.version != known or timeout_seconds <= 0:
            return self.version
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait({waiter}, timeout=timeout_seconds)
        finally:
            self._waiters.discard(waiter)
        return self.version

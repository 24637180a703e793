"""One engine start inside its own process: control page, engine, health, log. Plain class; the actor around it only forwards.

    start ──> loading ──(answers)──> ready ──(process ended | wrong answers | silent or stopped too long)──> failed
                 └──(ended, late, or stopped too long)──> failed                 stop: from everywhere -> stopped

A failed engine is killed before its failure is reported, so whoever hears of it may start the next one at once.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from xinference.core.clock import Clock
from xinference.core.log_ring import LogRing
from xinference.core.orders import Control, ReplicaOrder, ReplicaReport
from xinference.core.stalls import missed_seconds
from xinference.core.states import IllegalMove, ReplicaEvent, ReplicaState, next_replica_state

logger = logging.getLogger(__name__)

FAILURE_TAIL_LINES = 200  # log lines that outlive a failed engine


class Engine(Protocol):
    """An engine server process, as far as its keeper needs it."""

    pid: int | None

    async def start(self) -> None: ...
    async def wait_ready(self, timeout: float) -> None: ...
    async def health(self, timeout: float) -> bool: ...
    async def wait(self) -> int: ...
    async def stop(self, grace_seconds: float) -> int | None: ...
    def explain(self, status: int) -> str: ...
    def stopped(self) -> str | None:
        """A process of the engine that a signal has stopped, None if there is none."""


class ControlPage(Protocol):
    """The page through which a replica's engine learns of peers and clears."""

    def write(self, control: Control) -> None: ...
    def remove(self) -> None: ...


@dataclass(frozen=True)
class SharedMemory:
    """A replica's control page, None if it does not share, and how long ago in seconds its engine core last beat in its segment.

    The engine's server answers health checks while its core, a process of its own, is frozen: only the core's own beat tells.
    """

    page: ControlPage | None
    silence: Callable[[], float | None]


@dataclass(frozen=True)
class Watch:
    """How an engine is watched, in seconds. ``wrong_answers`` health checks answered with an error in a row mean a dead engine.

    ``probe_seconds`` is how often the watching process itself is asked how it is.
    """

    health_seconds: float = 0.5
    hang_seconds: float = 5.0
    wrong_answers: int = 2
    log_lines: int = 2000
    probe_seconds: float = 1.0

    @property
    def patience_seconds(self) -> float:
        """Silence after which an engine is hung: one look less than ``hang_seconds``, within which it is to be found and killed."""
        return max(self.hang_seconds / 2, self.hang_seconds - self.health_seconds)

    @property
    def probe_patience_seconds(self) -> float:
        """How long the process that watches an engine may take to answer: so that one that stopped just after a probe is found in time."""
        return max(self.hang_seconds / 2, self.hang_seconds - self.probe_seconds)


class ReplicaRunner:
    """Runs one order to its end.

    Args:
        engine_maker: makes the engine; is given a function that takes its log lines.
        memory: what the engine and its keeper tell each other without calls.
        on_report: called on the event loop after each change of state.
    """

    def __init__(
        self,
        order: ReplicaOrder,
        engine_maker: Callable[[Callable[[str], None]], Engine],
        memory: SharedMemory,
        watch: Watch,
        clock: Clock,
        on_report: Callable[[ReplicaReport], None],
    ) -> None:
        self.order = order
        self.state = ReplicaState.CREATING
        self.log = LogRing(watch.log_lines, order.log_start)
        self._engine = engine_maker(self.log.add)
        self._page = memory.page
        self._silence = memory.silence
        self._watch = watch
        self._clock = clock
        self._on_report = on_report
        self._cause: str | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._control_version = -1

    async def start(self, control: Control) -> None:
        """Write the control page, then start the engine; returns when its process runs, long before it serves.

        Raises:
            Whatever the engine raises when it cannot be started; nothing of it is left then but the control page, which ``stop`` removes.
        """
        self.write_control(control)
        try:
            await self._engine.start()
        except BaseException:
            await self._engine.stop(0.0)
            raise
        self._move(ReplicaEvent.CREATED)
        self._watcher = asyncio.create_task(self._watch_engine())

    def write_control(self, control: Control) -> bool:
        """Pass a control state on to the engine. False if a newer one was there already."""
        if control.version <= self._control_version:
            return False
        self._control_version = control.version
        if self._page is not None:
            self._page.write(control)
        return True

    def report(self) -> ReplicaReport:
        failed = self.state is ReplicaState.FAILED
        return ReplicaReport(
            model_uid=self.order.model_uid,
            replica_uid=self.order.replica_uid,
            incarnation=self.order.incarnation,
            state=self.state.value,
            cause=self._cause,
            pid=self._engine.pid,
            log_tail=tuple(self.log.read(FAILURE_TAIL_LINES)[0]) if failed else (),
            log_next=self.log.next,
        )

    async def stop(self, grace_seconds: float) -> None:
        """End the engine and remove its socket and control page. Idempotent."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        try:
            await self._engine.stop(grace_seconds)
        finally:
            if self._page is not None:
                self._page.remove()
            if self.state is not ReplicaState.STOPPED:
                self._move(ReplicaEvent.STOP)

    async def check(self, timeout_seconds: float) -> bool:
        """Ask the engine for its health now, because someone saw a broken connection. The watcher decides; this only says."""
        return self.state is ReplicaState.READY and await self._engine.health(timeout_seconds)

    async def _watch_engine(self) -> None:
        life, stopped = asyncio.create_task(self._live()), asyncio.create_task(self._wait_stopped())
        try:
            done, _ = await asyncio.wait({life, stopped}, return_when=asyncio.FIRST_COMPLETED)
            cause = done.pop().result()
        except Exception:
            logger.exception("watching replica %s failed", self.order.replica_uid)
            cause = "watching the engine failed; see the server's log"
        finally:
            life.cancel()
            stopped.cancel()
            await asyncio.wait({life, stopped})
        await self._engine.stop(0.0)
        self._cause = cause
        self._move(ReplicaEvent.FAIL)

    async def _live(self) -> str:
        ended = asyncio.create_task(self._engine.wait())
        try:
            return await self._wait_ready() or await self._wait_for_end(ended)
        finally:
            ended.cancel()

    async def _wait_stopped(self) -> str:
        """Returns which process of the engine was stopped for too long; while it loads as well."""
        last_running = self._clock.now()
        while True:
            began = self._clock.now()
            await asyncio.sleep(self._watch.health_seconds)
            now = self._clock.now()
            last_running += missed_seconds(began, now, self._watch.health_seconds)
            stopped = self._engine.stopped()
            if stopped is None:
                last_running = now
            elif now - last_running >= self._watch.patience_seconds:
                return f"process {stopped} of the engine has been stopped for {self._watch.patience_seconds:g} s (hung)"

    async def _wait_ready(self) -> str | None:
        """None once the engine serves, else why it does not."""
        try:
            await self._engine.wait_ready(self.order.launch_seconds)
        except Exception as error:  # the engine's own error tree: its message is the cause, whatever its class
            return str(error)
        self._move(ReplicaEvent.BECAME_READY)
        return None

    async def _wait_for_end(self, ended: "asyncio.Task[int]") -> str:
        """Returns why a serving engine is no longer one."""
        last_answer = self._clock.now()
        wrong = 0
        while True:
            began = self._clock.now()
            await asyncio.wait({ended}, timeout=self._watch.health_seconds)
            if ended.done():
                return self._engine.explain(ended.result())
            asked = self._clock.now()
            last_answer += missed_seconds(began, asked, self._watch.health_seconds)
            patience = last_answer + self._watch.patience_seconds - asked
            healthy = patience > 0 and await self._engine.health(patience)
            now = self._clock.now()
            if missed_seconds(asked, now, max(0.0, patience)):  # an answer came and nobody was there to read it
                last_answer = now
            if (self._silence() or 0.0) >= self._watch.patience_seconds:
                return f"the engine's core has not moved for {self._watch.patience_seconds:g} s (hung)"
            if healthy:
                last_answer, wrong = now, 0
            elif now - last_answer >= self._watch.patience_seconds:
                return f"the engine answered no health check for {self._watch.patience_seconds:g} s (hung)"
            elif now - asked < patience and not ended.done():
                wrong += 1
                if wrong >= self._watch.wrong_answers:
                    return "the engine's server is up but says that the engine is dead"

    def _move(self, event: ReplicaEvent) -> None:
        after = next_replica_state(self.state, event)
        if isinstance(after, IllegalMove):
            logger.warning("replica %s: %s", self.order.replica_uid, after)
            return
        self.state = after
        self._on_report(self.report())


def as_wire(runner: ReplicaRunner, address: str | None, uds: str | None) -> dict[str, Any]:
    """A runner's report with the addresses only its process knows."""
    return {**runner.report().to_wire(), "address": address, "uds": uds}

"""Keeps one replica alive: brings it up, notices its end, brings it up again, until it is told to stop or it ends too often.

    reserve ──> create ──> load ──> ready ... end ──> (given back) ──> wait ──> reserve ...

The steps are taken back in reverse when one fails, when the replica ends, and when the keeper is stopped at any point in between.
"""

import asyncio
import logging
import secrets
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from xinference.core.clock import Clock
from xinference.core.errors import CoreError, ReplicaEnded, Unreachable
from xinference.core.orders import Control, ReplicaOrder, ReplicaReport
from xinference.core.placement import Placement
from xinference.core.relaunch import GiveUp, RelaunchLimits, decide
from xinference.core.states import HELD, IllegalMove, ReplicaEvent, ReplicaState, next_replica_state
from xinference.core.steps import Step, Taken, finish
from xinference.errors import XinferenceError

logger = logging.getLogger(__name__)

LOAD_SLACK_SECONDS = 10.0  # beyond launch_seconds, for the worker's own verdict to arrive
PLACE_POLL_SECONDS = 0.5  # while there is no worker for a replica, or no room on any
IDLE_POLL_SECONDS = 0.1  # while a drain waits for the last requests


class Cause(StrEnum):
    """Why an engine start came to its end."""

    FAILED = "failed"
    LOST = "lost"
    RESTART = "restart"


@dataclass(frozen=True)
class End:
    cause: Cause
    text: str


class Workers(Protocol):
    """Calls to workers. Raise Unreachable when the worker does not answer."""

    async def start_replica(self, worker_id: str, order: ReplicaOrder, control: Control) -> ReplicaReport: ...
    async def remove_replica(self, worker_id: str, report: ReplicaReport, *, keep_cache: bool, grace_seconds: float) -> None: ...
    async def is_idle(self, report: ReplicaReport) -> bool: ...


class Surroundings(Protocol):
    """What a keeper asks of the deployment it belongs to."""

    def choose(self, before: Placement) -> Placement:
        """Where the replica shall run now, and claim it. Raises XinferenceError when there is no place."""

    def no_place(self, before: Placement) -> str | None:
        """Why ``choose`` would raise now, or None."""

    def release(self, replica_uid: str) -> None: ...
    def order(self, placement: Placement, incarnation: int, log_start: int) -> ReplicaOrder: ...
    def control(self, replica_uid: str, incarnation: int) -> Control: ...
    def changed(self, keeper: "ReplicaKeeper", message: str) -> None:
        """The replica's state, place or incarnation changed."""


class ReplicaKeeper:
    """One replica of one model.

    Args:
        placement: where it shall run first; claimed already.
        limits: how often it is started again.
    """

    def __init__(self, placement: Placement, surroundings: Surroundings, workers: Workers, clock: Clock, limits: RelaunchLimits) -> None:
        self.placement = placement
        self.state = ReplicaState.CREATING
        self.cause: str | None = None
        self.since = clock.wall()
        self.restarts = 0
        self.report = ReplicaReport("", placement.replica_uid, 0, ReplicaState.CREATING.value)
        self.log_tail: tuple[str, ...] = ()
        self.stopping = False  # for good
        self.flushing = False  # its engine is about to be stopped
        self._surroundings = surroundings
        self._workers = workers
        self._clock = clock
        self._limits = limits
        self._taken = Taken()
        self._ends: list[float] = []
        self._keep_cache = False
        self._cache_on: set[str] = set()  # workers on which a segment of a former start lies
        self._grace_seconds = 0.0
        self._ready: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[End] | None = None
        self._again = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None

    @property
    def uid(self) -> str:
        return self.placement.replica_uid

    @property
    def incarnation(self) -> int:
        return self.report.incarnation

    @property
    def holds(self) -> bool:
        """Whether something is claimed, starting, running or being given back for the present incarnation."""
        return bool(self._taken.names)

    def start(self) -> "asyncio.Future[None]":
        """Begin; the future tells how the first start went: None, or the error that ended it."""
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(self._first))
        return self._first

    def adopt(self, report: ReplicaReport) -> None:
        """Go on with a replica that serves already, instead of starting one."""
        self.report = report
        self.state = ReplicaState.READY
        self._taken.hold(self._steps())
        self.start()

    def take_report(self, report: ReplicaReport) -> None:
        """What the replica's worker says. Reports about other engine starts are dropped."""
        if report.incarnation != self.report.incarnation or self._ended is None:
            return
        self.report = report
        if report.state == ReplicaState.READY and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        elif report.state in (ReplicaState.FAILED, ReplicaState.STOPPED):
            self._end(End(Cause.FAILED, report.cause or "the engine stopped"))

    def worker_lost(self, text: str) -> None:
        """The worker is gone, and with it whatever it ran."""
        self._end(End(Cause.LOST, text))

    async def restart(self, drain_seconds: float, grace_seconds: float) -> None:
        """Drain, stop, start again with a new incarnation; a replica that was given up is started again too."""
        self._ends.clear()
        if self.state is ReplicaState.READY:
            await self._drain(drain_seconds)
        self._grace_seconds = grace_seconds
        if self.state in HELD:
            self._end(End(Cause.RESTART, "restarted on request"))
        self._again.set()

    async def stop(self, *, drain_seconds: float, grace_seconds: float, cause: str | None = None) -> None:
        """End the replica for good: no new requests, wait for the open ones, stop the engine, remove its cache. Idempotent.

        Args:
            cause: why, if nobody asked for this; one that has failed then stays so, with its own cause.
        """
        self.stopping = True
        try:
            if self.state is ReplicaState.READY:
                await self._drain(drain_seconds)
        finally:
            self._keep_cache = False
            self._grace_seconds = grace_seconds
            await finish(self._stop(cause))

    async def _stop(self, cause: str | None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._first is not None:
            self._first.cancel()  # for one that was stopped before it began
        await self._taken.release()
        await self._remove_caches(set())
        self._surroundings.release(self.uid)
        failed = self.state in (ReplicaState.FAILED, ReplicaState.LOST)
        if self.state is not ReplicaState.STOPPED and not (failed and cause is not None):
            self._move(ReplicaEvent.STOP, cause or "stopped", cause=cause)

    async def _run(self, first: "asyncio.Future[None]") -> None:
        try:
            while True:
                end = await self._live(first)
                self._keep_cache = True
                await self._taken.release()
                if self.stopping:
                    return
                if not first.done():
                    first.set_exception(ReplicaEnded(f"replica {self.uid}: {end.text}"))
                    first.exception()  # seen by whoever started the keeper; asyncio need not complain otherwise
                    return
                await self._pause(end)
                self.restarts += 1
                self._move(ReplicaEvent.RELAUNCH, "starting again")
        except asyncio.CancelledError:
            first.cancel()
            raise
        except Exception as error:
            logger.exception("keeping replica %s failed", self.uid)
            if not first.done():
                first.set_exception(error)
        finally:
            await self._taken.release()

    async def _live(self, first: "asyncio.Future[None]") -> End:
        """One engine start, from its first step to its end."""
        loop = asyncio.get_running_loop()
        self._ready, self._ended = loop.create_future(), loop.create_future()
        self._grace_seconds = 0.0
        self.flushing = False
        try:
            if self.state is not ReplicaState.READY:  # it is when it was adopted
                incarnation = secrets.randbits(64) or 1
                self.report = ReplicaReport("", self.uid, incarnation, ReplicaState.CREATING.value, log_next=self.report.log_next)
                await self._taken.run(self._steps())
                self._move(ReplicaEvent.BECAME_READY, "ready")
            if not first.done():
                first.set_result(None)
            self._keep_cache = True
            end = await self._ended
        except (CoreError, XinferenceError) as error:
            end = self._ended.result() if self._ended.done() else End(Cause.FAILED, error.message)
        except OSError as error:
            end = End(Cause.FAILED, str(error))
        finally:
            self.log_tail = self.report.log_tail or self.log_tail
        event = {Cause.LOST: ReplicaEvent.WORKER_LOST, Cause.RESTART: ReplicaEvent.STOP}.get(end.cause, ReplicaEvent.FAIL)
        self._move(event, end.text, cause=end.text)
        return end

    def _steps(self) -> list[Step]:
        return [
            Step("reserve", self._reserve, self._unreserve),
            Step("create", self._create, self._remove),
            Step("load", self._load),
        ]

    async def _pause(self, end: End) -> None:
        """Wait before the next start: not at all after a restart on request, and until one when it ended too often."""
        if end.cause is Cause.RESTART:
            return
        self._ends.append(self._clock.now())
        self._again.clear()
        decision = decide(self._ends, self._clock.now(), self._limits)
        if isinstance(decision, GiveUp):
            self.cause = f"{end.text} -- not started again: {decision.reason}"
            self._surroundings.changed(self, self.cause)
            await self._again.wait()
            return
        asked = asyncio.create_task(self._again.wait())
        slept = asyncio.create_task(self._clock.sleep(decision.wait_seconds))
        try:
            either: set[asyncio.Future[Any]] = {asked, slept}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            slept.cancel()
        await self._wait_for_place()

    async def _wait_for_place(self) -> None:
        """That there is nowhere to run is not the replica's failure: it is waited for, however long, and not counted."""
        said = False
        while (reason := self._surroundings.no_place(self.placement)) is not None:
            if not said:
                self._surroundings.changed(self, f"waiting for a place: {reason}")
                said = True
            await self._clock.sleep(PLACE_POLL_SECONDS)

    async def _reserve(self) -> None:
        self.placement = self._surroundings.choose(self.placement)

    async def _unreserve(self) -> None:
        self._surroundings.release(self.uid)

    async def _create(self) -> None:
        order = self._surroundings.order(self.placement, self.incarnation, self.report.log_next)
        self._surroundings.changed(self, f"starting on worker {self.placement.worker_id}")
        report = await self._workers.start_replica(self.placement.worker_id, order, self._surroundings.control(self.uid, self.incarnation))
        self._move(ReplicaEvent.CREATED, "the engine loads the model")
        self.take_report(report)
        await self._remove_caches({self.placement.worker_id})

    async def _remove(self) -> None:
        if self._keep_cache:
            self._cache_on.add(self.placement.worker_id)
        try:
            await self._workers.remove_replica(
                self.placement.worker_id, self.report, keep_cache=self._keep_cache, grace_seconds=self._grace_seconds
            )
        except Unreachable as error:  # a lost worker's replicas died with it, or are removed when it comes back
            logger.warning("replica %s could not be removed from worker %s: %s", self.uid, self.placement.worker_id, error)

    async def _remove_caches(self, but_on: set[str]) -> None:
        """Have the segments that were kept for a successor removed, where there will be none."""
        for worker_id in sorted(self._cache_on - but_on):
            try:
                await self._workers.remove_replica(worker_id, self.report, keep_cache=False, grace_seconds=0.0)
            except Unreachable:  # it sweeps when it starts again, and is told when it comes back
                logger.info("worker %s cannot be asked to remove the cache of replica %s", worker_id, self.uid)
            self._cache_on.discard(worker_id)

    async def _load(self) -> None:
        if self._ready is None or self._ended is None:
            raise ReplicaEnded("it was not started")
        launch_seconds = self._surroundings.order(self.placement, self.incarnation, 0).launch_seconds
        either: set[asyncio.Future[Any]] = {self._ready, self._ended}
        await asyncio.wait(either, timeout=launch_seconds + LOAD_SLACK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            raise ReplicaEnded(self._ended.result().text)
        if not self._ready.done():
            raise ReplicaEnded(f"it was not ready within {launch_seconds:g} s")

    async def _drain(self, drain_seconds: float) -> None:
        self.flushing = True
        self._move(ReplicaEvent.DRAIN, f"no new requests; waiting up to {drain_seconds:g} s for the open ones")
        deadline = self._clock.now() + drain_seconds
        while self._clock.now() < deadline:
            await self._clock.sleep(IDLE_POLL_SECONDS)
            if self._ended is not None and self._ended.done():
                return
            try:
                if await self._workers.is_idle(self.report):
                    return
            except Unreachable:
                return

    def _end(self, end: End) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(end)

    def _move(self, event: ReplicaEvent, message: str, cause: str | None = None) -> None:
        after = next_replica_state(self.state, event)
        if isinstance(after, IllegalMove):
            logger.warning("replica %s: %s", self.uid, after)
            return
        self.state, self.cause, self.since = after, cause, self._clock.wall()
        if after not in HELD:
            self.report = replace(self.report, pid=None, uds=None, address=None)
        self._surroundings.changed(self, message)

"""What a worker does with orders: start, watch, remove; sweep before and after. Plain class; the actor around it only forwards.

    start_replica ──> process ──> engine ──> (reports) ... ──> remove_replica
        each a step with its undo: whatever is interrupted, failed or removed halfway is taken back in reverse

Every order is bound to an incarnation. An order that was withdrawn before it arrived is refused, so that a removal may overtake its launch.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from xinference.core.errors import OrderWithdrawn, Unreachable
from xinference.core.orders import Control, ReplicaOrder, ReplicaReport
from xinference.core.states import ReplicaState
from xinference.core.steps import Step, Taken, finish
from xinference.core.turns import Turns

logger = logging.getLogger(__name__)

MAX_WITHDRAWN = 1024  # withdrawn incarnations that are remembered


class ReplicaProcess(Protocol):
    """The process of one replica, and the actor in it. Calls raise Unreachable when the process does not answer."""

    address: str

    async def start(self, control: Control) -> None: ...
    async def report(self) -> ReplicaReport: ...
    async def write_control(self, control: Control) -> None: ...
    async def stop(self, grace_seconds: float) -> None: ...


class ReplicaProcesses(Protocol):
    """Makes and ends replica processes."""

    async def open(self, order: ReplicaOrder) -> ReplicaProcess: ...
    async def close(self, order: ReplicaOrder) -> None:
        """End the process of this order by force; copes with one that was never made or is half made."""


class Leftovers(Protocol):
    """What a replica leaves on the machine outside its process."""

    def remove_cache(self, replica_uid: str | None) -> int:
        """Remove the segments and control pages of one replica, or of all of this worker; how many files."""

    def remove_socket(self, replica_uid: str) -> None: ...
    async def wait_ended(self, pid: int) -> None:
        """Wait until the engine's process is gone: until then it holds memory that its successor needs."""


@dataclass
class Slot:
    """One order on this worker."""

    order: ReplicaOrder
    report: ReplicaReport
    control: Control
    taken: Taken = field(default_factory=Taken)
    process: ReplicaProcess | None = None
    task: "asyncio.Task[None] | None" = None
    grace_seconds: float = 0.0
    removing: bool = False
    unreachable: bool = False
    probing: bool = False


class WorkerHost:
    """All replicas of one worker.

    Args:
        on_change: called after any report changed.
    """

    def __init__(self, processes: ReplicaProcesses, leftovers: Leftovers, on_change: Callable[[], None]) -> None:
        self._processes = processes
        self._leftovers = leftovers
        self._on_change = on_change
        self._slots: dict[str, Slot] = {}
        self._withdrawn: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._turns = Turns()
        self._closed = False

    async def start_replica(self, order: ReplicaOrder, control: Control) -> ReplicaReport:
        """Start an engine; returns when its process runs. The same order twice is one start.

        Raises:
            OrderWithdrawn: the order was removed before, or the worker is stopping.
            Whatever the start raised; everything taken has been given back.
        """
        async with self._turns.of(order.replica_uid):
            self._refuse_withdrawn(order)
            present = self._slots.get(order.replica_uid)
            if present is not None and present.order.incarnation == order.incarnation:
                return present.report
            if present is not None:
                await self._remove(present, keep_cache=True, grace_seconds=0.0)
            slot = Slot(order, _first_report(order), control)
            self._slots[order.replica_uid] = slot
            slot.task = asyncio.create_task(slot.taken.run(self._steps(slot)))
            try:
                await asyncio.wait({slot.task})
            finally:  # cancelled here: so is the start
                slot.task.cancel()
                await finish(_ended(slot.task))
                if not slot.taken.names:
                    del self._slots[order.replica_uid]
            if slot.task.cancelled():  # by a removal: for the caller that is an answer, not its own cancellation
                raise OrderWithdrawn(f"the order for {order.replica_uid} was taken back while it started")
            slot.task.result()
            return slot.report

    async def remove_replica(self, replica_uid: str, incarnation: int, *, keep_cache: bool, grace_seconds: float) -> None:
        """End an engine start and give back all it took. Idempotent, and right at any point of its life, before its arrival too.

        Args:
            keep_cache: leave its segment for a successor to adopt.
            grace_seconds: how long the engine may take to stop by itself.
        """
        self._withdraw(replica_uid, incarnation)
        slot = self._slots.get(replica_uid)
        if slot is not None and slot.order.incarnation == incarnation and slot.task is not None:
            slot.task.cancel()  # a start in progress holds the turn; its own roll-back ends it
        async with self._turns.of(replica_uid):
            slot = self._slots.get(replica_uid)
            if slot is not None and slot.order.incarnation == incarnation:
                await finish(self._remove(slot, keep_cache=keep_cache, grace_seconds=grace_seconds))
            elif slot is None and not keep_cache:
                self._leftovers.remove_cache(replica_uid)

    def take_report(self, report: ReplicaReport) -> None:
        """A replica process says how it is."""
        slot = self._slots.get(report.replica_uid)
        if slot is None or slot.order.incarnation != report.incarnation or slot.report.state == ReplicaState.FAILED:
            return
        merged = replace(report, address=slot.report.address, uds=report.uds or slot.report.uds)
        if merged != slot.report:
            slot.report = merged
            self._on_change()

    def fail(self, replica_uid: str, incarnation: int, cause: str) -> None:
        """A replica's process is gone or hung: what its worker saw stands for its report."""
        slot = self._slots.get(replica_uid)
        if slot is None or slot.order.incarnation != incarnation or slot.report.state in (ReplicaState.FAILED, ReplicaState.STOPPED):
            return
        slot.report = replace(slot.report, state=ReplicaState.FAILED.value, cause=cause)
        self._on_change()

    def fail_at(self, address: str, cause: str) -> None:
        """The same, by the address of the process."""
        for slot in list(self._slots.values()):
            if slot.process is not None and slot.process.address == address and not slot.removing:
                slot.unreachable = True
                self.fail(slot.order.replica_uid, slot.order.incarnation, cause)

    async def probe(self) -> None:
        """Ask every replica process for its report: catches lost messages, and processes that hang."""
        await asyncio.gather(*(self._probe(slot) for slot in list(self._slots.values())))

    async def apply_controls(self, controls: list[Control]) -> None:
        """Pass control states on to the replicas they name; older ones and those for other incarnations are dropped."""
        await asyncio.gather(*(self._apply(control) for control in controls))

    def reports(self) -> list[ReplicaReport]:
        return [slot.report for slot in self._slots.values()]

    def running(self) -> list[dict[str, Any]]:
        """Order, report and control state of every replica, as wire dicts."""
        return [
            {"order": slot.order.to_wire(), "report": slot.report.to_wire(), "control": slot.control.to_wire()}
            for slot in self._slots.values()
        ]

    async def stop(self, grace_seconds: float) -> None:
        """Remove every replica and everything of this worker on the machine. Idempotent."""
        self._closed = True
        orders = [slot.order for slot in self._slots.values()]
        await asyncio.gather(
            *(self.remove_replica(o.replica_uid, o.incarnation, keep_cache=False, grace_seconds=grace_seconds) for o in orders),
            return_exceptions=True,
        )
        self._leftovers.remove_cache(None)

    def _steps(self, slot: Slot) -> list[Step]:
        order = slot.order

        async def open_process() -> None:
            slot.process = await self._processes.open(order)
            slot.report = replace(slot.report, address=slot.process.address)

        async def start_engine() -> None:
            if slot.process is None:
                raise OrderWithdrawn("its process is gone")
            given = slot.control
            await slot.process.start(given)
            slot.report = replace(await slot.process.report(), address=slot.process.address)
            if slot.control.version > given.version:  # changed while the engine started
                await slot.process.write_control(slot.control)
            self._on_change()

        async def stop_engine() -> None:
            if slot.process is not None and not slot.unreachable:
                await slot.process.stop(slot.grace_seconds)

        return [
            Step("process", open_process, lambda: self._processes.close(order)),
            Step("engine", start_engine, stop_engine),
        ]

    async def _remove(self, slot: Slot, *, keep_cache: bool, grace_seconds: float) -> None:
        slot.removing = True
        slot.grace_seconds = grace_seconds
        await slot.taken.release()
        if slot.report.pid is not None:
            await self._leftovers.wait_ended(slot.report.pid)
        self._leftovers.remove_socket(slot.order.replica_uid)
        self._slots.pop(slot.order.replica_uid, None)
        if not keep_cache:
            self._leftovers.remove_cache(slot.order.replica_uid)
        self._on_change()

    async def _probe(self, slot: Slot) -> None:
        if slot.process is None or slot.removing or slot.probing or slot.report.state in (ReplicaState.FAILED, ReplicaState.CREATING):
            return
        slot.probing = True
        try:
            self.take_report(await slot.process.report())
        except Unreachable as error:
            if not slot.removing:
                slot.unreachable = True  # it will not hear a stop either: its process is killed, and the engine with it
                self.fail(slot.order.replica_uid, slot.order.incarnation, f"the process that watches the engine does not answer: {error}")
        finally:
            slot.probing = False

    async def _apply(self, control: Control) -> None:
        slot = self._slots.get(control.replica_uid)
        if slot is None or slot.removing or slot.order.incarnation != control.incarnation:
            return
        if control.version <= slot.control.version:
            return
        slot.control = control
        if slot.process is None or slot.report.state == ReplicaState.CREATING:
            return  # the start will write it
        try:
            await slot.process.write_control(control)
        except Unreachable as error:
            logger.warning("could not pass a control state to replica %s: %s", control.replica_uid, error)

    def _withdraw(self, replica_uid: str, incarnation: int) -> None:
        self._withdrawn[(replica_uid, incarnation)] = None
        while len(self._withdrawn) > MAX_WITHDRAWN:
            self._withdrawn.popitem(last=False)

    def _refuse_withdrawn(self, order: ReplicaOrder) -> None:
        if self._closed:
            raise OrderWithdrawn("the worker is stopping")
        if (order.replica_uid, order.incarnation) in self._withdrawn:
            raise OrderWithdrawn(f"the order for {order.replica_uid} was taken back before it arrived")


async def _ended(task: "asyncio.Task[None]") -> None:
    await asyncio.wait({task})


def _first_report(order: ReplicaOrder) -> ReplicaReport:
    return ReplicaReport(order.model_uid, order.replica_uid, order.incarnation, ReplicaState.CREATING.value, log_next=order.log_start)


def wire_reports(reports: list[ReplicaReport]) -> list[dict[str, Any]]:
    return [report.to_wire() for report in reports]

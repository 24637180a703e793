"""The actor in a replica's own process: forwards calls to the runner, and the runner's reports to the worker."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xoscar as xo

from xinference.core.cache_view import CacheView
from xinference.core.calls import call
from xinference.core.clock import SystemClock
from xinference.core.control_page import CacheControlPage
from xinference.core.errors import Unreachable
from xinference.core.load import read_load
from xinference.core.machine import Machine
from xinference.core.orders import Control, EngineCommand, ReplicaOrder, ReplicaReport
from xinference.core.runner import Engine, ReplicaRunner, SharedMemory, as_wire
from xinference.model.llm.engine import EngineProcess

logger = logging.getLogger(__name__)

REPLICA_UID = "replica"  # of the actor; there is one in each process
WORKER_UID = "worker"
REPORT_SECONDS = 5.0  # for the worker to take a report; a lost one is made up for by its next probe


class ReplicaActor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """One replica.

    Args:
        order: the order as a wire dict.
        command: how to start its engine, as a wire dict.
        machine: the worker's directories and limits as a wire dict.
        worker_address: where reports go.
    """

    def __init__(self, order: dict[str, Any], command: dict[str, Any], machine: dict[str, Any], worker_address: str) -> None:
        super().__init__()
        self._order = ReplicaOrder.from_wire(order)
        self._machine = Machine.from_wire(machine)
        self._worker_address = worker_address
        self._worker: Any = None
        self._sends: set[asyncio.Task[None]] = set()
        self._uds: Path = self._machine.socket_of(self._order.replica_uid)
        clock = SystemClock()
        self._cache = CacheView(self._machine, self._order, clock)
        page = CacheControlPage(self._machine, self._order) if self._order.cache is not None else None
        memory = SharedMemory(page, self._cache.silence_seconds)
        start = EngineCommand.from_wire(command)

        def make_engine(log: Callable[[str], None]) -> Engine:
            return EngineProcess(start.argv, start.env, self._uds, log)

        self._runner = ReplicaRunner(self._order, make_engine, memory, self._machine.watch, clock, self._send_report)

    async def start(self, control: dict[str, Any]) -> None:
        self._worker = await xo.actor_ref(address=self._worker_address, uid=WORKER_UID)
        await self._runner.start(Control.from_wire(control))

    async def report(self) -> dict[str, Any]:
        return as_wire(self._runner, self.address, str(self._uds))

    async def write_control(self, control: dict[str, Any]) -> bool:
        return self._runner.write_control(Control.from_wire(control))

    async def stop(self, grace_seconds: float) -> None:
        await self._runner.stop(grace_seconds)
        self._cache.close()

    async def check(self, timeout_seconds: float) -> bool:
        return await self._runner.check(timeout_seconds)

    async def logs(self, tail: int, after: int | None) -> tuple[list[str], int]:
        return self._runner.log.read(tail, after)

    async def load(self) -> tuple[int, int]:
        """Requests that the engine runs, and that wait in it. Raises Unreachable."""
        return await read_load(self._uds)

    async def cache_report(self) -> dict[str, Any] | None:
        return self._cache.report()

    async def epoch_confirmed(self, epoch: int, wait_seconds: float) -> bool:
        return await self._cache.wait_confirmed(epoch, wait_seconds)

    async def request_record(self, request: str, wait_seconds: float) -> dict[str, Any] | None:
        return await self._cache.wait_request(request, wait_seconds)

    async def recent_requests(self, limit: int) -> list[dict[str, Any]]:
        return self._cache.recent(limit)

    def _send_report(self, report: ReplicaReport) -> None:
        task = asyncio.create_task(self._send(as_wire(self._runner, self.address, str(self._uds))))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, report: dict[str, Any]) -> None:
        try:
            await call(self._worker.replica_report(report), REPORT_SECONDS)
        except Unreachable as error:
            logger.warning("could not report the state of replica %s: %s", self._order.replica_uid, error)

"""Replica processes as xoscar sub-pools: made one after the other, never left half made.

What xoscar (0.12) does and what is done about it:
    * a cancelled ``append_sub_pool`` leaves a live process that nobody knows: it is never cancelled, and ``close`` waits for it;
    * a failed one leaves an entry in the pool's configuration, after which every later one fails: the entry is taken out;
    * a sub-pool is killed when the thread that made it ends: pools are made on the main thread only;
    * a large environment does not fit its start-up memory block: nothing is passed through it, the order goes to the actor's constructor.
"""

import asyncio
import logging
import threading
import time
from typing import Any

import xoscar as xo

from xinference.core.calls import call
from xinference.core.engines import Engines
from xinference.core.errors import CoreError, Unreachable
from xinference.core.machine import Machine
from xinference.core.orders import Control, ReplicaOrder, ReplicaReport
from xinference.core.replica import REPLICA_UID, ReplicaActor
from xinference.core.runner import Watch
from xinference.core.stalls import missed_seconds

logger = logging.getLogger(__name__)

APPEND_SECONDS = 60.0  # for a process to start on a busy machine; usually below one
CREATE_SECONDS = 30.0
START_SECONDS = 30.0  # for the engine's process to run, not to serve
REMOVE_SECONDS = 2.0  # for a replica process to end by itself before it is killed


class RemoteReplica:
    """The actor of one replica, in its process. Every method raises Unreachable when it does not answer."""

    def __init__(self, ref: Any, address: str, watch: Watch) -> None:
        self.address = address
        self._ref = ref
        self._hang_seconds = watch.hang_seconds
        self._probe_seconds = watch.probe_patience_seconds

    async def start(self, control: Control) -> None:
        await call(self._ref.start(control.to_wire()), START_SECONDS)

    async def report(self) -> ReplicaReport:
        began = time.monotonic()
        try:
            return ReplicaReport.from_wire(await call(self._ref.report(), self._probe_seconds))
        except Unreachable:
            if not missed_seconds(began, time.monotonic(), self._probe_seconds):
                raise
        # It was this process that did not run: an answer may lie there unread.
        return ReplicaReport.from_wire(await call(self._ref.report(), self._probe_seconds))

    async def write_control(self, control: Control) -> None:
        await call(self._ref.write_control(control.to_wire()), self._hang_seconds)

    async def stop(self, grace_seconds: float) -> None:
        await call(self._ref.stop(grace_seconds), grace_seconds + self._hang_seconds)


class SubPools:
    """Makes and ends replica processes in one main pool.

    Args:
        machine: handed to each replica.
        engines: writes each engine's command.
    """

    def __init__(self, machine: Machine, engines: Engines) -> None:
        self._engines = engines
        self.pool: Any = None  # the main pool of this process; set before the first use
        self._machine = machine
        self._one_at_a_time = asyncio.Lock()
        self._making: dict[tuple[str, int], asyncio.Task[str]] = {}
        self._abandoned: set[tuple[str, int]] = set()

    async def open(self, order: ReplicaOrder) -> RemoteReplica:
        """A new process with the order's actor in it.

        Raises:
            InvalidRequest: the engine cannot be started so.
            CoreError: the process or its actor could not be made; nothing is left of it after ``close``.
        """
        command = await self._engines.command(order)
        made = asyncio.create_task(self._append(order))
        self._making[order.replica_uid, order.incarnation] = made
        address = await asyncio.shield(made)
        ref = await call(
            xo.create_actor(
                ReplicaActor,
                order.to_wire(),
                command.to_wire(),
                self._machine.to_wire(),
                self.pool.external_address,
                uid=REPLICA_UID,
                address=address,
            ),
            CREATE_SECONDS,
        )
        return RemoteReplica(ref, address, self._machine.watch)

    async def close(self, order: ReplicaOrder) -> None:
        """End the order's process, also one that is still being made: then it is waited for first. Idempotent."""
        key = (order.replica_uid, order.incarnation)
        made = self._making.pop(key, None)
        if made is None:
            return
        self._abandoned.add(key)
        try:
            await asyncio.wait({made}, timeout=APPEND_SECONDS)
        finally:
            self._abandoned.discard(key)
        if not made.done():
            logger.error("the process of replica %s is still being made after %s s", order.replica_uid, APPEND_SECONDS)
        elif not made.cancelled() and made.exception() is None:
            await self._remove(made.result())

    async def _append(self, order: ReplicaOrder) -> str:
        if threading.current_thread() is not threading.main_thread():
            raise CoreError("replica processes can only be made on the main thread: they end with the thread that made them")
        async with self._one_at_a_time:
            if (order.replica_uid, order.incarnation) in self._abandoned:
                raise CoreError(f"the start of replica {order.replica_uid} was taken back before its turn")
            before = set(self.pool._config.get_process_indexes())
            try:
                address: str = await self.pool.append_sub_pool(label=order.replica_uid, modules=["xinference.core.pool_modules"])
            except Exception as error:
                for index in set(self.pool._config.get_process_indexes()) - before:
                    self.pool._config.remove_pool_config(index)
                raise CoreError(f"could not start the process of replica {order.replica_uid}: {error}") from error
            return address

    async def _remove(self, address: str) -> None:
        if address not in self.pool.sub_processes:
            return
        process = self.pool.sub_processes[address]
        try:
            await self.pool.remove_sub_pool(address, timeout=REMOVE_SECONDS, force=process.returncode is not None)
        except (Unreachable, OSError, TimeoutError) as error:
            logger.warning("the process at %s did not stop cleanly: %s", address, error)

"""Calls from the supervisor to workers and to replica processes, typed. All raise Unreachable when the other side does not answer."""

from typing import Any

import xoscar as xo

from xinference.core.calls import call, forget_route
from xinference.core.errors import Unreachable
from xinference.core.orders import Control, ReplicaOrder, ReplicaReport
from xinference.core.replica import REPLICA_UID, WORKER_UID
from xinference.core.roster import Roster
from xinference.core.spec import LaunchSpec
from xinference.core.topology import ModelFacts

CONNECT_SECONDS = 5.0
CALL_SECONDS = 10.0
INSPECT_SECONDS = 28.0  # reading a model's directory, and on a machine's first launch vLLM's list of arguments
READ_SECONDS = 2.0  # from memory: one that takes longer hangs, and its worker will find that out
LOAD_SECONDS = 1.0  # only for people to see: a replica that hangs must not keep them waiting
START_SECONDS = 120.0  # a process and its engine's process; the machine may be busy starting others
MAX_REFS = 512  # a reference is an address and a name: one that is kept too long is no harm, only memory
REMOVE_SLACK_SECONDS = 30.0  # beyond the grace that the engine gets


class Fleet:
    """References to workers and replicas, kept: looking one up costs a round trip.

    Args:
        roster: where workers are.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._refs: dict[tuple[str, str], Any] = {}

    async def inspect(self, worker_id: str, spec: LaunchSpec) -> ModelFacts:
        ref = await self._worker(worker_id)
        return ModelFacts.from_wire(await call(ref.inspect(spec.to_wire()), INSPECT_SECONDS))

    async def command(self, worker_id: str, order: ReplicaOrder) -> list[str]:
        found: list[str] = await call((await self._worker(worker_id)).command(order.to_wire()), INSPECT_SECONDS)
        return found

    async def start_replica(self, worker_id: str, order: ReplicaOrder, control: Control) -> ReplicaReport:
        ref = await self._worker(worker_id)
        return ReplicaReport.from_wire(await call(ref.start_replica(order.to_wire(), control.to_wire()), START_SECONDS))

    async def remove_replica(self, worker_id: str, report: ReplicaReport, *, keep_cache: bool, grace_seconds: float) -> None:
        ref = await self._worker(worker_id)
        await call(
            ref.remove_replica(report.replica_uid, report.incarnation, keep_cache, grace_seconds), grace_seconds + REMOVE_SLACK_SECONDS
        )

    async def apply_controls(self, worker_id: str, controls: list[Control]) -> None:
        await call((await self._worker(worker_id)).apply_controls([control.to_wire() for control in controls]), CALL_SECONDS)

    async def check_replica(self, worker_id: str, replica_uid: str, incarnation: int) -> None:
        await call((await self._worker(worker_id)).check_replica(replica_uid, incarnation), CALL_SECONDS)

    async def is_idle(self, report: ReplicaReport) -> bool:
        return await self.load(report) == (0, 0)

    async def load(self, report: ReplicaReport) -> tuple[int, int]:
        running, waiting = await call((await self._replica(report)).load(), LOAD_SECONDS)
        return running, waiting

    async def ask(self, report: ReplicaReport, method: str, *arguments: Any, wait_seconds: float = 0.0) -> Any:
        """Call one of the replica actor's reading methods: logs, cache_report, request_record, recent_requests, epoch_confirmed."""
        ref = await self._replica(report)
        methods = {
            "logs": ref.logs,
            "cache_report": ref.cache_report,
            "request_record": ref.request_record,
            "recent_requests": ref.recent_requests,
            "epoch_confirmed": ref.epoch_confirmed,
        }
        return await call(methods[method](*arguments), wait_seconds + READ_SECONDS)

    async def _worker(self, worker_id: str) -> Any:
        member = self._roster.members.get(worker_id)
        if member is None:
            raise Unreachable(f"worker {worker_id} is not in the cluster")
        return await self._ref(member.address, WORKER_UID)

    async def _replica(self, report: ReplicaReport) -> Any:
        if report.address is None:
            raise Unreachable(f"replica {report.replica_uid} has no process")
        return await self._ref(report.address, REPLICA_UID)

    async def _ref(self, address: str, uid: str) -> Any:
        key = (address, uid)
        if key not in self._refs:
            if len(self._refs) >= MAX_REFS:
                self._refs.clear()
            try:
                self._refs[key] = await call(xo.actor_ref(address=address, uid=uid), CONNECT_SECONDS)
            except Unreachable:
                forget_route(address)
                self._refs[key] = await call(xo.actor_ref(address=address, uid=uid), CONNECT_SECONDS)
        return self._refs[key]

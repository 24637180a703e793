"""What can be asked of, and done to, the shared cache of a model: status, clear, accounting records."""

import asyncio
from typing import Any

from xinference.core.cluster_state import ClusterState
from xinference.core.deployment import Deployment
from xinference.core.errors import Unreachable
from xinference.core.events import Stage
from xinference.core.fleet import Fleet
from xinference.core.keeper import ReplicaKeeper
from xinference.core.states import HELD, ReplicaState
from xinference.errors import InvalidRequest
from xinference.model.llm.vllm.xavier.directory.counters import COUNTERS
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES

CONFIRM_SECONDS = 5.0  # engines look at their control page four times a second


class CacheService:
    """Reads through the replicas' own processes; writes through control pages only."""

    def __init__(self, state: ClusterState, fleet: Fleet) -> None:
        self._state = state
        self._fleet = fleet

    async def status(self, model_uid: str) -> dict[str, Any]:
        """Config, tiers, token sources and counters, for each replica and in total. Raises ModelNotFound."""
        d = self._state.deployment(model_uid)
        keepers = list(d.keepers.values())
        reports = await asyncio.gather(*(self._report(keeper) for keeper in keepers))
        rows = [_row(d, keeper, report, keepers) for keeper, report in zip(keepers, reports, strict=True)]
        return {
            "enabled": d.spec.enable_xavier,
            "epoch": d.epoch,
            "config": None if d.plan.cache is None else d.plan.to_wire()["xavier"],
            "replicas": rows,
            "totals": _totals([report for report in reports if report is not None]),
        }

    async def clear(self, model_uid: str) -> dict[str, Any]:
        """Make everything cached so far unreachable, everywhere; returns once all engines have confirmed, or after a while.

        Raises:
            ModelNotFound.
            InvalidRequest: the model has no shared cache.
        """
        d = self._state.deployment(model_uid)
        if not d.spec.enable_xavier:
            raise InvalidRequest(f"model {model_uid!r} was launched without Xavier: it has no shared cache to clear")
        before = await self._used_bytes(d)
        d.epoch += 1
        epoch = d.epoch
        self._state.controls.bump()
        await self.push_controls()
        held = [keeper for keeper in d.keepers.values() if keeper.state in HELD]
        confirmed = await asyncio.gather(*(self._confirmed(keeper, epoch) for keeper in held))
        pending = [keeper.uid for keeper, done in zip(held, confirmed, strict=True) if not done]
        freed = max(0, before - await self._used_bytes(d))
        status = "pending" if pending else "cleared"
        d.record(Stage.CACHE_CLEARED, f"epoch {epoch}: {status}, {freed} bytes freed", self._state.clock.wall())
        return {"status": status, "epoch": epoch, "pending": pending, "bytes_freed": freed}

    async def push_controls(self) -> None:
        """Bring every control page up to date. A worker that does not answer gets its states with its next heartbeat."""
        by_worker = self._state.controls_by_worker()
        await asyncio.gather(
            *(self._fleet.apply_controls(worker_id, controls) for worker_id, controls in by_worker.items()), return_exceptions=True
        )

    async def record(self, model_uid: str, replica_uid: str, request: str, wait_seconds: float) -> dict[str, Any] | None:
        """The accounting record of one request, or None if there is none in time. Raises ModelNotFound, NotFound."""
        keeper = self._state.replica(model_uid, replica_uid)
        try:
            found: dict[str, Any] | None = await self._fleet.ask(
                keeper.report, "request_record", request, wait_seconds, wait_seconds=wait_seconds
            )
        except Unreachable:
            return None
        return found

    async def recent(self, model_uid: str | None, limit: int) -> list[dict[str, Any]]:
        """The newest records of one model or of all, newest first. Raises ModelNotFound."""
        models = list(self._state.deployments.values()) if model_uid is None else [self._state.deployment(model_uid)]
        keepers = [k for d in models if d.spec.enable_xavier for k in d.keepers.values() if k.state in HELD]
        found = await asyncio.gather(*(self._recent(keeper, limit) for keeper in keepers))
        records = [record for some in found for record in some]
        records.sort(key=lambda record: record["times"]["queued"] or 0.0, reverse=True)
        return records[:limit]

    async def _recent(self, keeper: ReplicaKeeper, limit: int) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = await self._fleet.ask(keeper.report, "recent_requests", limit)
        except Unreachable:
            return []
        return found

    async def _report(self, keeper: ReplicaKeeper) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] | None = await self._fleet.ask(keeper.report, "cache_report")
        except Unreachable:
            return None
        return found

    async def _used_bytes(self, d: Deployment) -> int:
        reports = await asyncio.gather(*(self._report(keeper) for keeper in d.keepers.values()))
        return sum(report["tiers"]["cpu"]["used_bytes"] for report in reports if report is not None)

    async def _confirmed(self, keeper: ReplicaKeeper, epoch: int) -> bool:
        try:
            return bool(await self._fleet.ask(keeper.report, "epoch_confirmed", epoch, CONFIRM_SECONDS, wait_seconds=CONFIRM_SECONDS))
        except Unreachable:
            return False


def _row(d: Deployment, keeper: ReplicaKeeper, report: dict[str, Any] | None, keepers: list[ReplicaKeeper]) -> dict[str, Any]:
    mapped = None if report is None else frozenset(report["attached"])
    peers = [{"replica_uid": other.uid, **attachment(other, mapped)} for other in keepers if other is not keeper]
    return {
        "replica_uid": keeper.uid,
        "state": keeper.state.value,
        "namespace": None if report is None else report["namespace"],
        "epoch_confirmed": None if report is None else report["epoch_confirmed"],
        "tiers": {} if report is None else report["tiers"],
        "sources": dict.fromkeys(SOURCES, 0) if report is None else report["sources"],
        "counters": {} if report is None else report["counters"],
        "peers": peers if d.spec.enable_xavier else [],
    }


def attachment(other: ReplicaKeeper, mapped: frozenset[int] | None) -> dict[str, Any]:
    """Whether a replica has mapped another one's segment, and why not.

    Args:
        mapped: incarnations that the reading replica's own segment names; None if that cannot be read.
    """
    if mapped is not None and other.incarnation in mapped:
        return {"attached": True, "reason": None}
    if other.state is not ReplicaState.READY:
        return {"attached": False, "reason": other.state.value}
    return {"attached": False, "reason": "it has no segment itself" if mapped is None else "not mapped; the replica's log says why"}


def _totals(reports: list[dict[str, Any]]) -> dict[str, Any]:
    tiers = [report["tiers"]["cpu"] for report in reports]
    return {
        "sources": {source: sum(report["sources"][source] for report in reports) for source in SOURCES},
        "counters": {spec.name: sum(report["counters"][spec.name] for report in reports) for spec in COUNTERS},
        "tiers": {
            "cpu": {
                name: sum(tier[name] or 0 for tier in tiers)
                for name in ("budget_bytes", "file_bytes", "book_bytes", "used_bytes", "blocks", "capacity_blocks")
            }
        },
    }

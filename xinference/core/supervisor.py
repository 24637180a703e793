"""The supervisor actor: one for a cluster. Takes calls of the API and of workers, and forwards them; decides nothing itself."""

import asyncio
import logging
import secrets
from typing import Any

import xoscar as xo

from xinference.core.adoption import Adoption
from xinference.core.cache_service import CacheService
from xinference.core.clock import SystemClock
from xinference.core.cluster_state import ClusterState
from xinference.core.fleet import Fleet
from xinference.core.keeper import ReplicaKeeper
from xinference.core.launching import Launcher
from xinference.core.membership import Membership
from xinference.core.placement import Placement
from xinference.core.relaunch import RelaunchLimits
from xinference.core.replica_service import ReplicaService
from xinference.core.roster import Roster
from xinference.core.stalls import missed_seconds
from xinference.errors import ModelNotFound
from xinference.settings import Settings

logger = logging.getLogger(__name__)

SUPERVISOR_UID = "supervisor"
LONGEST_POLL_SECONDS = 60.0


class SupervisorActor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Stateless in xoscar's sense: no lock, so long polls do not hold up anything.

    Args:
        settings: as JSON values.
        host: identity of this machine's shared memory.
    """

    def __init__(self, settings: dict[str, Any], host: str) -> None:
        super().__init__()
        read = Settings.model_validate(settings)
        clock = SystemClock()
        self._state = ClusterState(Roster(read.worker_lost_seconds), clock, host, secrets.randbits(64) or 1)
        self._fleet = Fleet(self._state.roster)
        limits = RelaunchLimits(max_restarts=read.restarts, window_seconds=read.restart_window_seconds)

        def make_keeper(placement: Placement, surroundings: Any) -> ReplicaKeeper:
            return ReplicaKeeper(placement, surroundings, self._fleet, clock, limits)

        self._launcher = Launcher(self._state, self._fleet, make_keeper, read)
        self._replicas = ReplicaService(self._state, self._fleet, self._launcher, read.drain_seconds)
        self._cache = CacheService(self._state, self._fleet)
        self._membership = Membership(self._state, Adoption(self._state, self._launcher))
        self._heartbeat_seconds = read.heartbeat_seconds
        self._loops: list[asyncio.Task[None]] = []

    async def __post_create__(self) -> None:
        self._loops = [asyncio.create_task(self._expire_workers()), asyncio.create_task(self._push_controls())]

    async def __pre_destroy__(self) -> None:
        await self.shut_down(0.0)

    async def shut_down(self, grace_seconds: float) -> None:
        """Stop every model, as a server does that ends. Idempotent."""
        for loop in self._loops:
            loop.cancel()
        await self._replicas.close()
        stops = [self._launcher.terminate(uid, 0.0, grace_seconds) for uid in self._state.deployments]
        for error in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, ModelNotFound):
                logger.error("a model could not be stopped cleanly: %s", error)

    # ---- models

    async def launch_model(self, spec: dict[str, Any]) -> dict[str, Any]:
        return (await self._launcher.launch(spec)).to_wire()

    async def plan_model(self, spec: dict[str, Any]) -> dict[str, Any]:
        return await self._launcher.plan(spec)

    async def cancel_launch(self, model_uid: str) -> bool:
        return await self._launcher.cancel(model_uid)

    async def terminate_model(self, model_uid: str, drain_seconds: float) -> dict[str, Any]:
        await self._launcher.terminate(model_uid, drain_seconds)
        return {"model_uid": model_uid, "terminated": True}

    async def list_models(self) -> list[dict[str, Any]]:
        return [{**d.to_wire(), "cause": d.cause} for d in self._state.deployments.values()]

    async def describe_model(self, model_uid: str) -> dict[str, Any]:
        return await self._replicas.describe(model_uid)

    async def events(self, model_uid: str, after: int, wait_seconds: float) -> list[dict[str, Any]]:
        found = await self._state.history(model_uid).wait_after(after, min(wait_seconds, LONGEST_POLL_SECONDS))
        return [event.to_wire() for event in found]

    # ---- replicas

    async def list_replicas(self, model_uid: str) -> list[dict[str, Any]]:
        return await self._replicas.replicas(model_uid)

    async def scale_model(self, model_uid: str, replica: int) -> dict[str, Any]:
        return {"model_uid": model_uid, "replicas": self._replicas.scale(model_uid, replica)}

    async def add_replicas(self, model_uid: str, count: int) -> dict[str, Any]:
        return {"model_uid": model_uid, "replicas": self._replicas.add(model_uid, count)}

    async def remove_replica(self, model_uid: str, replica_uid: str, drain_seconds: float) -> dict[str, Any]:
        await self._replicas.remove(model_uid, replica_uid, drain_seconds)
        return {"model_uid": model_uid, "replica_uid": replica_uid, "removed": True}

    async def restart_replica(self, model_uid: str, replica_uid: str) -> dict[str, Any]:
        self._replicas.restart(model_uid, replica_uid)
        return {"model_uid": model_uid, "replica_uid": replica_uid, "restarting": True}

    async def logs(self, model_uid: str, replica_uid: str | None, tail: int, after: int | None = None) -> dict[str, Any]:
        return await self._replicas.logs(model_uid, replica_uid, tail, after)

    async def report_replica_failure(self, model_uid: str, replica_uid: str, incarnation: str) -> None:
        await self._replicas.doubt(model_uid, replica_uid, int(incarnation, 16))

    # ---- routes

    async def route_table(self, model_uid: str) -> dict[str, Any]:
        return {"version": self._state.routes.version, **self._state.deployment(model_uid).table()}

    async def route_changes(self, known_version: int, wait_seconds: float) -> dict[str, Any]:
        version = await self._state.routes.wait_for_newer(known_version, min(wait_seconds, LONGEST_POLL_SECONDS))
        return {"version": version, "models": self._state.tables()}

    # ---- cache and requests

    async def xavier_status(self, model_uid: str) -> dict[str, Any]:
        return await self._cache.status(model_uid)

    async def xavier_clear(self, model_uid: str) -> dict[str, Any]:
        return await self._cache.clear(model_uid)

    async def request_record(self, model_uid: str, replica_uid: str, request_hex: str, wait_seconds: float) -> dict[str, Any] | None:
        return await self._cache.record(model_uid, replica_uid, request_hex, wait_seconds)

    async def list_requests(self, model_uid: str | None, limit: int) -> list[dict[str, Any]]:
        return await self._cache.recent(model_uid, limit)

    # ---- cluster

    async def cluster(self) -> dict[str, Any]:
        return {"workers": len(self._state.roster.members), "models": len(self._state.deployments), "address": self.address}

    async def workers(self) -> list[dict[str, Any]]:
        return self._membership.workers()

    async def devices(self) -> list[dict[str, Any]]:
        return self._membership.devices()

    async def ready(self) -> bool:
        return bool(self._state.roster.members)

    # ---- called by workers

    async def register_worker(self, worker: dict[str, Any]) -> dict[str, Any]:
        return self._membership.register(worker)

    async def heartbeat(self, beat: dict[str, Any]) -> dict[str, Any]:
        return self._membership.heartbeat(beat)

    async def unregister_worker(self, worker_id: str, incarnation: int) -> None:
        self._membership.leave(worker_id, incarnation)

    # ---- loops

    async def _expire_workers(self) -> None:
        pause, clock = self._heartbeat_seconds / 2, self._state.clock
        while True:
            began = clock.now()
            await asyncio.sleep(pause)
            self._membership.expire(missed_seconds(began, clock.now(), pause))

    async def _push_controls(self) -> None:
        known = 0
        while True:
            known = await self._state.controls.wait_for_newer(known, LONGEST_POLL_SECONDS)
            await self._cache.push_controls()

"""Launch, cancel, terminate: a model's way into the list and out of it.

    parse ─> inspect (on a worker) ─> plan ─> claim ─> 202 ...  then, in the background: all replicas up, or none

Everything up to the claim answers with a 4xx and changes nothing. Between planning and claiming nothing is awaited, so two launches
cannot be promised the same device.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from xinference.core.cluster_state import ClusterState
from xinference.core.deployment import Deployment
from xinference.core.errors import CoreError, Unreachable
from xinference.core.events import Stage
from xinference.core.keeper import ReplicaKeeper, Surroundings
from xinference.core.orders import CacheOrder, Control, ReplicaOrder
from xinference.core.placement import Placement, Wish, place, workers_at
from xinference.core.plan import check_memory, plan_launch, room_on
from xinference.core.spec import Engine, LaunchSpec, parse_spec
from xinference.core.states import ENDED, HELD, ModelEvent, ModelState
from xinference.core.topology import ModelFacts
from xinference.errors import Conflict, InvalidRequest, ModelNotFound, NoReplicaAvailable, XinferenceError
from xinference.settings import Settings

logger = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 15.0  # for an engine to stop by itself; vLLM gives open requests 5 s after SIGTERM
MakeKeeper = Callable[[Placement, Surroundings], ReplicaKeeper]


class Inspectors(Protocol):
    """Workers that can read a model's directory."""

    async def inspect(self, worker_id: str, spec: LaunchSpec) -> ModelFacts: ...
    async def command(self, worker_id: str, order: ReplicaOrder) -> list[str]: ...


class DeploymentSurroundings:
    """What a keeper asks of its deployment: a place, an order, the present control state."""

    def __init__(self, state: ClusterState, deployment: Deployment, launch_seconds: float) -> None:
        self._state = state
        self._deployment = deployment
        self._launch_seconds = launch_seconds

    def choose(self, before: Placement) -> Placement:
        """The same place if its worker is there, else another one that fits; claimed."""
        chosen = self._find(before)
        held = self._state.roster.reservations.get(before.replica_uid)
        if held is None or held.placement != chosen:
            self._state.claim(self._deployment, [chosen])
        return chosen

    def no_place(self, before: Placement) -> str | None:
        try:
            self._find(before)
        except XinferenceError as error:
            return error.message
        return None

    def _find(self, before: Placement) -> Placement:
        d = self._deployment
        roster = self._state.roster
        there = roster.view(before.worker_id)
        if there is not None:
            users = {user for device in before.devices for user in there.users_of(device)} - {before.replica_uid}
            shared = before.gpu_memory_utilization is not None or "gpu_memory_utilization" in d.spec.engine_config
            if not users or shared:
                return before  # it fitted there before; its segment, which it will adopt, still counts as used
        snapshot = self._state.snapshot()
        chosen = place(d.spec, [Wish(before.replica_uid, d.spec.worker_ip, None)], snapshot)[0]
        check_memory(d.plan, room_on(next(w for w in snapshot.workers if w.worker_id == chosen.worker_id), 1))
        return chosen

    def release(self, replica_uid: str) -> None:
        self._state.roster.release(replica_uid)

    def order(self, placement: Placement, incarnation: int, log_start: int) -> ReplicaOrder:
        made = order_for(self._deployment, placement, incarnation, self._launch_seconds)
        return replace(made, log_start=log_start, issued_by=self._state.incarnation)

    def control(self, replica_uid: str, incarnation: int) -> Control:
        for control in self._state.controls_of(self._deployment):
            if control.replica_uid == replica_uid and control.incarnation == incarnation:
                return control
        return Control(replica_uid, incarnation, self._state.controls.version, self._deployment.epoch)

    def changed(self, keeper: ReplicaKeeper, message: str) -> None:
        state, d = self._state, self._deployment
        if keeper.state.value == "ready":
            state.roster.settle(keeper.uid)
        if keeper.log_tail:
            d.log_tails[keeper.uid] = keeper.log_tail
        d.record(STAGE_OF[keeper.state.value], message, state.clock.wall(), keeper.uid)
        state.changed(d)


STAGE_OF = {
    "creating": Stage.CREATING,
    "loading": Stage.LOADING,
    "ready": Stage.REPLICA_READY,
    "draining": Stage.DRAINING,
    "stopped": Stage.REPLICA_STOPPED,
    "failed": Stage.REPLICA_FAILED,
    "lost": Stage.REPLICA_LOST,
}


def order_for(d: Deployment, placement: Placement, incarnation: int, launch_seconds: float) -> ReplicaOrder:
    """What a worker is told about one engine start of this deployment."""
    spec, plan = d.spec, d.plan
    index = next((i for i, p in enumerate(plan.replicas) if p.replica_uid == placement.replica_uid), None)
    config = spec.engine_config if index is None else spec.engine_config_of(index)
    cache = None
    if plan.cache is not None:
        cache = CacheOrder(plan.cache.cpu_cache_bytes, d.facts.identity, d.epoch)
    return ReplicaOrder(
        model_uid=d.model_uid,
        replica_uid=placement.replica_uid,
        incarnation=incarnation,
        engine=spec.model_engine.value,
        model_path=spec.model_path or "",
        served_names=tuple(dict.fromkeys(name for name in (d.model_uid, spec.model_name) if name)),
        block_size=plan.block_size,
        max_model_len=plan.max_model_len,
        launch_seconds=launch_seconds,
        devices=placement.devices,
        kv_cache_bytes=plan.kv_cache_bytes,
        gpu_memory_utilization=placement.gpu_memory_utilization,
        engine_config=config,
        envs=spec.envs,
        cache=cache,
        num_threads=plan.num_threads,
        model={"spec": spec.to_wire(), "facts": d.facts.to_wire(), "plan": plan.to_wire(), "created": d.created},
    )


class Launcher:
    """Brings models up and takes them down.

    Args:
        state: the cluster's state.
        workers: calls to workers.
        make_keeper: makes the keeper of one replica.
    """

    def __init__(self, state: ClusterState, workers: Inspectors, make_keeper: MakeKeeper, settings: Settings) -> None:
        self._state = state
        self._workers = workers
        self._make_keeper = make_keeper
        self._settings = settings
        self._launches: dict[str, asyncio.Task[None]] = {}

    async def plan(self, body: dict[str, Any]) -> dict[str, Any]:
        """What a launch would do. Raises as ``launch``, and changes nothing."""
        spec, model_uid, facts = await self._inspect(body)
        plan = plan_launch(spec, model_uid, facts, self._state.snapshot())
        d = Deployment(model_uid, spec, facts, plan, self._state.clock.wall())
        first = plan.replicas[0]
        command = await self._workers.command(first.worker_id, order_for(d, first, 1, self._settings.launch_seconds))
        return {**plan.to_wire(), "command": command}

    async def launch(self, body: dict[str, Any]) -> Deployment:
        """Check, plan and claim, then start in the background.

        Raises:
            InvalidRequest and its kin, NoReplicaAvailable: nothing was changed.
        """
        spec, model_uid, facts = await self._inspect(body)
        self._refuse_double(model_uid)
        plan = plan_launch(spec, model_uid, facts, self._state.snapshot())
        d = Deployment(model_uid, spec, facts, plan, self._state.clock.wall())
        self._state.deployments.pop(model_uid, None)
        self._state.histories.pop(model_uid, None)
        self._state.deployments[model_uid] = d
        self._state.claim(d, plan.replicas)
        d.record(Stage.ACCEPTED, f"{spec.replica} replicas of {spec.model_path}", d.created)
        d.record(Stage.PLANNED, plan.cache.arithmetic if plan.cache else plan.arithmetic, d.created)
        for placement in plan.replicas:
            d.keepers[placement.replica_uid] = self.keeper(d, placement)
        self._launches[model_uid] = asyncio.create_task(self._launch(d))
        await asyncio.sleep(0)  # let it begin: a task that is cancelled before it began runs none of its own clean-up
        self._state.routes.bump()
        return d

    async def cancel(self, model_uid: str) -> bool:
        """Stop a launch that is under way and take back everything. False if there is none any more."""
        self._state.deployment(model_uid)
        task = self._launches.get(model_uid)
        if task is None or task.done():
            return False
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled() or self._state.deployment(model_uid).state is ModelState.CANCELLED

    async def terminate(self, model_uid: str, drain_seconds: float, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """End a model and remove it from the list; also how a failed one is removed.

        Args:
            drain_seconds: how long open requests may go on.
            grace_seconds: how long engines may take to stop by themselves after that.

        Raises:
            ModelNotFound.
        """
        d = self._state.deployment(model_uid)
        task = self._launches.pop(model_uid, None)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})
        if d.state is ModelState.TERMINATING:
            raise ModelNotFound(f"model {model_uid!r} is being terminated")
        d.move(ModelEvent.TERMINATE, self._state.clock.wall(), f"draining for up to {drain_seconds:g} s")
        self._state.changed(d)
        try:
            await stop_all(list(d.keepers.values()), drain_seconds, grace_seconds)
        finally:
            d.move(ModelEvent.TERMINATED, self._state.clock.wall(), "everything it held is released")
            self._state.drop(d)

    def keeper(self, d: Deployment, placement: Placement) -> ReplicaKeeper:
        surroundings = DeploymentSurroundings(self._state, d, self._settings.launch_seconds)
        return self._make_keeper(placement, surroundings)

    async def _inspect(self, body: dict[str, Any]) -> tuple[LaunchSpec, str, ModelFacts]:
        spec = parse_spec(body)
        if spec.model_engine is Engine.FAKE and not self._settings.allow_fake_engine:
            raise InvalidRequest(
                "model_engine=fake is for tests: the server must be started with XINFERENCE_ALLOW_FAKE_ENGINE=1", "model_engine"
            )
        model_uid = spec.served_name()
        self._refuse_double(model_uid)
        joined = self._state.snapshot().workers
        if not joined:
            raise NoReplicaAvailable("no worker has joined this cluster: start one with xinference-worker")
        workers = workers_at(spec.worker_ip, joined)
        try:
            return spec, model_uid, await self._workers.inspect(workers[0].worker_id, spec)
        except Unreachable as error:
            raise NoReplicaAvailable(f"worker {workers[0].worker_id} does not answer: {error.message}") from error

    def _refuse_double(self, model_uid: str) -> None:
        present = self._state.deployments.get(model_uid)
        if present is not None and present.state not in ENDED:
            raise Conflict(
                f"there is already a model {model_uid!r} ({present.state.value}): choose another model_uid, or terminate it", "model_uid"
            )

    async def _launch(self, d: Deployment) -> None:
        keepers = list(d.keepers.values())
        starts = [keeper.start() for keeper in keepers]
        try:
            await asyncio.gather(*starts)
        except asyncio.CancelledError:
            await self._roll_back(d, keepers)
            d.move(ModelEvent.CANCEL, self._state.clock.wall(), "cancelled on request")
            raise
        except (CoreError, XinferenceError) as error:
            failed = next((keeper.uid for keeper in keepers if keeper.state not in HELD), None)
            await self._roll_back(d, keepers, None if failed is None else f"stopped because {failed} failed")
            d.move(ModelEvent.FAIL, self._state.clock.wall(), error.message)
        except Exception:
            logger.exception("launching %s failed", d.model_uid)
            await self._roll_back(d, keepers)
            d.move(ModelEvent.FAIL, self._state.clock.wall(), "an internal error; see the server's log")
        else:
            d.move(ModelEvent.LAUNCHED, self._state.clock.wall())
            self._state.changed(d)
        finally:
            self._state.forget_old_failures()
            self._state.routes.bump()

    async def _roll_back(self, d: Deployment, keepers: list[ReplicaKeeper], cause: str | None = None) -> None:
        d.record(Stage.ROLLING_BACK, "releasing everything the launch took", self._state.clock.wall())
        await stop_all(keepers, 0.0, 0.0, cause)


async def stop_all(keepers: list[ReplicaKeeper], drain_seconds: float, grace_seconds: float, cause: str | None = None) -> None:
    """Stop replicas side by side; every one is attempted, then the first error is raised."""
    results = await asyncio.gather(
        *(keeper.stop(drain_seconds=drain_seconds, grace_seconds=grace_seconds, cause=cause) for keeper in keepers), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result

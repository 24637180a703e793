"""Scaling, restarting, removing and reading of single replicas."""

import asyncio
import logging
from typing import Any

from xinference.core.cluster_state import ClusterState
from xinference.core.deployment import Deployment, replica_wire
from xinference.core.errors import CoreError, Unreachable
from xinference.core.events import Stage
from xinference.core.fleet import Fleet
from xinference.core.keeper import ReplicaKeeper
from xinference.core.launching import STOP_GRACE_SECONDS, Launcher, stop_all
from xinference.core.placement import Wish, next_replica_uid, place
from xinference.core.plan import check_memory, room_on
from xinference.core.spec import MAX_REPLICAS
from xinference.core.states import HELD, SERVING, ReplicaState
from xinference.errors import Conflict, InvalidRequest, XinferenceError

logger = logging.getLogger(__name__)

LOG_TAIL_LINES = 2000  # at most, of one answer


class ReplicaService:
    """Operations on a model's replicas. Each background task is kept until it ends."""

    def __init__(self, state: ClusterState, fleet: Fleet, launcher: Launcher, drain_seconds: float) -> None:
        self._state = state
        self._fleet = fleet
        self._launcher = launcher
        self._drain_seconds = drain_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    async def describe(self, model_uid: str) -> dict[str, Any]:
        """The model with spec, plan, replicas and cause. Raises ModelNotFound."""
        d = self._state.deployment(model_uid)
        return {
            **d.to_wire(),
            "spec": d.spec.to_wire(),
            "plan": d.plan.to_wire(),
            "replicas": await self.replicas(model_uid),
            "cause": d.cause,
        }

    async def replicas(self, model_uid: str) -> list[dict[str, Any]]:
        keepers = list(self._state.deployment(model_uid).keepers.values())
        loads = await asyncio.gather(*(self._load(keeper) for keeper in keepers))
        return [replica_wire(keeper, load) for keeper, load in zip(keepers, loads, strict=True)]

    def scale(self, model_uid: str, replica: int) -> list[str]:
        """Change the number of replicas; returns the uids that are added or removed. The work goes on in the background.

        Raises:
            ModelNotFound, Conflict: it does not serve.
            InvalidRequest: out of range, or it does not fit; nothing was changed.
        """
        d = self._serving(model_uid)
        if not 1 <= replica <= MAX_REPLICAS:
            raise InvalidRequest(f"a model has 1 to {MAX_REPLICAS} replicas; to end it, terminate it", "replica")
        present = len([k for k in d.keepers.values() if not k.stopping])
        if replica > present:
            return self.add(model_uid, replica - present)
        leaving = sorted((k for k in d.keepers.values() if not k.stopping), key=_removal_order)[: present - replica]
        for keeper in leaving:
            self._spawn(self._remove(d, keeper, self._drain_seconds))
        return [keeper.uid for keeper in leaving]

    def add(self, model_uid: str, count: int) -> list[str]:
        """Start more replicas, with the budgets of the launch. Raises as ``scale``."""
        d = self._serving(model_uid)
        if count < 1 or len(d.keepers) + count > MAX_REPLICAS:
            raise InvalidRequest(f"a model has 1 to {MAX_REPLICAS} replicas", "count")
        added = []
        try:
            for _ in range(count):
                added.append(self._claim_one(d))  # noqa: PERF401 (what was claimed before a failure has to be known)
        except XinferenceError:
            for keeper in added:
                self._state.roster.release(keeper.uid)
                del d.keepers[keeper.uid]
            raise
        d.record(Stage.SCALING, f"adding {count}", self._state.clock.wall())
        for keeper in added:
            self._spawn(self._start(d, keeper))
        self._state.changed(d)
        return [keeper.uid for keeper in added]

    async def remove(self, model_uid: str, replica_uid: str, drain_seconds: float) -> None:
        """Drain and remove one replica. Raises ModelNotFound, NotFound, Conflict: it is the last one."""
        d = self._serving(model_uid)
        keeper = self._state.replica(model_uid, replica_uid)
        if len(d.keepers) == 1:
            raise Conflict(f"{replica_uid!r} is the last replica of {model_uid!r}: terminate the model instead", "replica_uid")
        await self._remove(d, keeper, drain_seconds)

    def restart(self, model_uid: str, replica_uid: str) -> None:
        """Drain, stop and start one replica, in the background; its segment stays. Raises ModelNotFound, NotFound, Conflict."""
        d = self._serving(model_uid)
        keeper = self._state.replica(model_uid, replica_uid)
        if keeper.stopping:
            raise Conflict(f"replica {replica_uid!r} is being removed", "replica_uid")
        d.record(Stage.RELAUNCHING, "restart on request", self._state.clock.wall(), replica_uid)
        self._spawn(keeper.restart(self._drain_seconds, STOP_GRACE_SECONDS))

    async def logs(self, model_uid: str, replica_uid: str | None, tail: int, after: int | None) -> dict[str, Any]:
        """Log lines of one replica, or the tails of all, each line with its replica's name.

        Raises:
            ModelNotFound, NotFound.
            InvalidRequest: ``after`` without a replica where there are several.
        """
        d = self._state.deployment(model_uid)
        tail = max(0, min(tail, LOG_TAIL_LINES))
        if replica_uid is None and len(d.keepers) == 1:
            replica_uid = next(iter(d.keepers))
        if replica_uid is not None:
            lines, following = await self._log(d, self._state.replica(model_uid, replica_uid), tail, after)
            return {"text": "".join(f"{line}\n" for line in lines), "next": following}
        if after is not None:
            raise InvalidRequest("name a replica to follow its log", "replica")
        parts = []
        for keeper in d.keepers.values():
            lines, _ = await self._log(d, keeper, tail, None)
            parts += [f"[{keeper.uid}] {line}\n" for line in lines]
        return {"text": "".join(parts), "next": 0}

    async def doubt(self, model_uid: str, replica_uid: str, incarnation: int) -> None:
        """Somebody saw a broken connection: have the replica looked at now instead of at the next probe."""
        keeper = self._state.replica(model_uid, replica_uid)
        if keeper.incarnation == incarnation and keeper.state in HELD:
            try:
                await self._fleet.check_replica(keeper.placement.worker_id, replica_uid, incarnation)
            except Unreachable as error:
                logger.warning("replica %s could not be looked at: %s", replica_uid, error)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _log(self, d: Deployment, keeper: ReplicaKeeper, tail: int, after: int | None) -> tuple[list[str], int]:
        """Lines of the present engine start; before them, if there is room, the last ones of a start that failed."""
        kept = list(d.log_tails.get(keeper.uid, ()))
        try:
            lines, following = await self._fleet.ask(keeper.report, "logs", tail, after)
        except Unreachable:  # no process: what its last one left behind
            following = keeper.report.log_next
            skipped = 0 if after is None else max(0, after - (following - len(kept)))
            return (kept[skipped:][-tail:] if tail else []), following
        if after is None:
            lines = (kept + list(lines))[-tail:] if tail else []
        return list(lines), following

    async def _load(self, keeper: ReplicaKeeper) -> tuple[int, int] | None:
        if keeper.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            return None
        try:
            return await self._fleet.load(keeper.report)
        except Unreachable:
            return None

    def _serving(self, model_uid: str) -> Deployment:
        d = self._state.deployment(model_uid)
        if d.state not in SERVING:
            raise Conflict(f"model {model_uid!r} is {d.state.value}", "model_uid")
        return d

    def _claim_one(self, d: Deployment) -> ReplicaKeeper:
        snapshot = self._state.snapshot()
        uid = next_replica_uid(list(d.keepers), d.model_uid, snapshot.replica_uids)
        placement = place(d.spec, [Wish(uid, d.spec.worker_ip, None)], snapshot)[0]
        check_memory(d.plan, room_on(next(w for w in snapshot.workers if w.worker_id == placement.worker_id), 1))
        self._state.claim(d, [placement])
        keeper = self._launcher.keeper(d, placement)
        d.keepers[uid] = keeper
        return keeper

    async def _start(self, d: Deployment, keeper: ReplicaKeeper) -> None:
        try:
            await keeper.start()
        except (CoreError, XinferenceError) as error:
            d.record(Stage.REPLICA_FAILED, f"could not be added: {error.message}", self._state.clock.wall(), keeper.uid)
            await self._remove(d, keeper, 0.0)

    async def _remove(self, d: Deployment, keeper: ReplicaKeeper, drain_seconds: float) -> None:
        await stop_all([keeper], drain_seconds, STOP_GRACE_SECONDS)
        d.keepers.pop(keeper.uid, None)
        self._state.changed(d)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("an operation on a replica failed", exc_info=task.exception())


def _removal_order(keeper: ReplicaKeeper) -> tuple[bool, float]:
    """Those that do not serve go first, then the youngest."""
    return keeper.state is ReplicaState.READY, -keeper.since

"""All that the supervisor knows: workers, models, and who has to be told when something changes."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from xinference.core.changes import Changes
from xinference.core.clock import Clock
from xinference.core.deployment import Deployment
from xinference.core.events import EventLog
from xinference.core.keeper import ReplicaKeeper
from xinference.core.orders import Control
from xinference.core.peers import Sharer, controls_for
from xinference.core.placement import Placement
from xinference.core.roster import Roster
from xinference.core.states import ENDED, ModelState
from xinference.core.topology import Snapshot
from xinference.errors import ModelNotFound, NotFound

VERSION_BITS = 20  # changes within a second of a supervisor's start, after which the next start's versions might be older
MAX_ENDED = 32  # failed and cancelled launches that stay listed, and histories of terminated models, each


@dataclass
class ClusterState:
    """One event loop only.

    Args:
        host: identity of the supervisor's own shared memory: replicas are reached from here.
        incarnation: number of this supervisor's start, drawn at random.
        routes, controls: their versions begin with the time, so that those of a supervisor that was started anew are newer than its
            predecessor's: workers and APIs drop what is older than what they have.
    """

    roster: Roster
    clock: Clock
    host: str
    incarnation: int = 0
    deployments: dict[str, Deployment] = field(default_factory=dict)
    histories: OrderedDict[str, EventLog] = field(default_factory=OrderedDict)
    routes: Changes = field(init=False)
    controls: Changes = field(init=False)

    def __post_init__(self) -> None:
        first = int(self.clock.wall()) << VERSION_BITS
        self.routes, self.controls = Changes(first), Changes(first)

    def deployment(self, model_uid: str) -> Deployment:
        """Raises ModelNotFound."""
        found = self.deployments.get(model_uid)
        if found is None:
            raise ModelNotFound(f"there is no model {model_uid!r}")
        return found

    def replica(self, model_uid: str, replica_uid: str) -> ReplicaKeeper:
        """Raises ModelNotFound, NotFound."""
        keeper = self.deployment(model_uid).keepers.get(replica_uid)
        if keeper is None:
            raise NotFound(f"model {model_uid!r} has no replica {replica_uid!r}", "replica_uid")
        return keeper

    def history(self, model_uid: str) -> EventLog:
        """Events of a model, also of one that was terminated a while ago. Raises ModelNotFound."""
        found = self.deployments.get(model_uid)
        events = found.events if found is not None else self.histories.get(model_uid)
        if events is None:
            raise ModelNotFound(f"there is no model {model_uid!r}")
        return events

    def snapshot(self) -> Snapshot:
        live = (uid for d in self.deployments.values() if d.state not in ENDED for uid in d.keepers)
        return self.roster.snapshot(self.host, live)

    def claim(self, deployment: Deployment, placements: tuple[Placement, ...] | list[Placement]) -> None:
        """Reserve what these replicas of the deployment's plan will take."""
        for placement in placements:
            self.roster.reserve(placement, deployment.plan.memory_bytes_each)

    def changed(self, deployment: Deployment) -> None:
        """Something about a model's replicas changed: routes and control pages follow."""
        deployment.follow_replicas(self.clock.wall())
        self.routes.bump()
        if deployment.spec.enable_xavier:
            self.controls.bump()

    def drop(self, deployment: Deployment) -> None:
        """A terminated model leaves the list; its history can be read for a while."""
        self.deployments.pop(deployment.model_uid, None)
        self.histories[deployment.model_uid] = deployment.events
        while len(self.histories) > MAX_ENDED:
            self.histories.popitem(last=False)
        self.routes.bump()

    def forget_old_failures(self) -> None:
        """Keep the list of failed and cancelled launches bounded, oldest out."""
        ended = [d for d in self.deployments.values() if d.state in (ModelState.FAILED, ModelState.CANCELLED)]
        for deployment in sorted(ended, key=lambda d: d.created)[: max(0, len(ended) - MAX_ENDED)]:
            self.drop(deployment)

    def tables(self) -> dict[str, Any]:
        """Route tables of all models, whole: a model that is not in it is gone."""
        return {uid: {"version": self.routes.version, **deployment.table()} for uid, deployment in self.deployments.items()}

    def controls_of(self, deployment: Deployment) -> list[Control]:
        """What each control page of a model's replicas shall say now."""
        sharers = []
        for keeper in deployment.keepers.values():
            member = self.roster.members.get(keeper.placement.worker_id)
            if member is not None:
                sharers.append(
                    Sharer(keeper.placement.worker_id, member.facts.host, keeper.uid, keeper.incarnation, keeper.state, keeper.flushing)
                )
        return controls_for(sharers, deployment.epoch, self.controls.version)

    def controls_by_worker(self) -> dict[str, list[Control]]:
        """Control states of every sharing replica, by the worker that has to write them."""
        by_worker: dict[str, list[Control]] = {}
        for deployment in self.deployments.values():
            if not deployment.spec.enable_xavier:
                continue
            for control in self.controls_of(deployment):
                worker_id = deployment.keepers[control.replica_uid].placement.worker_id
                by_worker.setdefault(worker_id, []).append(control)
        return by_worker

    def keepers_on(self, worker_id: str) -> dict[str, ReplicaKeeper]:
        """The replicas that are placed on this worker now, whatever has become of them."""
        return {
            keeper.uid: keeper
            for deployment in self.deployments.values()
            if deployment.state not in ENDED
            for keeper in deployment.keepers.values()
            if keeper.placement.worker_id == worker_id
        }

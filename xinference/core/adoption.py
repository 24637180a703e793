"""A supervisor that was started anew takes over the models that its workers still run, so that its end is nobody's but its own.

Workers tell with their registration what they run and by whose order. Orders of this supervisor itself are not adopted: it knows what it
wants, and a worker that was away may still run what was given up meanwhile. Only replicas that serve are adopted; one that was starting
when its supervisor died is removed, and is not started again: nobody knows any more that it was wanted.
"""

import logging
from typing import Any

from xinference.core.cluster_state import ClusterState
from xinference.core.deployment import Deployment
from xinference.core.events import Stage
from xinference.core.launching import Launcher
from xinference.core.orders import Control, ReplicaOrder, ReplicaReport
from xinference.core.placement import Placement
from xinference.core.plan import LaunchPlan
from xinference.core.roster import Member
from xinference.core.spec import parse_spec
from xinference.core.states import ModelEvent, ReplicaState
from xinference.core.topology import ModelFacts
from xinference.errors import XinferenceError

logger = logging.getLogger(__name__)


class Adoption:
    """Rebuilds deployments from the orders that workers hold."""

    def __init__(self, state: ClusterState, launcher: Launcher) -> None:
        self._state = state
        self._launcher = launcher

    def adopt(self, member: Member, running: list[dict[str, Any]]) -> None:
        """Take over what a worker runs.

        Args:
            running: {order, report, control} of each of its replicas, as wire dicts.
        """
        for entry in running:
            try:
                order = ReplicaOrder.from_wire(entry["order"])
                report = ReplicaReport.from_wire(entry["report"])
                if self._is_wanted(order, report):
                    self._adopt_one(member, order, report, Control.from_wire(entry["control"]))
            except (XinferenceError, KeyError, TypeError, ValueError) as error:  # of another version: it is removed as unwanted
                logger.warning("a replica of worker %s cannot be adopted: %s", member.worker_id, error)

    def _is_wanted(self, order: ReplicaOrder, report: ReplicaReport) -> bool:
        terminated_meanwhile = order.model_uid in self._state.histories
        return report.state == ReplicaState.READY and order.issued_by != self._state.incarnation and not terminated_meanwhile

    def _adopt_one(self, member: Member, order: ReplicaOrder, report: ReplicaReport, control: Control) -> None:
        d = self._state.deployments.get(order.model_uid)
        if d is None:
            d = self._rebuild(order)
        elif order.replica_uid in d.keepers:
            return
        d.epoch = max(d.epoch, control.epoch)
        placement = Placement(order.replica_uid, member.worker_id, order.devices, order.gpu_memory_utilization)
        self._state.claim(d, [placement])
        self._state.roster.settle(order.replica_uid)
        keeper = self._launcher.keeper(d, placement)
        d.keepers[order.replica_uid] = keeper
        keeper.adopt(report)
        d.record(Stage.REPLICA_READY, "found running", self._state.clock.wall(), order.replica_uid)
        d.move(ModelEvent.LAUNCHED, self._state.clock.wall())
        self._state.changed(d)

    def _rebuild(self, order: ReplicaOrder) -> Deployment:
        model = order.model
        d = Deployment(
            order.model_uid,
            parse_spec(model["spec"]),
            ModelFacts.from_wire(model["facts"]),
            LaunchPlan.from_wire(model["plan"]),
            model["created"],
        )
        self._state.deployments[order.model_uid] = d
        d.record(Stage.ACCEPTED, "adopted from a worker that runs it", self._state.clock.wall())
        return d

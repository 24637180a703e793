"""A supervisor that was started anew takes over what its workers run."""

from dataclasses import replace
from typing import Any

from xinference.core.adoption import Adoption
from xinference.core.cluster_state import ClusterState
from xinference.core.deployment import Deployment
from xinference.core.events import EventLog
from xinference.core.keeper import ReplicaKeeper, Surroundings
from xinference.core.launching import Launcher, order_for
from xinference.core.membership import Membership
from xinference.core.orders import Control, ReplicaOrder, ReplicaReport
from xinference.core.placement import Placement
from xinference.core.plan import plan_launch
from xinference.core.relaunch import RelaunchLimits
from xinference.core.roster import Roster
from xinference.core.spec import LaunchSpec, parse_spec
from xinference.core.states import ModelState, ReplicaState
from xinference.core.test.fakes import FakeWorkers, ManualClock, facts, model, settle, snapshot
from xinference.core.topology import ModelFacts
from xinference.settings import Settings

FORMER, PRESENT = 11, 22


class NoInspectors:
    """Nothing is inspected when a model is adopted."""

    async def inspect(self, worker_id: str, spec: LaunchSpec) -> ModelFacts:
        raise AssertionError("not asked")

    async def command(self, worker_id: str, order: ReplicaOrder) -> list[str]:
        raise AssertionError("not asked")


class Anew:
    """A supervisor that knows nothing yet."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.state = ClusterState(Roster(5.0), self.clock, "boot.1", PRESENT)
        self.workers = FakeWorkers()
        launcher = Launcher(self.state, NoInspectors(), self._keeper, Settings())
        self.membership = Membership(self.state, Adoption(self.state, launcher))

    def _keeper(self, placement: Placement, surroundings: Surroundings) -> ReplicaKeeper:
        return ReplicaKeeper(placement, surroundings, self.workers, self.clock, RelaunchLimits())

    async def register(self, *running: dict[str, Any], worker_id: str = "w1") -> None:
        self.membership.register(
            {"worker_id": worker_id, "incarnation": 1, "address": "a", "facts": facts().to_wire(), "running": list(running)}
        )
        await settle()

    def model_state(self) -> ModelState:
        return self.state.deployment("m").state

    async def end(self) -> None:
        for deployment in self.state.deployments.values():
            for keeper in deployment.keepers.values():
                await keeper.stop(drain_seconds=0.0, grace_seconds=0.0)


def entry(uid: str = "m-0", incarnation: int = 7, state: str = "ready", issued_by: int = FORMER, epoch: int = 1) -> dict[str, Any]:
    """What a worker tells of one replica."""
    spec = parse_spec({"model_path": "/m", "replica": 2, "enable_xavier": True, "xavier_cpu_cache_bytes": "64MiB"})
    deployment = Deployment("m", spec, model(), plan_launch(spec, "m", model(), snapshot()), 5.0)
    order = replace(order_for(deployment, Placement(uid, "w1"), incarnation, 60.0), issued_by=issued_by)
    report = ReplicaReport("m", uid, incarnation, state, pid=9, uds="/s", address="a")
    return {"order": order.to_wire(), "report": report.to_wire(), "control": Control(uid, incarnation, 3, epoch).to_wire()}


async def test_a_serving_model_is_adopted_with_its_incarnations_its_spec_and_its_epoch() -> None:
    anew = Anew()
    await anew.register(entry("m-0", 7, epoch=4), entry("m-1", 8, epoch=3))
    deployment = anew.state.deployment("m")
    assert (anew.model_state(), deployment.epoch, deployment.created) == (ModelState.READY, 4, 5.0)
    assert {uid: keeper.incarnation for uid, keeper in deployment.keepers.items()} == {"m-0": 7, "m-1": 8}
    assert anew.workers.orders == []
    assert [replica["replica_uid"] for replica in anew.state.tables()["m"]["replicas"]] == ["m-0", "m-1"]
    assert set(anew.state.roster.reservations) == {"m-0", "m-1"}
    await anew.end()


async def test_an_adopted_replica_is_kept_like_any_other() -> None:
    anew = Anew()
    await anew.register(entry("m-0", 7))
    keeper = anew.state.deployment("m").keepers["m-0"]
    keeper.take_report(ReplicaReport("m", "m-0", 7, "failed", cause="killed"))
    await settle()
    assert anew.workers.removals == [("m-0", 7, True)]
    await anew.clock.move(0.6)
    assert keeper.state is ReplicaState.READY
    assert keeper.incarnation != 7
    await anew.end()
    assert anew.state.roster.reservations == {}


async def test_replicas_of_one_model_come_together_from_several_workers() -> None:
    anew = Anew()
    await anew.register(entry("m-0", 7))
    await anew.register(entry("m-1", 8), worker_id="w2")
    places = {uid: keeper.placement.worker_id for uid, keeper in anew.state.deployment("m").keepers.items()}
    assert places == {"m-0": "w1", "m-1": "w2"}
    await anew.end()


async def test_an_order_of_this_supervisor_itself_is_not_adopted() -> None:
    anew = Anew()
    await anew.register(entry(issued_by=PRESENT))
    assert anew.state.deployments == {}


async def test_a_model_that_was_terminated_meanwhile_does_not_come_back() -> None:
    anew = Anew()
    anew.state.histories["m"] = EventLog()
    await anew.register(entry())
    assert anew.state.deployments == {}


async def test_a_replica_that_does_not_serve_is_not_adopted() -> None:
    anew = Anew()
    await anew.register(entry(state="loading"))
    assert anew.state.deployments == {}


async def test_a_replica_that_has_a_keeper_already_keeps_that_one() -> None:
    anew = Anew()
    await anew.register(entry("m-0", 7))
    await anew.register(entry("m-0", 9), worker_id="w2")
    assert anew.state.deployment("m").keepers["m-0"].incarnation == 7
    await anew.end()


async def test_an_order_of_another_version_is_left_to_be_removed() -> None:
    anew = Anew()
    strange = entry()
    strange["order"]["model"]["spec"]["engine_config"] = {"a_new_argument": 1}
    half = entry("m-1", 8)
    del half["order"]["model"]["plan"]
    longer = entry("m-2", 9)
    longer["order"]["a_new_field"] = 1
    await anew.register(strange, half, longer)
    assert anew.state.deployments == {}


async def test_versions_begin_after_those_of_any_former_supervisor() -> None:
    anew = Anew()
    version = anew.state.controls.version
    await anew.clock.move(1.0)
    assert ClusterState(Roster(5.0), anew.clock, "boot.1").controls.version > version + 1000

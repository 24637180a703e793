"""A model's way into the list and out of it: all replicas up, or none, and nothing left."""

import asyncio
from typing import Any

import pytest

from xinference.core.cluster_state import MAX_ENDED, ClusterState
from xinference.core.keeper import ReplicaKeeper, Surroundings
from xinference.core.launching import Launcher
from xinference.core.orders import Control, ReplicaOrder, ReplicaReport
from xinference.core.placement import Placement
from xinference.core.relaunch import RelaunchLimits
from xinference.core.roster import Member, Roster
from xinference.core.spec import LaunchSpec
from xinference.core.states import ModelState, ReplicaState
from xinference.core.test.fakes import FakeWorkers, ManualClock, devices, facts, model, settle
from xinference.core.topology import ModelFacts
from xinference.errors import Conflict, InvalidRequest, ModelNotFound, NoReplicaAvailable
from xinference.settings import Settings

BODY = {"model_path": "/models/m", "replica": 2, "enable_xavier": True, "xavier_cpu_cache_bytes": "64MiB"}


class Inspecting:
    """The workers' other half: reading models."""

    def __init__(self) -> None:
        self.facts = model()
        self.refusal: Exception | None = None

    async def inspect(self, worker_id: str, spec: LaunchSpec) -> ModelFacts:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        return self.facts

    async def command(self, worker_id: str, order: ReplicaOrder) -> list[str]:
        return ["serve", order.replica_uid]


class Choosy(FakeWorkers):
    """Workers that hold or fail the start of one replica only."""

    def __init__(self) -> None:
        super().__init__()
        self.only: str | None = None

    async def start_replica(self, worker_id: str, order: ReplicaOrder, control: Control) -> ReplicaReport:
        if self.only in (None, order.replica_uid):
            return await super().start_replica(worker_id, order, control)
        hold, fail, self.hold, self.fail = self.hold, self.fail, False, None
        try:
            return await super().start_replica(worker_id, order, control)
        finally:
            self.hold, self.fail = hold, fail


class Cluster:
    """A launcher with its fakes and one worker."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.state = ClusterState(Roster(5.0), self.clock, "boot.1")
        self.workers = Choosy()
        self.inspecting = Inspecting()
        self.launcher = Launcher(self.state, self.inspecting, self._keeper, Settings(allow_fake_engine=False))
        self.state.roster.register(Member("w1", 1, "a", facts(), self.clock.now()))

    def _keeper(self, placement: Placement, surroundings: Surroundings) -> ReplicaKeeper:
        return ReplicaKeeper(placement, surroundings, self.workers, self.clock, RelaunchLimits())

    async def launch(self, **changes: Any) -> ModelState:
        deployment = await self.launcher.launch({**BODY, **changes})
        await settle(100)
        return deployment.state

    def model_state(self) -> ModelState:
        return self.state.deployment("m").state

    def stages(self, uid: str = "m") -> list[str]:
        return [event.stage.value for event in self.state.history(uid).after(0)]

    def assert_nothing_is_held(self) -> None:
        assert self.workers.running == {}
        assert self.state.roster.reservations == {}


async def test_a_launch_ends_ready_with_its_replicas_in_the_route_table() -> None:
    cluster = Cluster()
    assert await cluster.launch() is ModelState.READY
    table = cluster.state.tables()["m"]
    assert [replica["replica_uid"] for replica in table["replicas"]] == ["m-0", "m-1"]
    assert table["replicas"][0]["endpoint"] == {"uds": "/s"}
    assert table["model"]["xavier"] is True
    assert cluster.stages()[-1] == "ready"
    await cluster.launcher.terminate("m", 0.0)
    cluster.assert_nothing_is_held()


async def test_progress_grows_from_0_to_1() -> None:
    cluster = Cluster()
    await cluster.launch()
    progress = [event.progress for event in cluster.state.history("m").after(0)]
    assert progress == sorted(progress)
    assert (progress[0], progress[-1]) == (0.0, 1.0)
    await cluster.launcher.terminate("m", 0.0)


@pytest.mark.parametrize("failing", ["m-0", "m-1"])
async def test_one_replica_that_fails_takes_the_whole_launch_back_and_it_stays_listed_with_its_cause(failing: str) -> None:
    cluster = Cluster()
    cluster.workers.only, cluster.workers.fail = failing, OSError("out of memory")
    assert await cluster.launch() is ModelState.FAILED
    deployment = cluster.state.deployment("m")
    assert deployment.cause == f"replica {failing}: out of memory"
    assert cluster.stages()[-1] == "failed"
    assert cluster.state.tables()["m"]["replicas"] == []
    cluster.assert_nothing_is_held()
    other = {"m-0": "m-1", "m-1": "m-0"}[failing]
    told = {uid: (keeper.state, keeper.cause) for uid, keeper in deployment.keepers.items()}
    assert told == {
        failing: (ReplicaState.FAILED, "out of memory"),
        other: (ReplicaState.STOPPED, f"stopped because {failing} failed"),
    }


@pytest.mark.parametrize("held", ["m-0", "m-1"])
async def test_a_cancelled_launch_is_taken_back_at_whatever_point(held: str) -> None:
    cluster = Cluster()
    cluster.workers.only, cluster.workers.hold = held, True
    assert await cluster.launch() is ModelState.LAUNCHING
    assert await cluster.launcher.cancel("m") is True
    assert cluster.model_state() is ModelState.CANCELLED
    assert cluster.stages()[-1] == "cancelled"
    assert {keeper.state for keeper in cluster.state.deployment("m").keepers.values()} == {ReplicaState.STOPPED}
    cluster.assert_nothing_is_held()


async def test_a_launch_that_is_cancelled_before_its_first_step_holds_nothing() -> None:
    cluster = Cluster()
    await cluster.launcher.launch(BODY)
    assert await cluster.launcher.cancel("m") is True
    assert cluster.model_state() is ModelState.CANCELLED
    cluster.assert_nothing_is_held()


async def test_a_launch_that_is_over_cannot_be_cancelled() -> None:
    cluster = Cluster()
    await cluster.launch()
    assert await cluster.launcher.cancel("m") is False
    assert cluster.model_state() is ModelState.READY
    await cluster.launcher.terminate("m", 0.0)


async def test_terminating_a_launch_under_way_cancels_it_and_leaves_nothing() -> None:
    cluster = Cluster()
    cluster.workers.hold = True
    await cluster.launch()
    await cluster.launcher.terminate("m", 0.0)
    with pytest.raises(ModelNotFound):
        cluster.state.deployment("m")
    assert cluster.stages()[-2:] == ["terminating", "terminated"]
    cluster.assert_nothing_is_held()


async def test_a_bad_request_changes_nothing() -> None:
    cluster = Cluster()
    for refusal, body in [
        (InvalidRequest("no such model", "model_path"), BODY),
        (None, {**BODY, "xavier_cpu_cache_bytes": "100GiB"}),
        (None, {**BODY, "replica": 1}),
        (None, {**BODY, "model_engine": "fake"}),
    ]:
        cluster.inspecting.refusal = refusal
        with pytest.raises(InvalidRequest):
            await cluster.launcher.launch(body)
    assert cluster.state.deployments == {}
    cluster.assert_nothing_is_held()


async def test_two_models_cannot_have_one_name_but_a_failed_launch_may_be_repeated() -> None:
    cluster = Cluster()
    cluster.workers.fail = OSError("no")
    await cluster.launch()
    cluster.workers.fail = None
    assert await cluster.launch() is ModelState.READY
    with pytest.raises(Conflict, match="already a model 'm'"):
        await cluster.launcher.launch(BODY)
    await cluster.launcher.terminate("m", 0.0)


async def test_two_launches_of_one_name_at_once_are_one_launch_and_one_conflict() -> None:
    cluster = Cluster()
    results = await asyncio.gather(cluster.launcher.launch(BODY), cluster.launcher.launch(BODY), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Conflict", "Deployment"]
    await settle()
    await cluster.launcher.terminate("m", 0.0)
    cluster.assert_nothing_is_held()


async def test_two_launches_cannot_be_promised_the_same_memory() -> None:
    cluster = Cluster()
    half = {"model_path": "/m", "replica": 1, "kv_cache_memory_bytes": 11 << 30}
    results = await asyncio.gather(
        cluster.launcher.launch({**half, "model_uid": "a"}), cluster.launcher.launch({**half, "model_uid": "b"}), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == ["Deployment", "InvalidRequest"]
    await settle()
    await cluster.launcher.terminate("a", 0.0)
    cluster.assert_nothing_is_held()


async def test_a_dry_run_returns_the_plan_with_its_command_and_changes_nothing() -> None:
    cluster = Cluster()
    plan = await cluster.launcher.plan(BODY)
    assert plan["command"] == ["serve", "m-0"]
    assert plan["xavier"]["blocks"] > 0
    assert cluster.state.deployments == {}
    cluster.assert_nothing_is_held()


async def test_a_named_worker_that_is_not_there_is_refused_with_those_that_are() -> None:
    cluster = Cluster()
    with pytest.raises(InvalidRequest, match=r"workers are at 127\.0\.0\.1") as caught:
        await cluster.launcher.launch({**BODY, "worker_ip": "10.9.9.9"})
    assert caught.value.param == "worker_ip"


async def test_without_a_worker_there_is_no_launch() -> None:
    cluster = Cluster()
    cluster.state.roster.members.clear()
    with pytest.raises(NoReplicaAvailable):
        await cluster.launcher.launch(BODY)


async def test_a_model_is_degraded_while_one_replica_is_away_and_recovers() -> None:
    cluster = Cluster()
    await cluster.launch()
    deployment = cluster.state.deployment("m")
    keeper = deployment.keepers["m-0"]
    keeper.take_report(ReplicaReport("m", "m-0", keeper.incarnation, "failed", cause="killed"))
    await settle()
    assert cluster.model_state() is ModelState.DEGRADED
    assert [replica["replica_uid"] for replica in cluster.state.tables()["m"]["replicas"]] == ["m-1"]
    await cluster.clock.move(0.6)
    assert cluster.model_state() is ModelState.READY
    assert "replica_failed" in cluster.stages()
    await cluster.launcher.terminate("m", 0.0)


async def test_a_replica_whose_worker_is_lost_comes_up_on_another_of_the_host() -> None:
    cluster = Cluster()
    await cluster.launch()
    cluster.state.roster.register(Member("w2", 2, "b", facts(), cluster.clock.now()))
    del cluster.state.roster.members["w1"]
    for keeper in cluster.state.deployment("m").keepers.values():
        keeper.worker_lost("silent")
    await settle()
    assert cluster.model_state() is ModelState.UNAVAILABLE
    await cluster.clock.move(0.6)
    assert {worker for worker, _ in cluster.workers.running.values()} == {"w2"}
    assert cluster.model_state() is ModelState.READY
    await cluster.launcher.terminate("m", 0.0)
    cluster.assert_nothing_is_held()


async def test_a_replica_comes_up_where_it_was_although_another_worker_is_emptier() -> None:
    cluster = Cluster()
    await cluster.launch()
    cluster.state.roster.register(Member("w0", 2, "b", facts(), cluster.clock.now()))
    keeper = cluster.state.deployment("m").keepers["m-0"]
    keeper.take_report(ReplicaReport("m", "m-0", keeper.incarnation, "failed", cause="killed"))
    await cluster.clock.move(0.6)
    assert cluster.workers.running["m-0"][0] == "w1"
    await cluster.launcher.terminate("m", 0.0)


async def test_a_replica_whose_device_was_taken_meanwhile_gets_another() -> None:
    cluster = Cluster()
    cluster.state.roster.register(Member("w1", 1, "a", facts(devices=devices(2)), cluster.clock.now()))
    plain = {"enable_xavier": False, "xavier_cpu_cache_bytes": None, "replica": 1}
    await cluster.launch(**plain, model_uid="a")
    keeper = cluster.state.deployment("a").keepers["a-0"]
    keeper.take_report(ReplicaReport("a", "a-0", keeper.incarnation, "failed", cause="killed"))
    await settle()
    await cluster.launch(**plain, model_uid="b")
    await cluster.clock.move(0.6)
    assert cluster.state.deployment("b").keepers["b-0"].placement.devices == (0,)
    assert keeper.placement.devices == (1,)
    for uid in ("a", "b"):
        await cluster.launcher.terminate(uid, 0.0)
    cluster.assert_nothing_is_held()


async def test_the_list_of_failed_launches_is_bounded() -> None:
    cluster = Cluster()
    cluster.workers.fail = OSError("no")
    for number in range(MAX_ENDED + 3):
        cluster.clock._now += 1.0
        await cluster.launch(model_uid=f"m{number}")
    assert len(cluster.state.deployments) == MAX_ENDED
    assert "m0" not in cluster.state.deployments

"""Workers join, report, fall silent and return; who is whose peer."""

from typing import Any

from xinference.core.cluster_state import ClusterState
from xinference.core.deployment import Deployment
from xinference.core.keeper import ReplicaKeeper
from xinference.core.membership import Membership
from xinference.core.orders import Control, Peer, ReplicaReport
from xinference.core.peers import Sharer, controls_for
from xinference.core.placement import Placement
from xinference.core.plan import plan_launch
from xinference.core.relaunch import RelaunchLimits
from xinference.core.roster import Member, Roster
from xinference.core.spec import parse_spec
from xinference.core.states import ReplicaState
from xinference.core.test.fakes import FakeSurroundings, FakeWorkers, GiB, ManualClock, NoAdopter, devices, facts, model, snapshot

READY, LOADING, FAILED, DRAINING = ReplicaState.READY, ReplicaState.LOADING, ReplicaState.FAILED, ReplicaState.DRAINING


def member(worker_id: str = "w1", incarnation: int = 1, seen: float = 100.0) -> Member:
    return Member(worker_id, incarnation, "127.0.0.1:1", facts(), seen)


def test_a_silent_worker_is_lost_once() -> None:
    roster = Roster(5.0)
    roster.register(member(seen=100.0))
    assert roster.expire(105.0) == []
    assert [lost.worker_id for lost in roster.expire(105.1)] == ["w1"]
    assert roster.expire(200.0) == []


def test_a_sign_of_life_counts_only_for_the_process_that_registered_and_only_forward() -> None:
    roster = Roster(5.0)
    roster.register(member(incarnation=1))
    assert roster.heard("w1", 2, 1, 101.0) is None
    assert roster.heard("w2", 1, 1, 101.0) is None
    assert roster.heard("w1", 1, 3, 102.0) is not None
    assert roster.heard("w1", 1, 2, 103.0) is None
    assert roster.members["w1"].last_seen == 102.0


def test_a_worker_that_was_started_anew_replaces_its_former_process() -> None:
    roster = Roster(5.0)
    first = member(incarnation=1)
    roster.register(first)
    assert roster.register(member(incarnation=2)).replaced is first
    assert roster.register(member(incarnation=2)).replaced is None


def test_goodbye_is_said_by_the_process_that_registered() -> None:
    roster = Roster(5.0)
    roster.register(member(incarnation=2))
    assert roster.leave("w1", 1) is None
    assert roster.leave("w1", 2) is not None
    assert roster.members == {}


def test_a_claim_holds_its_device_and_promises_its_memory_until_the_engine_runs() -> None:
    roster = Roster(5.0)
    roster.register(Member("w1", 1, "a", facts(devices=devices(2)), 100.0))
    roster.reserve(Placement("m-0", "w1", (1,)), 3 * GiB)
    view = roster.view("w1")
    assert view is not None
    assert (view.users_of(1), view.promised_bytes, view.num_replicas) == (("m-0",), 3 * GiB, 1)
    roster.settle("m-0")
    view = roster.view("w1")
    assert view is not None
    assert (view.users_of(1), view.promised_bytes) == (("m-0",), 0)
    roster.release("m-0")
    view = roster.view("w1")
    assert view is not None
    assert (view.users_of(1), view.num_replicas) == ((), 0)


def sharer(uid: str, state: ReplicaState = READY, host: str = "h1", incarnation: int = 1) -> Sharer:
    return Sharer("w1", host, uid, incarnation, state)


def peers_of(uid: str, *sharers: Sharer) -> list[str] | None:
    found = [control for control in controls_for(sharers, 3, 9) if control.replica_uid == uid]
    return [peer.replica_uid for peer in found[0].peers] if found else None


def test_the_ready_replicas_of_one_host_are_each_others_peers() -> None:
    all_ready = (sharer("a"), sharer("b"), sharer("c", host="h2"))
    assert peers_of("a", *all_ready) == ["b"]
    assert peers_of("c", *all_ready) == []


def test_a_replica_is_a_peer_from_ready_to_its_end_and_learns_of_peers_before() -> None:
    assert peers_of("a", sharer("a", LOADING), sharer("b")) == ["b"]
    assert peers_of("b", sharer("a", LOADING), sharer("b")) == []
    assert peers_of("b", sharer("a", DRAINING), sharer("b")) == ["a"]
    assert peers_of("b", sharer("a", FAILED), sharer("b")) == []
    assert peers_of("a", sharer("a", FAILED), sharer("b")) is None


def test_a_control_state_carries_epoch_version_and_the_peers_present_incarnation() -> None:
    first, _ = controls_for((sharer("a"), sharer("b", incarnation=77)), 3, 9)
    assert first == Control("a", 1, 9, 3, (Peer("w1", "b", 77),), False)
    assert Control.from_wire(first.to_wire()) == first


class Cluster:
    """A membership with one sharing model of two replicas."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.state = ClusterState(Roster(5.0), self.clock, "boot.1")
        self.membership = Membership(self.state, NoAdopter())
        spec = parse_spec({"model_path": "/m", "replica": 2, "enable_xavier": True, "xavier_cpu_cache_bytes": "64MiB"})
        plan = plan_launch(spec, "m", model(), snapshot())
        self.deployment = Deployment("m", spec, model(), plan, 0.0)
        self.state.deployments["m"] = self.deployment
        for placement in plan.replicas:
            self.deployment.keepers[placement.replica_uid] = ReplicaKeeper(
                placement, FakeSurroundings(), FakeWorkers(), self.clock, RelaunchLimits()
            )

    def keeper(self, uid: str) -> ReplicaKeeper:
        return self.deployment.keepers[uid]

    def register(self, incarnation: int = 1) -> dict[str, Any]:
        return self.membership.register(
            {"worker_id": "w1", "incarnation": incarnation, "address": "a", "facts": facts().to_wire(), "running": []}
        )

    def beat(self, sequence: int, *reports: ReplicaReport, incarnation: int = 1) -> dict[str, Any]:
        return self.membership.heartbeat(
            {
                "worker_id": "w1",
                "incarnation": incarnation,
                "sequence": sequence,
                "facts": facts().to_wire(),
                "replicas": [report.to_wire() for report in reports],
            }
        )


async def test_an_unknown_worker_is_told_to_register() -> None:
    cluster = Cluster()
    assert cluster.beat(1) == {"known": False}
    assert cluster.register()["known"] is True
    assert cluster.beat(1)["known"] is True


async def test_a_report_reaches_the_replica_it_is_about() -> None:
    cluster = Cluster()
    cluster.register()
    keeper = cluster.keeper("m-0")
    first = keeper.start()
    await cluster.clock.move(0.0)
    await first
    cluster.beat(1, ReplicaReport("m", "m-0", keeper.incarnation, "failed", cause="out of memory"))
    await cluster.clock.move(0.0)
    assert (keeper.state, keeper.cause) == (ReplicaState.FAILED, "out of memory")
    await keeper.stop(drain_seconds=0.0, grace_seconds=0.0)


async def test_replicas_of_a_lost_a_restarted_and_a_departed_worker_are_lost() -> None:
    for lose in ("silence", "restart", "goodbye"):
        cluster = Cluster()
        cluster.register()
        keeper = cluster.keeper("m-0")
        await keeper.start()
        if lose == "silence":
            await cluster.clock.move(5.1)
            cluster.membership.expire()
        elif lose == "restart":
            cluster.register(incarnation=2)
        else:
            cluster.membership.leave("w1", 1)
        await cluster.clock.move(0.0)
        assert keeper.state is ReplicaState.LOST, lose
        assert keeper.cause is not None
        await keeper.stop(drain_seconds=0.0, grace_seconds=0.0)


async def test_what_a_returning_worker_still_runs_and_nobody_wants_is_named() -> None:
    cluster = Cluster()
    cluster.register()
    keeper = cluster.keeper("m-0")
    await keeper.start()
    wanted = ReplicaReport("m", "m-0", keeper.incarnation, "ready")
    stale = ReplicaReport("m", "m-0", 4711, "ready")
    other = ReplicaReport("gone", "gone-0", 5, "ready")
    assert cluster.beat(1, wanted, stale, other)["unwanted"] == [("m-0", 4711, True), ("gone-0", 5, False)]
    await keeper.stop(drain_seconds=0.0, grace_seconds=0.0)


async def test_a_replica_that_its_keeper_is_about_to_give_back_is_left_to_the_keeper() -> None:
    cluster = Cluster()
    cluster.register()
    keeper = cluster.keeper("m-0")
    await keeper.start()
    failed = ReplicaReport("m", "m-0", keeper.incarnation, "failed", cause="killed")
    assert cluster.beat(1, failed)["unwanted"] == []
    await cluster.clock.move(0.0)
    assert cluster.beat(2, failed)["unwanted"] == [("m-0", keeper.incarnation, True)]
    await keeper.stop(drain_seconds=0.0, grace_seconds=0.0)


async def test_an_answer_carries_the_present_control_states_of_the_workers_replicas() -> None:
    cluster = Cluster()
    cluster.register()
    for uid in ("m-0", "m-1"):
        await cluster.keeper(uid).start()
    cluster.deployment.epoch = 4
    controls = [Control.from_wire(wire) for wire in cluster.beat(1)["controls"]]
    assert [(control.replica_uid, control.epoch, [peer.replica_uid for peer in control.peers]) for control in controls] == [
        ("m-0", 4, ["m-1"]),
        ("m-1", 4, ["m-0"]),
    ]
    for uid in ("m-0", "m-1"):
        await cluster.keeper(uid).stop(drain_seconds=0.0, grace_seconds=0.0)


async def test_an_overtaken_heartbeat_changes_nothing() -> None:
    cluster = Cluster()
    cluster.register()
    keeper = cluster.keeper("m-0")
    await keeper.start()
    cluster.beat(5)
    cluster.beat(4, ReplicaReport("m", "m-0", keeper.incarnation, "failed", cause="old"))
    await cluster.clock.move(0.0)
    assert keeper.state is ReplicaState.READY
    await keeper.stop(drain_seconds=0.0, grace_seconds=0.0)

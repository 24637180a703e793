"""Workers come, report, fall silent and come back: what that means for the replicas they run."""

from dataclasses import replace
from typing import Any, Protocol

from xinference.core.cluster_state import ClusterState
from xinference.core.orders import ReplicaReport
from xinference.core.roster import Member
from xinference.core.states import HELD
from xinference.core.topology import HostFacts


class Adopter(Protocol):
    """Takes over what a worker runs by the order of a former supervisor."""

    def adopt(self, member: Member, running: list[dict[str, Any]]) -> None: ...


class Membership:
    """Takes in registrations and heartbeats. Everything a heartbeat says is a whole state, so a lost one does no harm."""

    def __init__(self, state: ClusterState, adopter: Adopter) -> None:
        self._state = state
        self._adopter = adopter

    def register(self, worker: dict[str, Any]) -> dict[str, Any]:
        """A worker joins, or joins again."""
        member = Member(
            worker_id=worker["worker_id"],
            incarnation=worker["incarnation"],
            address=worker["address"],
            facts=HostFacts.from_wire(worker["facts"]),
            last_seen=self._state.clock.now(),
        )
        joined = self._state.roster.register(member)
        if joined.replaced is not None:
            self._lose(joined.replaced, "its worker was started anew")
        self._adopter.adopt(member, worker["running"])
        return self._answer(member)

    def heartbeat(self, beat: dict[str, Any]) -> dict[str, Any]:
        """A worker says how it and its replicas are. The answer says whether it is known, and what of it is not wanted any more: replica,
        incarnation, and whether its cache is to stay.
        """
        worker_id, incarnation = beat["worker_id"], beat["incarnation"]
        if not self._state.roster.knows(worker_id, incarnation):
            return {"known": False}
        member = self._state.roster.heard(worker_id, incarnation, beat["sequence"], self._state.clock.now())
        if member is None:  # an older one, overtaken on the way
            return {"known": True, "unwanted": [], "controls": []}
        member.facts = HostFacts.from_wire(beat["facts"])
        reports = [ReplicaReport.from_wire(report) for report in beat["replicas"]]
        self._take(member, reports)
        return self._answer(member, reports)

    def leave(self, worker_id: str, incarnation: int) -> None:
        member = self._state.roster.leave(worker_id, incarnation)
        if member is not None:
            self._lose(member, "its worker was stopped")

    def expire(self, missed_seconds: float = 0.0) -> None:
        """Lose the workers that were silent for too long; ``missed_seconds`` in which nobody listened are not held against them."""
        self._state.roster.excuse(missed_seconds)
        for member in self._state.roster.expire(self._state.clock.now()):
            self._lose(member, f"its worker {member.worker_id} has not been heard of for {self._state.roster.lost_seconds:g} s")

    def workers(self) -> list[dict[str, Any]]:
        now = self._state.clock.now()
        rows = []
        for member in self._state.roster.members.values():
            view = self._state.roster.view(member.worker_id)
            facts = member.facts.to_wire()
            facts["devices"] = len(member.facts.devices)
            rows.append(
                {
                    "worker_id": member.worker_id,
                    "address": member.address,
                    "incarnation": f"{member.incarnation:016x}",
                    "seen_seconds_ago": round(now - member.last_seen, 3),
                    "replicas": view.num_replicas if view else 0,
                    "promised_bytes": view.promised_bytes if view else 0,
                    **facts,
                }
            )
        return rows

    def devices(self) -> list[dict[str, Any]]:
        rows = []
        for member in self._state.roster.members.values():
            view = self._state.roster.view(member.worker_id)
            for device in member.facts.devices:
                users = view.users_of(device.index) if view else ()
                rows.append(
                    {
                        "worker_id": member.worker_id,
                        "index": device.index,
                        "name": device.name,
                        "memory_bytes": device.memory_bytes,
                        "free_bytes": device.free_bytes,
                        "replicas": list(users),
                    }
                )
        return rows

    def _take(self, member: Member, reports: list[ReplicaReport]) -> None:
        for deployment in list(self._state.deployments.values()):
            for report in reports:
                keeper = deployment.keepers.get(report.replica_uid)
                if keeper is not None and keeper.placement.worker_id == member.worker_id:
                    keeper.take_report(report)

    def _lose(self, member: Member, text: str) -> None:
        for deployment in list(self._state.deployments.values()):
            for keeper in list(deployment.keepers.values()):
                if keeper.placement.worker_id == member.worker_id and keeper.state in HELD:
                    keeper.worker_lost(text)

    def _answer(self, member: Member, reports: list[ReplicaReport] | None = None) -> dict[str, Any]:
        keepers = self._state.keepers_on(member.worker_id)
        unwanted = []
        for report in reports or []:
            keeper = keepers.get(report.replica_uid)
            # What a keeper holds it also gives back, and knows best whether the cache stays; only what nobody holds is named here.
            if keeper is None or keeper.incarnation != report.incarnation or not keeper.holds:
                unwanted.append((report.replica_uid, report.incarnation, keeper is not None))
        controls = self._state.controls_by_worker().get(member.worker_id, [])
        version = self._state.controls.version
        return {
            "known": True,
            "unwanted": unwanted,
            "controls": [replace(control, version=version).to_wire() for control in controls],
        }

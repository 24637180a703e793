"""Who is in the cluster, and what is promised to whom. Pure: the time is an argument.

    unknown ──register──> member ──(silent too long)──> lost ──register──> member (same or new incarnation)

A worker's incarnation is a number of its process start. The same worker id with another incarnation is another process: everything the
former one ran has ended with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from xinference.core.placement import Placement
from xinference.core.topology import HostFacts, Snapshot, WorkerView


@dataclass
class Member:
    """A worker as the supervisor knows it. ``last_seen`` is monotonic seconds."""

    worker_id: str
    incarnation: int
    address: str
    facts: HostFacts
    last_seen: float
    sequence: int = 0


@dataclass(frozen=True)
class Reservation:
    """A replica's claim on a worker: devices for as long as it stands, memory until the engine has really taken it."""

    placement: Placement
    memory_bytes: int
    settled: bool = False


@dataclass(frozen=True)
class Joined:
    """Result of a registration: the member, and the process that this one replaces, if any."""

    member: Member
    replaced: Member | None


@dataclass
class Roster:
    """Workers and reservations."""

    lost_seconds: float
    members: dict[str, Member] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)

    def register(self, member: Member) -> Joined:
        """Take in a worker. ``replaced`` names a former process under the same id, whose replicas are gone."""
        before = self.members.get(member.worker_id)
        self.members[member.worker_id] = member
        replaced = before if before is not None and before.incarnation != member.incarnation else None
        return Joined(member, replaced)

    def heard(self, worker_id: str, incarnation: int, sequence: int, now: float) -> Member | None:
        """A worker showed life. None if it is not a member under this incarnation, or said something newer before."""
        member = self.members.get(worker_id)
        if member is None or member.incarnation != incarnation or sequence <= member.sequence:
            return None
        member.last_seen, member.sequence = now, sequence
        return member

    def knows(self, worker_id: str, incarnation: int) -> bool:
        member = self.members.get(worker_id)
        return member is not None and member.incarnation == incarnation

    def excuse(self, seconds: float) -> None:
        """Nobody listened for so long: what was said then waits unread."""
        for member in self.members.values():
            member.last_seen += seconds

    def expire(self, now: float) -> list[Member]:
        """Remove and return the workers that were silent for too long."""
        lost = [member for member in self.members.values() if now - member.last_seen > self.lost_seconds]
        for member in lost:
            del self.members[member.worker_id]
        return lost

    def leave(self, worker_id: str, incarnation: int) -> Member | None:
        """A worker says goodbye."""
        if not self.knows(worker_id, incarnation):
            return None
        return self.members.pop(worker_id)

    def reserve(self, placement: Placement, memory_bytes: int) -> None:
        """Claim a place for a replica; a second claim of the same replica replaces the first."""
        self.reservations[placement.replica_uid] = Reservation(placement, memory_bytes)

    def settle(self, replica_uid: str) -> None:
        """The engine runs: what it takes shows in its worker's measurements from now on."""
        held = self.reservations.get(replica_uid)
        if held is not None:
            self.reservations[replica_uid] = Reservation(held.placement, held.memory_bytes, settled=True)

    def release(self, replica_uid: str) -> None:
        self.reservations.pop(replica_uid, None)

    def view(self, worker_id: str) -> WorkerView | None:
        member = self.members.get(worker_id)
        return None if member is None else self._view(member, self.reservations.values())

    def snapshot(self, host: str, replica_uids: Iterable[str]) -> Snapshot:
        """What the planner sees."""
        views = tuple(self._view(member, self.reservations.values()) for member in sorted(self.members.values(), key=lambda m: m.worker_id))
        return Snapshot(views, host, frozenset(replica_uids))

    def _view(self, member: Member, reservations: Iterable[Reservation]) -> WorkerView:
        here = [held for held in reservations if held.placement.worker_id == member.worker_id]
        by_device: dict[int, tuple[str, ...]] = {}
        for held in here:
            for device in held.placement.devices:
                by_device[device] = (*by_device.get(device, ()), held.placement.replica_uid)
        promised = sum(held.memory_bytes for held in here if not held.settled)
        return WorkerView(member.worker_id, member.facts, len(here), promised, by_device)

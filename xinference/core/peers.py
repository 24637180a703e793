"""Who may read whose segment: the ready replicas of one model on one host. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from xinference.core.orders import Control, Peer
from xinference.core.states import HELD, ReplicaState


@dataclass(frozen=True)
class Sharer:
    """A replica of a sharing model. ``host`` is the identity of the shared memory it lives in."""

    worker_id: str
    host: str
    replica_uid: str
    incarnation: int
    state: ReplicaState
    stopping: bool = False


def controls_for(sharers: Sequence[Sharer], epoch: int, version: int) -> list[Control]:
    """The control state of every replica that has an engine, or is about to.

    A replica is named as a peer once it is ready and until it has ended; while it drains, its segment is as good as ever.
    """
    readable = {ReplicaState.READY, ReplicaState.DRAINING}
    controls = []
    for one in sharers:
        if one.state not in HELD:
            continue
        peers = tuple(
            Peer(other.worker_id, other.replica_uid, other.incarnation)
            for other in sorted(sharers, key=lambda sharer: sharer.replica_uid)
            if other is not one and other.host == one.host and other.state in readable
        )
        controls.append(Control(one.replica_uid, one.incarnation, version, epoch, peers, one.stopping))
    return controls

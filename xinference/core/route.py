"""Which replica serves a request: the one that most likely has its prefix, unless that one is too busy. Pure but for a bounded memory.

    prefix ──digest──> rendezvous order of the replicas ──> the first that may take one more
                                                            none may, or no prefix: the least loaded

Requests with a common beginning go to one replica, where they become local hits. How many more requests than its share that replica may
hold depends on the age of the prefix: a young one is being computed right now, and sending the rest of a burst elsewhere would compute it
twice; an old one is in caches that the others can reach, so the load is evened out. The order of replicas for a prefix is rendezvous
hashing: when a replica comes or goes, only the prefixes it wins or had are moved.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil


@dataclass(frozen=True)
class RouteLimits:
    """How far affinity may unbalance the replicas.

    Args:
        load_factor: a replica takes a request for its prefix up to this many times the mean of open requests, the new one included.
        burst_requests: for a young prefix, up to this many open requests at once whatever the mean.
        young_seconds: age up to which a prefix counts as being computed.
        remembered_prefixes: prefixes whose age is known; beyond it the ones unused for longest are forgotten, and so are young again.
    """

    load_factor: float = 1.25
    burst_requests: int = 8
    young_seconds: float = 5.0
    remembered_prefixes: int = 4096


def rendezvous_order(replica_uids: Sequence[str], digest: bytes) -> list[str]:
    """The replicas by their weight for this digest, heaviest first. The same for every process and every order of the input."""
    return sorted(replica_uids, key=lambda uid: (blake2b(uid.encode(), key=digest, digest_size=8).digest(), uid), reverse=True)


def choose_replica(open_by_replica: Mapping[str, int], digest: bytes | None, young: bool, limits: RouteLimits) -> str:
    """Choose one of the replicas.

    Args:
        open_by_replica: open requests of every replica that may be chosen; at least one.
        digest: of the prompt's head, or None if it has none to speak of.
        young: whether the prefix is likely being computed right now.
    """
    if digest is None:
        return min(open_by_replica, key=lambda uid: (open_by_replica[uid], uid))
    share = ceil(limits.load_factor * (sum(open_by_replica.values()) + 1) / len(open_by_replica))
    most = max(share, limits.burst_requests) if young else share
    order = rendezvous_order(list(open_by_replica), digest)
    for uid in order:
        if open_by_replica[uid] < most:
            return uid
    return min(order, key=lambda uid: open_by_replica[uid])


class PrefixRouter:
    """Chooses replicas for one API process. Remembers when it first saw a prefix; open requests are counted by whoever asks."""

    def __init__(self, limits: RouteLimits | None = None) -> None:
        self._limits = limits or RouteLimits()
        self._first_seen: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def choose(self, uid: str, replica_uids: Sequence[str], open_requests: Mapping[str, int], prefix: str, now: float) -> str:
        """The replica for a request.

        Args:
            uid: the model.
            replica_uids: the replicas that may be chosen, at least one: excluded and suspect ones are left out by the caller.
            open_requests: how many requests each of them has open.
            prefix: the head of the prompt; only a digest of it is kept.
            now: monotonic seconds.
        """
        loads = {replica_uid: open_requests.get(replica_uid, 0) for replica_uid in replica_uids}
        if not prefix.strip("\0 \n"):
            return choose_replica(loads, None, False, self._limits)
        digest = blake2b(prefix.encode(errors="surrogatepass"), digest_size=16).digest()
        return choose_replica(loads, digest, self._is_young(uid, digest, now), self._limits)

    def _is_young(self, uid: str, digest: bytes, now: float) -> bool:
        key = (uid, digest)
        first = self._first_seen.setdefault(key, now)
        self._first_seen.move_to_end(key)
        while len(self._first_seen) > self._limits.remembered_prefixes:
            self._first_seen.popitem(last=False)
        return now - first < self._limits.young_seconds

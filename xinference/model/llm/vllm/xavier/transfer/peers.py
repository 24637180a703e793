"""The peers on this host whose slabs this engine reads: mapped when first wanted, let go when dead or replaced.

All of it runs in the copier thread, off the step path. The step thread reads ``attached``, a tuple that is replaced as a whole; a peer it
is just reading stays mapped until it lets go, since a mapping ends with its last reference.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.directory.control import PeerEntry
from xinference.model.llm.vllm.xavier.directory.names import segment_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.errors import SegmentRefused, XavierError
from xinference.model.llm.vllm.xavier.transfer.mover import Mover

logger = logging.getLogger(__name__)


class Count(Protocol):
    """Adds to one of the segment's counters, under the engine's lock."""

    def __call__(self, name: str, amount: int = 1) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """A peer's segment, mapped."""

    entry: PeerEntry
    reader: SegmentReader
    slab: Any

    @property
    def replica_uid(self) -> str:
        """Which replica this is."""
        return self.entry.replica_uid


@dataclass(slots=True)
class _Attempt:
    """What is known about a peer that could not be attached."""

    next_at: float
    pause_seconds: float
    permanent: bool = False


class Peers:
    """The table of one engine's peers.

    Args:
        config: this replica's settings; it never attaches to itself.
        namespace: 16 hex digits; peers of another namespace have files of another name.
        mover: wraps a slab once per attachment.
        count: adds to the counters.
    """

    def __init__(self, config: XavierConfig, namespace: str, mover: Mover, count: Count) -> None:
        self._config = config
        self._namespace = namespace
        self._mover = mover
        self._count = count
        self._wanted: tuple[PeerEntry, ...] = ()
        self._attempts: dict[PeerEntry, _Attempt] = {}
        self._warned: set[PeerEntry] = set()
        self._rejected: dict[PeerEntry, int] = {}
        self.attached: tuple[Peer, ...] = ()

    def want(self, entries: Iterable[PeerEntry]) -> None:
        """The control page's list of peers, this replica among them or not."""
        own = (self._config.worker_id, self._config.replica_uid)
        self._wanted = tuple(entry for entry in entries if (entry.worker_id, entry.replica_uid) != own)
        self._attempts = {entry: attempt for entry, attempt in self._attempts.items() if entry in self._wanted}
        self._warned &= set(self._wanted)

    def get(self, replica_uid: str) -> Peer | None:
        """The attached peer of this uid."""
        return next((peer for peer in self.attached if peer.replica_uid == replica_uid), None)

    def refresh(self, now: float) -> None:
        """Let go of peers that are gone, and try the missing ones whose time has come."""
        kept = tuple(peer for peer in self.attached if self._good(peer))
        if lost := len(self.attached) - len(kept):
            self._count("peer_detached", lost)
        have = {peer.entry for peer in kept}
        fresh = [peer for entry in self._wanted if entry not in have and (peer := self._try(entry, now)) is not None]
        if lost or fresh:
            self.attached = (*kept, *fresh)

    def refused(self) -> tuple[str, ...]:
        """Uids of wanted peers that are not attached."""
        have = {peer.entry for peer in self.attached}
        return tuple(entry.replica_uid for entry in self._wanted if entry not in have)

    def _good(self, peer: Peer) -> bool:
        rejected = peer.reader.rejected
        if more := rejected - self._rejected.get(peer.entry, 0):
            self._rejected[peer.entry] = rejected
            self._count("record_rejected", more)
        if peer.entry not in self._wanted or peer.reader.replaced():
            return False
        try:
            return peer.reader.alive()
        except OSError:  # no descriptor left to look at its process with: it can be read meanwhile, whether it runs or not
            return True

    def _try(self, entry: PeerEntry, now: float) -> Peer | None:
        attempt = self._attempts.get(entry)
        if attempt is not None and (attempt.permanent or now < attempt.next_at):
            return None
        try:
            peer = self._attach(entry)
        except (XavierError, OSError, ValueError) as error:
            self._refuse(entry, error, attempt, now)
            return None
        self._attempts.pop(entry, None)
        self._rejected.pop(entry, None)
        self._count("peer_attach_ok")
        logger.info("peer %s attached, %s places", entry.replica_uid, peer.reader.geometry.num_places)
        return peer

    def _attach(self, entry: PeerEntry) -> Peer:
        path = segment_path(self._config.shm_dir, entry.worker_id, entry.replica_uid, self._namespace)
        reader = SegmentReader.open(path, expected_incarnation=entry.incarnation)
        if not reader.alive():
            raise SegmentRefused("its owner does not run", permanent=False)
        return Peer(entry, reader, self._mover.open_slab(reader.slab_view(), reader.geometry.place_bytes))

    def _refuse(self, entry: PeerEntry, error: Exception, attempt: _Attempt | None, now: float) -> None:
        pause = min(attempt.pause_seconds * 2, self._config.probe_retry_max_seconds) if attempt else self._config.probe_retry_seconds
        permanent = isinstance(error, SegmentRefused) and error.permanent
        self._attempts[entry] = _Attempt(now + pause, pause, permanent)
        self._count("peer_attach_refused")
        if entry not in self._warned:
            self._warned.add(entry)
            logger.warning("peer %s cannot be attached%s: %s", entry.replica_uid, "" if permanent else " for now", error)

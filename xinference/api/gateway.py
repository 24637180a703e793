"""What all proxied requests share: routes, connections, counts of what is open, and the choice of a replica."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from xinference.api.config import ApiConfig
from xinference.api.control import ClusterClient, Json
from xinference.api.history import History
from xinference.api.metrics import ApiMetrics
from xinference.api.route_table import ModelRoutes, Replica, RouteTable
from xinference.api.upstream import Upstreams
from xinference.core.route import PrefixRouter
from xinference.errors import ModelLoading, NoReplicaAvailable, NotFound, RateLimited, ShuttingDown, XinferenceError
from xinference.settings import Limits

logger = logging.getLogger(__name__)


class Open(Protocol):
    """A request that is open and can be ended from outside."""

    @property
    def model_uid(self) -> str: ...

    @property
    def ids(self) -> tuple[str, ...]: ...

    def end(self, error: XinferenceError) -> None: ...


class Feed(Protocol):
    """A stream of news that is open and can be ended from outside."""

    def end(self, error: XinferenceError) -> None: ...


class Router(Protocol):
    """Chooses among replicas."""

    def choose(self, uid: str, replica_uids: Sequence[str], open_requests: Mapping[str, int], prefix: str, now: float) -> str: ...


class Gateway:
    """Shared state of one API process. One event loop only."""

    def __init__(
        self, cluster: ClusterClient, limits: Limits, config: ApiConfig, metrics: ApiMetrics, history: History, router: Router | None
    ) -> None:
        self.cluster = cluster
        self.limits = limits
        self.config = config
        self.metrics = metrics
        self.history = history
        self.table = RouteTable(cluster, config)
        self.upstreams = Upstreams(config)
        self.draining = False
        self.open: set[Open] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.feeds: set[Feed] = set()
        self._router = router or PrefixRouter()
        self._open_by_model: Counter[str] = Counter()
        self._open_by_replica: Counter[tuple[str, str]] = Counter()
        self._suspects: dict[tuple[str, str, str], float] = {}
        self._background: set[asyncio.Task[None]] = set()

    @contextmanager
    def admitted(self, request: Open) -> Iterator[None]:
        """Count a request as open.

        Raises:
            ShuttingDown: no new work is taken.
            RateLimited: its model has too many open requests.
        """
        if self.draining:
            raise ShuttingDown("the server is shutting down")
        uid = request.model_uid
        if self._open_by_model[uid] >= self.limits.queued_requests:
            self.metrics.refused.labels("queued_requests").inc()
            raise RateLimited(f"the model has {self.limits.queued_requests} open requests, which is the limit")
        self.open.add(request)
        self.idle.clear()
        self._open_by_model[uid] += 1
        gauge = self.metrics.open_requests.labels(uid)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()
            self.open.discard(request)
            if not self.open:
                self.idle.set()
            self._open_by_model[uid] -= 1
            if not self._open_by_model[uid]:
                del self._open_by_model[uid]

    @contextmanager
    def subscribed(self, feed: Feed) -> Iterator[None]:
        """Count a stream of news as open.

        Raises:
            ShuttingDown: no new ones are taken.
            RateLimited: too many are open.
        """
        if self.draining:
            raise ShuttingDown("the server is shutting down")
        if len(self.feeds) >= self.limits.event_streams:
            self.metrics.refused.labels("event_streams").inc()
            raise RateLimited(f"{self.limits.event_streams} event streams are open, which is the limit")
        self.feeds.add(feed)
        self.metrics.event_streams.set(len(self.feeds))
        try:
            yield
        finally:
            self.feeds.discard(feed)
            self.metrics.event_streams.set(len(self.feeds))

    @contextmanager
    def using(self, uid: str, replica: Replica) -> Iterator[None]:
        """Count a request as open on a replica."""
        key = (uid, replica.replica_uid)
        self._open_by_replica[key] += 1
        try:
            yield
        finally:
            self._open_by_replica[key] -= 1
            if not self._open_by_replica[key]:
                del self._open_by_replica[key]

    def choose(self, routes: ModelRoutes, tried: Sequence[Replica], prefix: str) -> Replica:
        """The replica for the next attempt.

        Raises:
            ModelLoading: none is ready yet.
            NoReplicaAvailable: none is ready any more, or all were tried.
        """
        now = time.monotonic()
        keys_tried = {replica.key for replica in tried}
        candidates = [replica for replica in routes.ready if replica.key not in keys_tried]
        trusted = [replica for replica in candidates if not self._is_suspect(routes.uid, replica, now)]
        if not candidates:
            raise unavailable(routes, tried)
        by_uid = {replica.replica_uid: replica for replica in trusted or candidates}
        loads = {replica_uid: self._open_by_replica[routes.uid, replica_uid] for replica_uid in by_uid}
        return by_uid[self._router.choose(routes.uid, list(by_uid), loads, prefix, now)]

    def steered(self, routes: ModelRoutes, replica_uid: str) -> Replica:
        """The replica that a request names.

        Raises:
            NotFound: the model has no such replica.
            NoReplicaAvailable: it is not ready.
        """
        replica = next((replica for replica in routes.replicas if replica.replica_uid == replica_uid), None)
        if replica is None:
            raise NotFound(f"model '{routes.uid}' has no replica '{replica_uid}'", param="x-xinference-replica")
        if not replica.is_ready:
            raise NoReplicaAvailable(f"replica '{replica_uid}' is {replica.state}", param="x-xinference-replica")
        return replica

    def report_failure(self, uid: str, replica: Replica, cause: str) -> None:
        """Avoid a replica for a while and tell the supervisor, once for each start of its engine."""
        key = (uid, *replica.key)
        now = time.monotonic()
        known = self._is_suspect(uid, replica, now)
        self._suspects = {old: until for old, until in self._suspects.items() if until > now}
        self._suspects[key] = now + self.config.suspect_seconds
        if known:
            return
        logger.warning("replica %s of %s broke a connection: %s", replica.replica_uid, uid, cause)
        self.metrics.replica_failures.labels(uid).inc()
        self.in_background(self._report(uid, replica))

    async def _report(self, uid: str, replica: Replica) -> None:
        try:
            await self.cluster.report_replica_failure(uid, replica.replica_uid, replica.incarnation)
        except XinferenceError as error:
            logger.warning("the failure of replica %s of %s could not be reported: %s", replica.replica_uid, uid, error)

    def _is_suspect(self, uid: str, replica: Replica, now: float) -> bool:
        return self._suspects.get((uid, *replica.key), now) > now

    async def record(self, uid: str, replica: Replica, request_hex: str) -> Json | None:
        """A request's accounting record if it arrives in time; a request never fails for want of it."""
        try:
            async with asyncio.timeout(self.config.usage_answer_seconds):
                return await self.cluster.request_record(uid, replica.replica_uid, request_hex, self.config.usage_wait_seconds)
        except (XinferenceError, TimeoutError) as error:
            logger.debug("no accounting record of %s from %s: %s", request_hex, replica.replica_uid, error)
            return None

    def abort(self, uid: str, request_id: str, error: XinferenceError) -> bool:
        """End an open request; returns whether there was one with this id."""
        found = [request for request in self.open if request.model_uid == uid and request_id in request.ids]
        for request in found:
            request.end(error)
        return bool(found)

    def end_all(self, error: XinferenceError) -> None:
        """End every open request and stream of news."""
        for request in (*self.open, *self.feeds):
            request.end(error)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something whose result nobody waits for."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Stop what runs in the background and close all connections."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.upstreams.close()


def unavailable(routes: ModelRoutes, tried: Sequence[Replica]) -> XinferenceError:
    """Why no replica of a known model can be asked."""
    state = routes.model.get("state")
    if tried:
        return NoReplicaAvailable(f"{len(tried)} of the model's replicas failed on this request and no other is ready")
    if state == "launching" or any(replica.state in ("creating", "loading") for replica in routes.replicas):
        return ModelLoading(f"model '{routes.uid}' is still loading")
    return NoReplicaAvailable(f"no replica of model '{routes.uid}' is ready (the model is {state})")

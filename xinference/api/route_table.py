"""The API's own copy of which replicas serve which model, kept up to date by one long poll.

A request is routed from this copy, without a call to the supervisor. When the supervisor is away the last copy stays in use. Only a
request for a model that the copy does not know, or knows no ready replica of, asks the supervisor: the poll may be a moment behind.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from xinference.api.config import ApiConfig
from xinference.api.control import ClusterClient, Json
from xinference.errors import ModelNotFound, XinferenceError

logger = logging.getLogger(__name__)

READY: Final = "ready"
DRAINING: Final = "draining"
# A connection to a replica in another state has nobody at its other end who could still answer.
_ANSWERING: Final = frozenset({READY, DRAINING})


@dataclass(frozen=True)
class Endpoint:
    """Where a replica's server listens: a Unix socket, or an address with a key."""

    uds: str | None = None
    url: str | None = None
    api_key: str | None = None

    @classmethod
    def from_wire(cls, endpoint: Mapping[str, Any] | None) -> "Endpoint":
        return cls(endpoint.get("uds"), endpoint.get("url"), endpoint.get("api_key")) if endpoint else cls()

    @property
    def is_known(self) -> bool:
        """False for a replica that does not listen anywhere yet."""
        return self.uds is not None or self.url is not None


@dataclass(frozen=True)
class Replica:
    """One replica as the API sees it. ``incarnation`` changes with every start of its engine."""

    replica_uid: str
    state: str
    incarnation: str
    endpoint: Endpoint

    @property
    def is_ready(self) -> bool:
        return self.state == READY and self.endpoint.is_known

    @property
    def key(self) -> tuple[str, str]:
        return self.replica_uid, self.incarnation


@dataclass(frozen=True)
class ModelRoutes:
    """One model: what the supervisor says of it, and its replicas."""

    uid: str
    model: Json
    replicas: tuple[Replica, ...]

    @classmethod
    def from_wire(cls, uid: str, table: Json) -> "ModelRoutes":
        replicas = tuple(
            Replica(entry["replica_uid"], entry["state"], str(entry["incarnation"]), Endpoint.from_wire(entry.get("endpoint")))
            for entry in table["replicas"]
        )
        return cls(uid, table["model"], replicas)

    @property
    def ready(self) -> tuple[Replica, ...]:
        return tuple(replica for replica in self.replicas if replica.is_ready)

    @property
    def shares_cache(self) -> bool:
        return bool(self.model.get("xavier"))


@dataclass
class _Watched:
    gone: asyncio.Future[None]
    num_watchers: int = 0


class RouteTable:
    """Keeps the copy. One event loop only."""

    def __init__(self, cluster: ClusterClient, config: ApiConfig) -> None:
        self._cluster = cluster
        self._config = config
        self._routes: dict[str, ModelRoutes] = {}
        self._version = 0
        self._ahead: dict[str, tuple[int, ModelRoutes]] = {}
        self._watched: dict[tuple[str, str, str], _Watched] = {}
        self.connected = False

    def __iter__(self) -> Iterator[ModelRoutes]:
        return iter(self._routes.values())

    def get(self, uid: str) -> ModelRoutes | None:
        """What the copy says, which may be nothing."""
        return self._routes.get(uid)

    async def find(self, uid: str) -> ModelRoutes:
        """The routes of a model; asks the supervisor if the copy has no ready replica.

        Raises:
            ModelNotFound: there is no such model.
            ControlUnreachable: the copy does not know the model and the supervisor does not answer.
        """
        known = self._routes.get(uid)
        if known is not None and known.ready:
            return known
        try:
            table = await self._cluster.route_table(uid)
        except ModelNotFound:
            raise
        except XinferenceError:
            if known is None:
                raise
            return known
        found = ModelRoutes.from_wire(uid, table)
        if table["version"] > self._version:
            # An answer of the poll that is still on its way may be older than this one.
            self._ahead[uid] = (table["version"], found)
            self._routes[uid] = found
        return found

    @contextmanager
    def watch(self, uid: str, replica: Replica) -> Iterator[asyncio.Future[None]]:
        """A future that ends when this start of the replica can answer nobody any more. Shared: not to be cancelled."""
        key = (uid, *replica.key)
        watched = self._watched.setdefault(key, _Watched(asyncio.get_running_loop().create_future()))
        watched.num_watchers += 1
        try:
            yield watched.gone
        finally:
            watched.num_watchers -= 1
            if watched.num_watchers == 0 and self._watched.get(key) is watched:
                del self._watched[key]

    async def run(self) -> None:
        """Follow changes until cancelled."""
        while True:
            try:
                changes = await self._cluster.route_changes(self._version, self._config.route_poll_seconds)
            except XinferenceError as error:
                if self.connected:
                    logger.warning("no route changes from the supervisor, going on with version %s: %s", self._version, error)
                self.connected = False
                # A supervisor that was started anew counts from the beginning.
                self._version = 0
                self._ahead.clear()
                await asyncio.sleep(self._config.route_retry_seconds)
                continue
            except Exception:
                # Without this loop no change would ever be seen again.
                logger.exception("reading route changes failed")
                await asyncio.sleep(self._config.route_retry_seconds)
                continue
            self.connected = True
            self._take(changes)

    def _take(self, changes: Json) -> None:
        if changes["version"] == self._version:
            return
        self._version = changes["version"]
        routes = {uid: ModelRoutes.from_wire(uid, table) for uid, table in changes["models"].items()}
        self._ahead = {uid: ahead for uid, ahead in self._ahead.items() if ahead[0] > self._version}
        self._routes = routes | {uid: ahead[1] for uid, ahead in self._ahead.items()}
        for (uid, replica_uid, incarnation), watched in list(self._watched.items()):
            if _has_ended(self._routes.get(uid), replica_uid, incarnation) and not watched.gone.done():
                watched.gone.set_result(None)


def _has_ended(routes: ModelRoutes | None, replica_uid: str, incarnation: str) -> bool:
    """Whether a table says that this start of a replica is over: its model is there, and it is not.

    A model that is not mentioned may be alive: a supervisor that was started anew knows of none at first.
    """
    if routes is None:
        return False
    return not any(replica.key == (replica_uid, incarnation) and replica.state in _ANSWERING for replica in routes.replicas)

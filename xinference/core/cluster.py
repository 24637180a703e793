"""Start and stop the processes of a cluster: everything in one, or supervisor and workers apart.

    start_local       one main pool in this process: supervisor and worker
    start_supervisor  a pool with the supervisor
    start_worker      a pool with a worker that joins a supervisor

xoscar reads its directory when it is imported and its key whenever it connects, so both are in the environment before. That is why this
module imports xoscar, and everything that needs it, inside its functions: importing it is cheap and starts nothing.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

from xinference.core.actor_directory import use_actor_directory
from xinference.core.cluster_key import use_cluster_key, use_given_cluster_key
from xinference.core.worker_identity import WorkerIdentity, take_identity
from xinference.settings import Settings

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


@dataclass
class LocalCluster:
    """What runs in this process. ``supervisor`` and ``worker`` are actor references; one of them may be None."""

    settings: Settings
    pool: Any
    address: str
    supervisor: Any
    worker: Any
    identity: WorkerIdentity | None
    _stopped: bool = field(default=False, repr=False)

    async def stop(self, grace_seconds: float | None = None) -> None:
        """Stop every replica, leave nothing behind, close the pool. Idempotent.

        Args:
            grace_seconds: how long engines may take to stop by themselves; the settings' drain_seconds if not given.
        """
        if self._stopped:
            return
        self._stopped = True
        grace = self.settings.drain_seconds if grace_seconds is None else grace_seconds
        try:
            if self.supervisor is not None:  # first: models end in order, and nothing is started again
                await self.supervisor.shut_down(grace)
            if self.worker is not None:
                await self.worker.shut_down(grace)
        finally:
            await self.pool.stop()
            if self.identity is not None:
                self.identity.release()


async def start_local(settings: Settings) -> LocalCluster:
    """Supervisor and worker in this process, on loopback. Call it on the main thread, which must outlive the cluster."""
    _prepare(settings)
    pool, downs = await _start_pool(f"{LOOPBACK}:{settings.supervisor_port}")
    try:
        supervisor = await _create_supervisor(settings, pool)
        worker, identity = await _create_worker(settings, pool, pool.external_address, downs)
    except BaseException:
        await pool.stop()
        raise
    return LocalCluster(settings, pool, pool.external_address, supervisor, worker, identity)


async def start_supervisor(settings: Settings, host: str | None = None) -> LocalCluster:
    """A supervisor alone, at the settings' supervisor_port; workers join it."""
    _prepare(settings)
    pool, _ = await _start_pool(f"{host or LOOPBACK}:{settings.supervisor_port}")
    try:
        supervisor = await _create_supervisor(settings, pool)
    except BaseException:
        await pool.stop()
        raise
    return LocalCluster(settings, pool, pool.external_address, supervisor, None, None)


async def start_worker(settings: Settings, supervisor_address: str, host: str | None = None) -> LocalCluster:
    """A worker that joins the supervisor at ``supervisor_address`` (host:port) and joins again whenever it has to.

    Raises:
        ClusterKeyRefused: the cluster's key is not there; a worker makes none.
    """
    use_given_cluster_key(settings.home_dir)
    _prepare(settings)
    pool, downs = await _start_pool(f"{host or LOOPBACK}:0")
    try:
        worker, identity = await _create_worker(settings, pool, supervisor_address, downs)
    except BaseException:
        await pool.stop()
        raise
    return LocalCluster(settings, pool, pool.external_address, None, worker, identity)


def _prepare(settings: Settings) -> None:
    """The environment that xoscar reads."""
    use_cluster_key(settings.home_dir)
    use_actor_directory(settings.home_dir)


async def _start_pool(address: str) -> tuple[Any, list[Any]]:
    import xoscar as xo

    import xinference.core.pool_modules  # noqa: F401  before the pool starts: see there

    downs: list[Any] = []

    def down(pool: Any, sub_address: str) -> None:
        for listener in downs:
            listener(sub_address)

    pool = await xo.create_actor_pool(address, n_process=0, auto_recover=False, on_process_down=down)
    return pool, downs


async def _create_supervisor(settings: Settings, pool: Any) -> Any:
    import xoscar as xo

    from xinference.core.inventory import host_identity
    from xinference.core.supervisor import SUPERVISOR_UID, SupervisorActor

    await xo.create_actor(
        SupervisorActor,
        settings.model_dump(mode="json"),
        host_identity(settings.shm_dir),
        uid=SUPERVISOR_UID,
        address=pool.external_address,
    )
    return await xo.actor_ref(address=pool.external_address, uid=SUPERVISOR_UID)


async def _create_worker(settings: Settings, pool: Any, supervisor_address: str, downs: list[Any]) -> tuple[Any, WorkerIdentity]:
    identity = take_identity(settings.home_dir)
    try:
        worker = await _worker_actor(settings, pool, supervisor_address, identity, downs)
    except BaseException:
        identity.release()
        raise
    return worker, identity


async def _worker_actor(settings: Settings, pool: Any, supervisor_address: str, identity: WorkerIdentity, downs: list[Any]) -> Any:
    import xoscar as xo

    from xinference.core.replica import WORKER_UID
    from xinference.core.supervisor import SUPERVISOR_UID
    from xinference.core.worker import WorkerActor

    await xo.create_actor(
        WorkerActor, settings.model_dump(mode="json"), identity.worker_id, str(settings.home_dir / "run" / identity.worker_id),
        (supervisor_address, SUPERVISOR_UID), uid=WORKER_UID, address=pool.external_address,
    )  # fmt: skip
    worker = await xo.actor_ref(address=pool.external_address, uid=WORKER_UID)
    await worker.begin(pool, downs)  # a reference within one process passes its arguments as they are
    return worker

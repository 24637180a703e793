"""The worker actor: one for a machine, or several with different homes. Runs replicas for the supervisor and tells it how they are."""

import asyncio
import logging
import os
import secrets
from pathlib import Path
from typing import Any

import xoscar as xo

from xinference.core.calls import call
from xinference.core.changes import Changes
from xinference.core.engines import Engines
from xinference.core.errors import Closed, Unreachable
from xinference.core.host import WorkerHost, wire_reports
from xinference.core.inventory import measure, nvml, read_devices
from xinference.core.leftovers import MachineLeftovers
from xinference.core.machine import Machine
from xinference.core.orders import Control, ReplicaOrder, ReplicaReport
from xinference.core.processes import SubPools
from xinference.core.runner import Watch
from xinference.core.spec import parse_spec
from xinference.model.llm.vllm.flavour import Flavour, FlavourRefused, detect_flavour
from xinference.settings import Settings

logger = logging.getLogger(__name__)

CALL_SECONDS = 5.0
REJOIN_SECONDS = 1.0  # between attempts to reach a supervisor that does not answer


class WorkerActor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Stateless in xoscar's sense: no lock, so replicas start side by side.

    Args:
        settings: as JSON values.
        worker_id: stable over restarts of this worker; part of its files' names.
        run_dir: where engines' sockets lie.
        supervisor: (address, uid) of the supervisor.
    """

    def __init__(self, settings: dict[str, Any], worker_id: str, run_dir: str, supervisor: tuple[str, str]) -> None:
        super().__init__()
        self._settings = Settings.model_validate(settings)
        watch = Watch(
            health_seconds=self._settings.heartbeat_seconds / 2,
            hang_seconds=self._settings.replica_hang_seconds,
            log_lines=self._settings.log_lines,
            probe_seconds=self._settings.heartbeat_seconds,
        )
        self._machine = Machine(worker_id, run_dir, str(self._settings.shm_dir), watch)
        self._incarnation = secrets.randbits(64) or 1
        self._changes = Changes()
        self._engines = Engines(self._settings, self._machine)
        self._leftovers = MachineLeftovers(self._machine)
        self._processes = SubPools(self._machine, self._engines)
        self._host = WorkerHost(self._processes, self._leftovers, self._changes.bump)
        self._supervisor_at = supervisor
        self._sequence = 0
        self._loops: list[asyncio.Task[None]] = []
        flavour = _flavour()
        self._version = None if flavour is None else flavour.label
        self._uses_devices = flavour is not None and flavour.device == "cuda"
        self._stopped = False

    async def begin(self, pool: Any, downs: list[Any]) -> None:
        """Sweep what a former worker of this id left, then join the cluster.

        Args:
            pool: the main pool of this process, in which sub-pools are made.
            downs: where to put the function that is called with the address of a sub-pool whose process ended.
        """
        self._processes.pool = pool
        downs.append(self._process_down)
        removed = self._leftovers.sweep()
        if removed:
            logger.warning("removed %s files that a former worker %s left behind", removed, self._machine.worker_id)
        self._loops = [
            asyncio.create_task(self._stay_in_touch()),
            asyncio.create_task(self._probe()),
            asyncio.create_task(self._engines.warm_up()),
        ]

    async def __pre_destroy__(self) -> None:
        await self.shut_down(0.0)

    # ---- called by the supervisor

    async def inspect(self, spec: dict[str, Any]) -> dict[str, Any]:
        """What the model in the spec is. Raises InvalidRequest."""
        return (await self._engines.inspect(parse_spec(spec))).to_wire()

    async def command(self, order: dict[str, Any]) -> list[str]:
        return list((await self._engines.command(ReplicaOrder.from_wire(order))).argv)

    async def start_replica(self, order: dict[str, Any], control: dict[str, Any]) -> dict[str, Any]:
        report = await self._host.start_replica(ReplicaOrder.from_wire(order), Control.from_wire(control))
        return report.to_wire()

    async def remove_replica(self, replica_uid: str, incarnation: int, keep_cache: bool, grace_seconds: float) -> None:
        await self._host.remove_replica(replica_uid, incarnation, keep_cache=keep_cache, grace_seconds=grace_seconds)

    async def apply_controls(self, controls: list[dict[str, Any]]) -> None:
        await self._host.apply_controls([Control.from_wire(control) for control in controls])

    async def check_replica(self, replica_uid: str, incarnation: int) -> None:
        """Probe everything now."""
        await self._host.probe()

    # ---- called by replicas

    async def replica_report(self, report: dict[str, Any]) -> None:
        self._host.take_report(ReplicaReport.from_wire(report))

    # ---- called in this process

    def _process_down(self, address: str) -> None:
        """xoscar saw a sub-pool's process end."""
        self._host.fail_at(address, "the process that watches the engine died")

    async def shut_down(self, grace_seconds: float) -> None:
        """Leave the cluster, stop every replica, remove everything of this worker. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        for loop in self._loops:
            loop.cancel()
        try:
            supervisor = await self._supervisor()
            await call(supervisor.unregister_worker(self._machine.worker_id, self._incarnation), CALL_SECONDS)
        except Unreachable:
            logger.info("the supervisor is gone already")
        await self._host.stop(grace_seconds)
        self._leftovers.remove_directory()

    # ---- loops

    async def _stay_in_touch(self) -> None:
        """Register, then a heartbeat each second and after each change; register again when the supervisor does not know us."""
        known = 0
        joined = False
        said: str | None = None  # what keeps us out is said when it begins and when it changes, not each second
        while True:
            try:
                supervisor = await self._supervisor()
                if not joined:
                    await call(supervisor.register_worker(await self._introduction()), CALL_SECONDS)
                    joined, said = True, None
                answer = await call(supervisor.heartbeat(await self._beat()), CALL_SECONDS)
                joined = answer["known"]
                if joined:
                    self._obey(answer)
            except Unreachable as error:
                reason = await self._kept_out(error, joined)
                if reason != said:
                    logger.warning("%s", reason)
                said, joined = reason, False
                await asyncio.sleep(REJOIN_SECONDS)
                continue
            except Exception:
                logger.exception("a heartbeat failed")
                await asyncio.sleep(REJOIN_SECONDS)
                continue
            known = await self._changes.wait_for_newer(known, self._settings.heartbeat_seconds)

    async def _probe(self) -> None:
        """Start a round of probes at each heartbeat. It is not waited for: one replica that hangs would put off the look at the others."""
        while True:
            await asyncio.sleep(self._settings.heartbeat_seconds)
            self._loops = [loop for loop in self._loops if not loop.done()]
            self._loops.append(asyncio.create_task(self._probe_once()))

    async def _probe_once(self) -> None:
        try:
            await self._host.probe()
        except Exception:
            logger.exception("probing replicas failed")

    async def _kept_out(self, error: Unreachable, joined: bool) -> str:
        """Why we cannot join. A connection that was in use and ended tells nothing of keys: the supervisor may have been started again."""
        if isinstance(error, Closed) and not joined and await answers(self._supervisor_at[0]):
            return f"the supervisor at {self._supervisor_at[0]} refused: is the cluster key the supervisor's?"
        return f"the supervisor does not answer: {error}"

    async def _supervisor(self) -> Any:
        address, uid = self._supervisor_at
        return await call(xo.actor_ref(address=address, uid=uid), CALL_SECONDS)

    async def _introduction(self) -> dict[str, Any]:
        return {
            "worker_id": self._machine.worker_id,
            "incarnation": self._incarnation,
            "address": self.address,
            "facts": await asyncio.to_thread(self._facts),
            "running": self._host.running(),
        }

    async def _beat(self) -> dict[str, Any]:
        facts = await asyncio.to_thread(self._facts)  # asking a driver takes milliseconds, on a loop that may carry streams
        self._sequence += 1
        return {
            "worker_id": self._machine.worker_id,
            "incarnation": self._incarnation,
            "sequence": self._sequence,
            "facts": facts,
            "replicas": wire_reports(self._host.reports()),
        }

    def _facts(self) -> dict[str, Any]:
        ip = self.address.rsplit(":", 1)[0]
        devices = read_devices(nvml(), os.environ.get("CUDA_VISIBLE_DEVICES")) if self._uses_devices else ()
        return measure(Path(self._machine.shm_dir), ip, self._version, devices).to_wire()

    def _obey(self, answer: dict[str, Any]) -> None:
        """Remove what is not wanted any more, and pass on control states."""
        for replica_uid, incarnation, keep_cache in answer["unwanted"]:
            logger.info("replica %s is not wanted any more", replica_uid)
            self._loops.append(
                asyncio.create_task(self._host.remove_replica(replica_uid, incarnation, keep_cache=keep_cache, grace_seconds=0.0))
            )
        if answer["controls"]:
            self._loops.append(asyncio.create_task(self.apply_controls(answer["controls"])))
        self._loops = [loop for loop in self._loops if not loop.done()]


async def answers(address: str) -> bool:
    """Whether somebody listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), CALL_SECONDS)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _flavour() -> Flavour | None:
    """The installed vLLM, or None. Found without importing it, which takes seconds."""
    try:
        return detect_flavour()
    except FlavourRefused:
        return None

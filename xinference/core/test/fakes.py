"""Fakes for the Protocols of the control plane: time that is moved by hand, engines without processes, processes without engines."""

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

from xinference.core.errors import Unreachable
from xinference.core.keeper import ReplicaKeeper
from xinference.core.orders import Control, ReplicaOrder, ReplicaReport
from xinference.core.placement import Placement
from xinference.core.roster import Member
from xinference.core.topology import DeviceView, HostFacts, ModelFacts, Snapshot, WorkerView

GiB = 1 << 30
MiB = 1 << 20


async def settle(turns: int = 20) -> None:
    """Let every task that can run do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


class ManualClock:
    """Starts at a large odd number and stands still until it is moved."""

    def __init__(self) -> None:
        self._now = 1_000_003.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + 1.7e9

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._count, woken))
        await woken

    async def move(self, seconds: float) -> None:
        """Let time pass; sleepers wake in order."""
        end = self._now + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
            await settle()
        self._now = end
        await settle()

    @property
    def num_sleepers(self) -> int:
        return sum(not woken.done() for _, _, woken in self._sleepers)


class FakeEngine:
    """An engine server that becomes ready, answers and ends when told to."""

    def __init__(self, log: Callable[[str], None], events: list[str] | None = None) -> None:
        self.pid: int | None = None
        self.log = log
        self.events = [] if events is None else events
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.start_error: Exception | None = None
        self.healthy = True
        self.stopped_process: str | None = None
        self.silent = False
        self.on_health: Callable[[float], None] = lambda timeout: None

    async def start(self) -> None:
        self.events.append("start")
        if self.start_error is not None:
            raise self.start_error
        self.pid = 4711

    async def wait_ready(self, timeout: float) -> None:
        await self.ready

    async def health(self, timeout: float) -> bool:
        self.on_health(timeout)
        return self.healthy

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    async def stop(self, grace_seconds: float) -> int | None:
        self.events.append(f"stop {grace_seconds:g}")
        if not self.ended.done():
            self.ended.set_result(-9)
        return self.ended.result()

    def explain(self, status: int) -> str:
        return f"ended with {status}"

    def stopped(self) -> str | None:
        return self.stopped_process


class FakePage:
    """A control page that remembers what was written."""

    def __init__(self) -> None:
        self.states: list[Control] = []
        self.removed = False

    def write(self, control: Control) -> None:
        self.states.append(control)

    def remove(self) -> None:
        self.removed = True


def order(replica_uid: str = "m-0", incarnation: int = 7, **changes: object) -> ReplicaOrder:
    values: dict[str, object] = {
        "model_uid": "m",
        "replica_uid": replica_uid,
        "incarnation": incarnation,
        "engine": "fake",
        "model_path": "/models/m",
        "served_names": ("m",),
        "block_size": 16,
        "max_model_len": 1024,
        "launch_seconds": 60.0,
        **changes,
    }
    return ReplicaOrder(**values)  # type: ignore[arg-type]


def control(replica_uid: str = "m-0", incarnation: int = 7, version: int = 1, epoch: int = 1) -> Control:
    return Control(replica_uid, incarnation, version, epoch)


class FakeProcess:
    """The process of one replica."""

    def __init__(self, order: ReplicaOrder, log: list[str]) -> None:
        self.address = f"address-of-{order.replica_uid}-{order.incarnation}"
        self.order = order
        self.log = log
        self.controls: list[Control] = []
        self.gone = False
        self.state = "creating"

    async def start(self, control: Control) -> None:
        self.log.append("engine")
        self.controls.append(control)
        self.state = "loading"

    async def report(self) -> ReplicaReport:
        if self.gone:
            raise Unreachable("gone")
        return ReplicaReport("m", self.order.replica_uid, self.order.incarnation, self.state, pid=1)

    async def write_control(self, control: Control) -> None:
        self.controls.append(control)

    async def stop(self, grace_seconds: float) -> None:
        self.log.append("stop engine")
        if self.gone:
            raise Unreachable("gone")


class FakeProcesses:
    """Makes fake processes, and stops at a gate or fails where told to.

    ``hold`` and ``fail`` name a step: "open" or "engine". ``reached`` is set when a held step is reached.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.open_orders: set[tuple[str, int]] = set()
        self.made: dict[tuple[str, int], FakeProcess] = {}
        self.hold: str | None = None
        self.fail: str | None = None
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()

    async def _step(self, name: str) -> None:
        if self.hold == name:
            self.reached.set()
            await self.gate.wait()
        if self.fail == name:
            raise OSError(f"{name} failed")

    async def open(self, order: ReplicaOrder) -> FakeProcess:
        self.log.append("open")
        process = FakeProcess(order, self.log)
        self.open_orders.add((order.replica_uid, order.incarnation))
        await self._step("open")
        start = process.start

        async def held_start(control: Control) -> None:
            await start(control)
            await self._step("engine")

        process.start = held_start  # type: ignore[method-assign]
        self.made[order.replica_uid, order.incarnation] = process
        return process

    async def close(self, order: ReplicaOrder) -> None:
        self.log.append("close")
        self.open_orders.discard((order.replica_uid, order.incarnation))


class FakeLeftovers:
    """Counts removals."""

    def __init__(self) -> None:
        self.removed: list[str | None] = []
        self.sockets: list[str] = []
        self.waited: list[int] = []

    def remove_cache(self, replica_uid: str | None) -> int:
        self.removed.append(replica_uid)
        return 0

    def remove_socket(self, replica_uid: str) -> None:
        self.sockets.append(replica_uid)

    async def wait_ended(self, pid: int) -> None:
        self.waited.append(pid)


class NoAdopter:
    """A supervisor that adopts nothing."""

    def adopt(self, member: Member, running: list[dict[str, Any]]) -> None:
        pass


class FakeWorkers:
    """Workers as a keeper calls them: remembers what runs, and stops at a gate or fails where told to."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[str, int]] = {}
        self.orders: list[ReplicaOrder] = []
        self.removals: list[tuple[str, int, bool]] = []
        self.asked: list[str] = []
        self.graces: list[float] = []
        self.hold = False
        self.reached = asyncio.Event()
        self.fail: Exception | None = None
        self.idle = True
        self.asking_takes: ManualClock | None = None
        self.ready_at_once = True

    async def start_replica(self, worker_id: str, order: ReplicaOrder, control: Control) -> ReplicaReport:
        self.orders.append(order)
        self.running[order.replica_uid] = (worker_id, order.incarnation)
        if self.hold:
            self.reached.set()
            await asyncio.Event().wait()
        if self.fail is not None:
            raise self.fail
        state = "ready" if self.ready_at_once else "loading"
        return ReplicaReport("m", order.replica_uid, order.incarnation, state, pid=1, uds="/s", address="a")

    async def remove_replica(self, worker_id: str, report: ReplicaReport, *, keep_cache: bool, grace_seconds: float) -> None:
        self.removals.append((report.replica_uid, report.incarnation, keep_cache))
        self.asked.append(worker_id)
        self.graces.append(grace_seconds)
        if self.running.get(report.replica_uid) == (worker_id, report.incarnation):
            del self.running[report.replica_uid]

    async def is_idle(self, report: ReplicaReport) -> bool:
        if self.asking_takes is not None:
            await self.asking_takes.sleep(10.0)
        return self.idle


class FakeSurroundings:
    """A deployment of one replica."""

    def __init__(self) -> None:
        self.claims: set[str] = set()
        self.changes: list[tuple[str, str]] = []
        self.refusal: Exception | None = None
        self.next_place: Placement | None = None

    def choose(self, before: Placement) -> Placement:
        if self.refusal is not None:
            raise self.refusal
        self.claims.add(before.replica_uid)
        return self.next_place or before

    def no_place(self, before: Placement) -> str | None:
        return None if self.refusal is None else str(self.refusal)

    def release(self, replica_uid: str) -> None:
        self.claims.discard(replica_uid)

    def order(self, placement: Placement, incarnation: int, log_start: int) -> ReplicaOrder:
        return order(placement.replica_uid, incarnation, log_start=log_start)

    def control(self, replica_uid: str, incarnation: int) -> Control:
        return Control(replica_uid, incarnation, 1, 1)

    def changed(self, keeper: ReplicaKeeper, message: str) -> None:
        self.changes.append((keeper.state.value, message))


def facts(**changes: object) -> HostFacts:
    values: dict[str, object] = {
        "host": "boot.1",
        "ip": "127.0.0.1",
        "memory_bytes": 32 * GiB,
        "memory_free_bytes": 20 * GiB,
        "shm_bytes": 16 * GiB,
        "shm_free_bytes": 16 * GiB,
        "num_cpus": 8,
        **changes,
    }
    return HostFacts(**values)  # type: ignore[arg-type]


def devices(count: int) -> tuple[DeviceView, ...]:
    return tuple(DeviceView(index, "H200", 140 * GiB, 139 * GiB) for index in range(count))


def worker(worker_id: str = "w1", num_replicas: int = 0, **changes: object) -> WorkerView:
    return WorkerView(worker_id, facts(**changes), num_replicas)


def snapshot(*workers: WorkerView, taken: frozenset[str] = frozenset()) -> Snapshot:
    return Snapshot(workers or (worker(),), "boot.1", taken)


def model(**changes: object) -> ModelFacts:
    values: dict[str, object] = {
        "architectures": ("LlamaForCausalLM",),
        "kv_bytes_per_token": 1024,
        "max_model_len": 4096,
        "sharing_refusal": None,
        "weights_bytes": 100 * MiB,
        "identity": "id",
        **changes,
    }
    return ModelFacts(**values)  # type: ignore[arg-type]

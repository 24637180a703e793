"""Which worker and which device each replica gets. Pure.

Replicas are reached through Unix sockets, and share through memory: so they go to workers on the API's host. Among those the emptiest
is taken first. A device carries one replica unless the user names it twice, or names a used one together with a share of its memory.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from xinference.core.spec import Engine, LaunchSpec
from xinference.core.topology import Snapshot, WorkerView
from xinference.errors import InvalidRequest, NoReplicaAvailable, NotSupported

SHARED_DEVICE_UTILIZATION = 0.9  # of a device's memory, divided among the replicas that a launch puts on it
UID_STEM_CHARACTERS = 40


@dataclass(frozen=True)
class Placement:
    """One replica's place. ``devices`` is empty on a CPU; ``gpu_memory_utilization`` is set only where a device is shared."""

    replica_uid: str
    worker_id: str
    devices: tuple[int, ...] = ()
    gpu_memory_utilization: float | None = None


@dataclass(frozen=True)
class Wish:
    """What the user said about one replica's place."""

    replica_uid: str
    worker_ip: str | None
    device: int | None


def replica_uids(spec: LaunchSpec, model_uid: str, taken: frozenset[str]) -> list[str]:
    """Names for the replicas: the user's, else model and number; unique in the cluster, since names of files are made of them.

    Raises:
        InvalidRequest: a name that the user chose exists already.
    """
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", model_uid.rsplit("/", 1)[-1])[:UID_STEM_CHARACTERS].strip("-") or "model"
    used = set(taken)
    chosen: list[str] = []
    for index in range(spec.replica):
        given = spec.replica_config[index].replica_uid if spec.replica_config else None
        if given is not None and given in used:
            raise InvalidRequest(f"there is already a replica named {given!r}", f"replica_config.{index}.replica_uid")
        uid = given or _free_name(stem, index, used)
        used.add(uid)
        chosen.append(uid)
    return chosen


def _free_name(stem: str, index: int, used: set[str]) -> str:
    candidates = [f"{stem}-{index}", *(f"{stem}-{suffix}-{index}" for suffix in range(2, 1000))]
    name = next(name for name in candidates if name not in used)
    return name


def next_replica_uid(existing: list[str], model_uid: str, taken: frozenset[str]) -> str:
    """A name for one more replica of a model."""
    stem = existing[0].rsplit("-", 1)[0] if existing else re.sub(r"[^A-Za-z0-9_-]+", "-", model_uid)[:UID_STEM_CHARACTERS]
    index = 0
    while f"{stem}-{index}" in taken:
        index += 1
    return f"{stem}-{index}"


def wishes_of(spec: LaunchSpec, uids: list[str]) -> list[Wish]:
    """The user's wishes, one a replica."""
    wishes = []
    for index, uid in enumerate(uids):
        ip, device = spec.worker_ip, None
        if spec.gpu_idx is not None and index < len(spec.gpu_idx):
            device = spec.gpu_idx[index]
        if spec.replica_config is not None and index < len(spec.replica_config) and spec.replica_config[index].devices:
            choice = spec.replica_config[index].devices[0]
            ip, device = choice.worker_ip or ip, choice.gpu_idx
        wishes.append(Wish(uid, ip, device))
    return wishes


def place(spec: LaunchSpec, wishes: list[Wish], snapshot: Snapshot) -> list[Placement]:
    """A place for each wish, in their order.

    Raises:
        NoReplicaAvailable: no worker is there.
        InvalidRequest: a named worker or device does not exist, is in use, or there are not enough devices.
        NotSupported: the only workers are on another host than the API.
    """
    if not snapshot.workers:
        raise NoReplicaAvailable("no worker has joined this cluster: start one with xinference-worker")
    near = [worker for worker in snapshot.workers if worker.facts.host == snapshot.host]
    if not near:
        raise NotSupported("all workers are on other hosts than the API server; replicas on another host are not available in this version")
    placed: list[Placement] = []
    for wish in wishes:
        placed.append(_place_one(spec, wish, workers_at(wish.worker_ip, near), placed))
    return [_with_share(spec, item, placed) for item in placed]


def workers_at(ip: str | None, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """The workers at an address; all of them where the user named none.

    Raises:
        InvalidRequest: there is none at that address.
    """
    found = [worker for worker in workers if ip in (None, worker.facts.ip)]
    if not found:
        known = ", ".join(sorted({worker.facts.ip for worker in workers}))
        raise InvalidRequest(f"no worker at {ip}; workers are at {known}", "worker_ip")
    return found


def _place_one(spec: LaunchSpec, wish: Wish, workers: list[WorkerView], placed: list[Placement]) -> Placement:
    def load(worker: WorkerView) -> tuple[int, str]:
        return worker.num_replicas + sum(p.worker_id == worker.worker_id for p in placed), worker.worker_id

    workers = sorted(workers, key=load)
    if wish.device is not None:
        return _place_on_device(spec, wish, wish.device, workers)
    if spec.model_engine is Engine.FAKE or spec.n_gpu == 0 or not any(worker.facts.devices for worker in workers):
        if isinstance(spec.n_gpu, int) and spec.n_gpu > 0 and spec.model_engine is not Engine.FAKE:
            raise InvalidRequest("n_gpu=1, but no worker has a device", "n_gpu")
        return Placement(wish.replica_uid, workers[0].worker_id)
    for worker in workers:
        for device in worker.facts.devices:
            if not worker.users_of(device.index) and not any(p.worker_id == worker.worker_id and device.index in p.devices for p in placed):
                return Placement(wish.replica_uid, worker.worker_id, (device.index,))
    devices = sum(len(worker.facts.devices) for worker in workers)
    raise InvalidRequest(
        f"{spec.replica} replicas need one free device each; of {devices} none is left. "
        "Stop a model, or put replicas on one device with gpu_idx",
        "replica",
    )


def _place_on_device(spec: LaunchSpec, wish: Wish, device: int, workers: list[WorkerView]) -> Placement:
    owners = [worker for worker in workers if worker.has_device(device)]
    if not owners:
        raise InvalidRequest(f"there is no device {device} on {'that worker' if wish.worker_ip else 'any worker'}", "gpu_idx")
    for worker in owners:
        if not worker.users_of(device):
            return Placement(wish.replica_uid, worker.worker_id, (device,))
    if "gpu_memory_utilization" not in spec.engine_config:
        users = ", ".join(owners[0].users_of(device))
        raise InvalidRequest(
            f"device {device} is used by {users}; to share it, say how much of it with gpu_memory_utilization",
            "gpu_idx",
        )
    return Placement(wish.replica_uid, owners[0].worker_id, (device,))


def _with_share(spec: LaunchSpec, item: Placement, placed: list[Placement]) -> Placement:
    sharers = sum(other.worker_id == item.worker_id and other.devices == item.devices for other in placed)
    if not item.devices or sharers < 2 or "gpu_memory_utilization" in spec.engine_config:
        return item
    return Placement(item.replica_uid, item.worker_id, item.devices, round(SHARED_DEVICE_UTILIZATION / sharers, 3))

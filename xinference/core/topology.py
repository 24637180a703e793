"""What the supervisor knows of machines when it plans: plain values, a snapshot of one moment."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DeviceView:
    """One accelerator of a worker. ``replicas`` are the replicas placed on it."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostFacts:
    """What a worker measures of its machine.

    Args:
        host: identity of the machine's shared memory: two workers with equal values can map each other's segments.
        ip: the address the worker is reached at, and the name users know it by.
        memory_bytes, memory_free_bytes: of the machine or of the container, whichever is less.
        shm_bytes, shm_free_bytes: of the directory of segments.
        instructions: CPU features that decide how a CPU engine lays out its KV.
    """

    host: str
    ip: str
    memory_bytes: int
    memory_free_bytes: int
    shm_bytes: int
    shm_free_bytes: int
    num_cpus: int
    devices: tuple[DeviceView, ...] = ()
    engine_version: str | None = None

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "HostFacts":
        devices = tuple(DeviceView(**{**d, "replicas": tuple(d["replicas"])}) for d in wire["devices"])
        return cls(**{**wire, "devices": devices})


@dataclass(frozen=True)
class WorkerView:
    """One live worker as the planner sees it. ``promised_bytes`` of memory belong to replicas that are still being created."""

    worker_id: str
    facts: HostFacts
    num_replicas: int = 0
    promised_bytes: int = 0
    replicas_by_device: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def memory_free_bytes(self) -> int:
        return max(0, self.facts.memory_free_bytes - self.promised_bytes)

    def users_of(self, device: int) -> tuple[str, ...]:
        return self.replicas_by_device.get(device, ())

    def has_device(self, index: int) -> bool:
        return any(device.index == index for device in self.facts.devices)


@dataclass(frozen=True)
class Snapshot:
    """The live workers, and the host that the API can reach through Unix sockets."""

    workers: tuple[WorkerView, ...]
    host: str
    replica_uids: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ModelFacts:
    """What a worker read from a model's directory.

    Args:
        kv_bytes_per_token: KV of one token in all layers, in the dtype the engine will use.
        max_model_len: longest request the model was made for, in tokens.
        sharing_refusal: why blocks of this model cannot be shared, or None.
        weights_bytes: size of the weight files.
        identity: digest of what the weights are; equal identities compute equal KV.
    """

    architectures: tuple[str, ...]
    kv_bytes_per_token: int
    max_model_len: int
    sharing_refusal: str | None
    weights_bytes: int
    identity: str

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "ModelFacts":
        return cls(**{**wire, "architectures": tuple(wire["architectures"])})

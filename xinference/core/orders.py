"""What the supervisor tells a worker about one engine start, and what a worker reports back. Values that cross processes as plain dicts.

An order is bound to an incarnation, a 64-bit number drawn for each engine start. A report or a removal that names another incarnation is
about another engine and changes nothing.
"""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class CacheOrder:
    """Xavier's part of an order. ``epoch`` is the model's clear epoch at this moment."""

    cpu_cache_bytes: int
    model_identity: str
    epoch: int


@dataclass(frozen=True)
class ReplicaOrder:
    """Everything that a worker needs to start one engine.

    Args:
        served_names: names that the engine answers to.
        kv_cache_bytes: KV memory of a CPU engine; None lets the engine decide.
        log_start: number of the first log line.
        launch_seconds: not ready by then means failed.
        num_threads: compute threads of a CPU engine.
        issued_by: incarnation of the supervisor.
        model: spec, facts and plan of the model as wire dicts, for a supervisor that was started anew and knows nothing.
    """

    model_uid: str
    replica_uid: str
    incarnation: int
    engine: str
    model_path: str
    served_names: tuple[str, ...]
    block_size: int
    max_model_len: int
    launch_seconds: float
    devices: tuple[int, ...] = ()
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    engine_config: dict[str, Any] = field(default_factory=dict)
    envs: dict[str, str] = field(default_factory=dict)
    cache: CacheOrder | None = None
    log_start: int = 0
    num_threads: int = 1
    issued_by: int = 0
    model: dict[str, Any] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "ReplicaOrder":
        cache = None if wire["cache"] is None else CacheOrder(**wire["cache"])
        return cls(**{**wire, "served_names": tuple(wire["served_names"]), "devices": tuple(wire["devices"]), "cache": cache})


@dataclass(frozen=True)
class EngineCommand:
    """Argument vector and whole environment of an engine server."""

    argv: tuple[str, ...]
    env: dict[str, str]

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "EngineCommand":
        return cls(tuple(wire["argv"]), wire["env"])


@dataclass(frozen=True)
class ReplicaReport:
    """How one engine start is doing, as its worker sees it.

    Args:
        state: one of ReplicaState's values.
        cause: why it failed.
        uds: path of the engine's Unix socket.
        log_tail: last log lines, only when it failed; log_next numbers the line after them.
    """

    model_uid: str
    replica_uid: str
    incarnation: int
    state: str
    cause: str | None = None
    pid: int | None = None
    uds: str | None = None
    address: str | None = None
    log_tail: tuple[str, ...] = ()
    log_next: int = 0

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "ReplicaReport":
        return cls(**{**wire, "log_tail": tuple(wire["log_tail"])})


@dataclass(frozen=True)
class Peer:
    """One peer as a control page names it."""

    worker_id: str
    replica_uid: str
    incarnation: int


@dataclass(frozen=True)
class Control:
    """What a replica's control page shall say. ``version`` grows with every change, so that an older one arriving late is dropped."""

    replica_uid: str
    incarnation: int
    version: int
    epoch: int
    peers: tuple[Peer, ...] = ()
    stopping: bool = False

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "Control":
        return cls(**{**wire, "peers": tuple(Peer(**peer) for peer in wire["peers"])})

"""From what a user asks and what the machines have to what will be launched, with the arithmetic in words. Pure.

    LaunchSpec + ModelFacts + Snapshot ──plan_launch──> LaunchPlan        nothing is started, nothing is measured

Memory is checked here because a launch that does not fit must be refused before any process starts, not die in the kernel's hands.
"""

from dataclasses import asdict, dataclass
from typing import Any

from xinference.core.placement import Placement, place, replica_uids, wishes_of
from xinference.core.spec import Engine, LaunchSpec
from xinference.core.topology import ModelFacts, Snapshot, WorkerView
from xinference.errors import InvalidRequest, NotSupported
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.directory.geometry import SegmentGeometry, plan_segment
from xinference.model.llm.vllm.xavier.directory.layout import LINE_BYTES
from xinference.model.llm.vllm.xavier.errors import BudgetTooSmall

MiB = 1 << 20
DEFAULT_CACHE_SHARE = 0.2  # of the lesser of free memory and free shared memory, for all replicas of a launch on one host together
DEFAULT_KV_SHARE = 0.2  # of free memory, the same, for the KV caches of CPU engines
MAX_DEFAULT_KV_BYTES = 4 << 30  # a CPU engine seldom profits from more; ask for it with kv_cache_memory_bytes
ENGINE_PROCESS_BYTES = 640 * MiB  # a CPU engine's own memory beside weights and KV (measured: 500 to 600 MiB)
BLOCK_SIZE = {"cpu": 32, "gpu": 16, "fake": 16}  # tokens; vLLM on a CPU wants a multiple of 32
MIN_FREE_BLOCKS = 2  # an engine's KV cache must hold the longest request and these


@dataclass(frozen=True)
class CachePlan:
    """The CPU tier of each replica, in bytes; ``blocks`` and ``tokens`` are what one replica's tier holds."""

    cpu_cache_bytes: int
    host_total_bytes: int
    blocks: int
    tokens: int
    file_bytes: int
    book_bytes: int
    arithmetic: str


@dataclass(frozen=True)
class LaunchPlan:
    """What will be launched. ``kv_cache_bytes`` is None where the engine sizes its KV cache itself (on a GPU)."""

    model_uid: str
    replicas: tuple[Placement, ...]
    kv_bytes_per_token: int
    block_size: int
    max_model_len: int
    kv_cache_bytes: int | None
    weights_bytes: int
    cache: CachePlan | None
    arithmetic: str
    num_threads: int = 1

    @property
    def bytes_per_block(self) -> int:
        return self.kv_bytes_per_token * self.block_size

    @property
    def memory_bytes_each(self) -> int:
        """Host memory that one replica will come to take."""
        return _memory_each(self.kv_cache_bytes, self.weights_bytes, self.cache.cpu_cache_bytes if self.cache else 0)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "LaunchPlan":
        """Rebuild what ``to_wire`` gave."""
        return cls(
            model_uid=wire["model_uid"],
            replicas=tuple(Placement(**{**replica, "devices": tuple(replica["devices"])}) for replica in wire["replicas"]),
            kv_bytes_per_token=wire["kv"]["bytes_per_token"],
            block_size=wire["kv"]["block_size"],
            max_model_len=wire["max_model_len"],
            kv_cache_bytes=wire["kv_cache_bytes"],
            weights_bytes=wire["weights_bytes"],
            cache=None if wire["xavier"] is None else CachePlan(**wire["xavier"]),
            arithmetic=wire["arithmetic"],
            num_threads=wire["num_threads"],
        )

    def to_wire(self) -> dict[str, Any]:
        return {
            "model_uid": self.model_uid,
            "replicas": [
                {
                    "replica_uid": p.replica_uid,
                    "worker_id": p.worker_id,
                    "devices": list(p.devices),
                    "gpu_memory_utilization": p.gpu_memory_utilization,
                }
                for p in self.replicas
            ],
            "kv": {"bytes_per_token": self.kv_bytes_per_token, "block_size": self.block_size, "bytes_per_block": self.bytes_per_block},
            "max_model_len": self.max_model_len,
            "kv_cache_bytes": self.kv_cache_bytes,
            "weights_bytes": self.weights_bytes,
            "num_threads": self.num_threads,
            "xavier": None if self.cache is None else asdict(self.cache),
            "arithmetic": self.arithmetic,
        }


def plan_launch(spec: LaunchSpec, model_uid: str, facts: ModelFacts, snapshot: Snapshot) -> LaunchPlan:
    """Plan a launch.

    Raises:
        InvalidRequest: it cannot work as asked; the message holds the arithmetic and what to change.
        NoReplicaAvailable, NotSupported: there is nowhere to put a replica.
    """
    if spec.enable_xavier and facts.sharing_refusal is not None:
        raise InvalidRequest(
            f"this model cannot share its cache: {facts.sharing_refusal}. Launch it without enable_xavier", "enable_xavier"
        )
    max_model_len = _max_model_len(spec, facts)
    placed = place(spec, wishes_of(spec, replica_uids(spec, model_uid, snapshot.replica_uids)), snapshot)
    on_cpu = not any(p.devices for p in placed)
    if spec.enable_xavier and not on_cpu:
        raise NotSupported(
            "sharing between replicas on GPUs is not available in this version: launch without enable_xavier", "enable_xavier"
        )
    kind = "fake" if spec.model_engine is Engine.FAKE else "cpu" if on_cpu else "gpu"
    block_size = spec.engine_config.get("block_size", BLOCK_SIZE[kind])
    if block_size < 1:
        raise InvalidRequest("block_size is at least 1 token", "engine_config.block_size")
    workers = [worker for worker in snapshot.workers if worker.worker_id in {p.worker_id for p in placed}]
    room = Room(min(worker.memory_free_bytes for worker in workers), min(worker.facts.shm_free_bytes for worker in workers), len(placed))
    kv_bytes = (
        _kv_cache_bytes(spec, facts.kv_bytes_per_token * block_size, -(-max_model_len // block_size), room) if kind == "cpu" else None
    )
    cache = _plan_cache(spec, facts.kv_bytes_per_token, block_size, room) if spec.enable_xavier else None
    weights = facts.weights_bytes if kind == "cpu" else 0
    plan = LaunchPlan(
        model_uid, tuple(placed), facts.kv_bytes_per_token, block_size, max_model_len, kv_bytes, weights, cache,
        _arithmetic(spec, facts, block_size, kv_bytes), _threads(workers, len(placed)),
    )  # fmt: skip
    check_memory(plan, room)
    return plan


@dataclass(frozen=True)
class Room:
    """Free bytes on the host, and how many replicas of this launch share them."""

    memory_bytes: int
    shm_bytes: int
    replicas: int


def room_on(worker: WorkerView, replicas: int) -> Room:
    """The room for ``replicas`` more on a worker."""
    return Room(worker.memory_free_bytes, worker.facts.shm_free_bytes, replicas)


def check_memory(plan: LaunchPlan, room: Room) -> None:
    """Raises InvalidRequest, with the sum in words, when so many replicas of the plan do not fit."""
    each = plan.memory_bytes_each
    if each * room.replicas > room.memory_bytes:
        parts = [f"engine {show(ENGINE_PROCESS_BYTES)}"] if plan.kv_cache_bytes is not None else []
        parts += [f"weights {show(plan.weights_bytes)}"] if plan.weights_bytes else []
        parts += [f"KV cache {show(plan.kv_cache_bytes)}"] if plan.kv_cache_bytes is not None else []
        parts += [f"Xavier {show(plan.cache.cpu_cache_bytes)}"] if plan.cache else []
        raise InvalidRequest(
            f"{room.replicas} replicas x ({' + '.join(parts)}) = {show(each * room.replicas)}, "
            f"but {show(room.memory_bytes)} of memory are free. "
            "Lower kv_cache_memory_bytes, xavier_cpu_cache_bytes or the number of replicas",
            "xavier_cpu_cache_bytes" if plan.cache else "replica",
        )
    if plan.cache and plan.cache.file_bytes * room.replicas > room.shm_bytes:
        raise InvalidRequest(
            f"{room.replicas} replicas x {show(plan.cache.file_bytes)} = {show(plan.cache.file_bytes * room.replicas)} of shared memory, "
            f"but {show(room.shm_bytes)} are free there. Lower xavier_cpu_cache_bytes, or give the container a larger /dev/shm",
            "xavier_cpu_cache_bytes",
        )


def _threads(workers: list[WorkerView], replicas: int) -> int:
    """Compute threads of each CPU engine: an equal share of the processors, but for one that serves HTTP and moves blocks."""
    return max(1, (min(worker.facts.num_cpus for worker in workers) - 1) // replicas)


def _memory_each(kv_cache_bytes: int | None, weights_bytes: int, cache_bytes: int) -> int:
    return cache_bytes + (0 if kv_cache_bytes is None else kv_cache_bytes + weights_bytes + ENGINE_PROCESS_BYTES)


def _max_model_len(spec: LaunchSpec, facts: ModelFacts) -> int:
    asked = spec.engine_config.get("max_model_len", facts.max_model_len)
    if asked < 1 or asked > facts.max_model_len:
        limit = facts.max_model_len
        raise InvalidRequest(f"max_model_len={asked}, but this model is made for 1 to {limit} tokens", "engine_config.max_model_len")
    return int(asked)


def _kv_cache_bytes(spec: LaunchSpec, block_bytes: int, blocks_needed: int, room: Room) -> int:
    """Memory for the KV cache of one CPU engine: as asked, else a share of what is free, but enough for the longest request."""
    least = (blocks_needed + MIN_FREE_BLOCKS) * block_bytes
    asked = spec.engine_config.get("kv_cache_memory_bytes")
    if asked is not None:
        if asked < least:
            raise InvalidRequest(
                f"kv_cache_memory_bytes={show(asked)} cannot hold one request of the longest length: {blocks_needed} blocks and "
                f"{MIN_FREE_BLOCKS} to spare of {show(block_bytes)} = {show(least)}. Raise it, or lower max_model_len",
                "engine_config.kv_cache_memory_bytes",
            )
        return int(asked)
    share = min(int(room.memory_bytes * DEFAULT_KV_SHARE) // room.replicas, MAX_DEFAULT_KV_BYTES)
    return max(least, share // MiB * MiB)


def _plan_cache(spec: LaunchSpec, bytes_per_token: int, block_size: int, room: Room) -> CachePlan:
    free = min(room.memory_bytes, room.shm_bytes)
    asked = spec.xavier_cpu_cache_bytes
    budget = int(free * DEFAULT_CACHE_SHARE) // room.replicas // MiB * MiB if asked is None else asked
    try:
        geometry = plan_segment(budget, bytes_per_token * block_size, request_records=XavierConfig.request_ring_records)
    except BudgetTooSmall as error:
        raise InvalidRequest(f"xavier_cpu_cache_bytes is too small: {error}", "xavier_cpu_cache_bytes") from None
    return CachePlan(
        cpu_cache_bytes=budget,
        host_total_bytes=budget * room.replicas,
        blocks=geometry.num_places,
        tokens=geometry.num_places * block_size,
        file_bytes=geometry.file_bytes,
        book_bytes=geometry.book_bytes,
        arithmetic=_cache_arithmetic(budget, geometry, bytes_per_token * block_size, block_size, room, asked is None),
    )


def _cache_arithmetic(budget: int, geometry: SegmentGeometry, block_bytes: int, block_size: int, room: Room, by_default: bool) -> str:
    """The sum in exact bytes: rounded ones do not add up, and a reader who checks them would search for what is missing."""
    free = show(min(room.memory_bytes, room.shm_bytes))
    origin = (
        f"default: {DEFAULT_CACHE_SHARE:.0%} of {free} free / {room.replicas} replicas = {show(budget)} each, in whole MiB"
        if by_default
        else f"{show(budget)} for each replica"
    )
    index = geometry.file_bytes - geometry.slab_bytes
    left = budget - geometry.file_bytes - geometry.book_bytes
    rounding = f" ({block_bytes} B in whole lines of {LINE_BYTES} B)" if block_bytes != geometry.place_bytes else ""
    return (
        f"{origin}; {budget} B - {index} B index and records - {geometry.book_bytes} B books - {left} B left over = "
        f"{geometry.slab_bytes} B = {geometry.num_places} blocks of {geometry.place_bytes} B{rounding} = "
        f"{geometry.num_places * block_size} tokens; {room.replicas} replicas on this host = {show(budget * room.replicas)}"
    )


def _arithmetic(spec: LaunchSpec, facts: ModelFacts, block_size: int, kv_bytes: int | None) -> str:
    block = facts.kv_bytes_per_token * block_size
    text = f"1 block = {block_size} tokens x {facts.kv_bytes_per_token} bytes = {block} B"
    if kv_bytes is None:
        return text
    blocks, left = divmod(kv_bytes, block)
    spare = f" - {left} B left over" if left else ""
    return f"{text}; KV cache {kv_bytes} B{spare} = {blocks} blocks of {block} B = {blocks * block_size} tokens for each replica"


def show(num_bytes: int) -> str:
    """Bytes for people: ``1.5 GiB``; exact below 10 KiB."""
    size = float(num_bytes)
    if num_bytes < 10240:
        return f"{num_bytes} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024 or unit == "TiB":
            return f"{size:.1f} {unit}"
    raise AssertionError("unreachable")

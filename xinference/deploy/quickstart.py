"""The quick start, step by step: model, server, launch, demonstration, and with --exit the way back.

What it starts it can stop: the server it starts is recorded in the home directory, so that a later run knows it as its own. A server
that somebody else started is used, and left alone afterwards but for the model.
"""

import secrets
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from xinference.api.auth import ADMIN_KEY_FILE
from xinference.client.presence import is_running
from xinference.client.sync_client import Client
from xinference.deploy import background, demo
from xinference.deploy.demo import DemoFailed, Demonstration
from xinference.deploy.machine import cpu_flags
from xinference.errors import ModelNotFound
from xinference.model.llm.demo_model import DemoModelFailed, ensure_demo_model
from xinference.settings import Settings

Json = dict[str, Any]
MODEL_UID: Final = "demo"
REPLICAS: Final = 2
BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16"})
CACHE_BYTES: Final = 256 << 20
# Small engines on purpose: two fit a laptop beside everything else.
ENGINE_CONFIG: Final[Json] = {"max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 512}
# Engine memory for the demo model. A quarter of it, the most that loads may hold at once, is room for the whole prompt.
DEMO_KV_CACHE_BYTES: Final = 512 << 20


def cpu_dtype(flags: frozenset[str]) -> str:
    """The number type in which this processor computes fastest: without instructions for bfloat16 that one takes eight times as long as
    float32 (9.6 and 74.8 GFLOP/s, one AVX2 core, 512 x 576 x 1536)."""
    return "bfloat16" if flags & BFLOAT16_FLAGS else "float32"


class Steps(Protocol):
    """Who is told what goes on; see command/quickstart.py."""

    def step(self, name: str) -> AbstractContextManager[None]:
        """One step, timed from entering to leaving."""

    def advance(self, message: str, share: float | None) -> None:
        """What the step is doing now; ``share`` from 0 to 1 where it is known how much is left."""


@dataclass(frozen=True)
class Outcome:
    """What a run showed. ``problems`` and ``remains`` are empty if all went well."""

    endpoint: str
    seed: int
    demonstration: Demonstration
    problems: list[str]
    remains: list[str]


class QuickStart:
    """One run.

    Args:
        settings: of the server that is started if none runs.
        api_key: for a server that asks for one.
        model_path: a model of the user's own, instead of the demo model.
        steps: who is told of progress.
    """

    def __init__(self, settings: Settings, api_key: str | None, model_path: Path | None, steps: Steps) -> None:
        self._settings = settings
        self._api_key = api_key
        self._model_path = model_path
        self._steps = steps
        self._launched = False

    def run(self, stops_afterwards: bool) -> Outcome:
        """Do it all.

        Raises:
            XinferenceError: a step failed; with ``stops_afterwards`` everything started is stopped all the same.
        """
        seed = secrets.randbits(64)
        try:
            self._server()
            with self._client() as client:
                self._ensure_model(client)
                demonstration = self._demonstrate(client, seed)
        except BaseException as error:
            for left in self._stop() if stops_afterwards else ():
                error.add_note(f"left behind: {left}")
            raise
        remains = self._stop() if stops_afterwards else []
        return Outcome(background.endpoint_of(self._settings), seed, demonstration, demonstration.problems(), remains)

    def _server(self) -> None:
        if is_running(background.endpoint_of(self._settings)):
            return
        with self._steps.step("server"):
            background.start(self._settings, lambda: self._steps.advance("starting", None))

    def _ensure_model(self, client: Client) -> None:
        try:
            model = client.model(MODEL_UID)
        except ModelNotFound:
            model = None
        if model is None or model["state"] != "ready":
            self._launch(client, was_there=model is not None)
        elif not model["xavier"] or len(model["replicas"]) < REPLICAS:
            raise DemoFailed(f"a model '{MODEL_UID}' runs without Xavier or with one replica: `xinference terminate {MODEL_UID}` first")

    def _launch(self, client: Client, was_there: bool) -> None:
        path, engine_config = self._model_path, ENGINE_CONFIG
        if path is None:
            path = self._demo_model()
            engine_config = ENGINE_CONFIG | {"kv_cache_memory_bytes": DEMO_KV_CACHE_BYTES, "dtype": cpu_dtype(cpu_flags())}
        with self._steps.step("launch"):
            if was_there:
                client.terminate(MODEL_UID)
            self._launched = True
            client.launch(
                model_uid=MODEL_UID,
                model_path=str(path),
                replica=REPLICAS,
                enable_xavier=True,
                xavier_cpu_cache_bytes=CACHE_BYTES,
                engine_config=engine_config,
            )
            client.wait(MODEL_UID, lambda event: self._steps.advance(str(event["message"]), event.get("progress")))

    def _demo_model(self) -> Path:
        with self._steps.step("demo model"):
            try:
                return ensure_demo_model(self._settings.home_dir, self._steps.advance)
            except DemoModelFailed as error:
                raise DemoFailed(str(error)) from error

    def _demonstrate(self, client: Client, seed: int) -> Demonstration:
        ready = sorted(found["replica_uid"] for found in client.replicas(MODEL_UID) if found["state"] == "ready")
        if len(ready) < REPLICAS:
            raise DemoFailed(f"{len(ready)} replicas of '{MODEL_UID}' are ready, {REPLICAS} are needed")
        first, second = ready[:2]
        with self._steps.step("warm-up"):
            demo.warm_up(client, MODEL_UID, [first, second])
            prompt = demo.make_prompt(client, MODEL_UID, seed)
        with self._steps.step(f"prompt to {first}"):
            saved_before = demo.saved_blocks(client, MODEL_UID, first)
            cold = demo.ask(client, MODEL_UID, first, prompt)
            demo.wait_until_saved(client, MODEL_UID, first, saved_before, cold.prompt_tokens)
        with self._steps.step(f"prompt to {second}"):
            shared = demo.ask(client, MODEL_UID, second, prompt)
        return Demonstration(cold, shared)

    def _stop(self) -> list[str]:
        with self._steps.step("stop"):
            server = self._own_server()
            if server is not None:
                return background.stop(server, self._settings)
            if self._launched:
                with self._client() as client:
                    client.terminate(MODEL_UID)
            return []

    def _own_server(self) -> background.Server | None:
        """The server, if this or an earlier run started it."""
        server = background.find(self._settings.home_dir)
        return server if server is not None and server.endpoint == background.endpoint_of(self._settings) else None

    def _client(self) -> Client:
        """A client of the server. The key of our own home goes to our own server only."""
        key_file = self._settings.home_dir / ADMIN_KEY_FILE
        own_key = key_file.read_text().strip() if self._own_server() is not None and key_file.exists() else None
        return Client(background.endpoint_of(self._settings), self._api_key or own_key)

"""A server of its own for a benchmark, and requests whose first token is timed."""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

WORDS = (
    "river stone cloud garden window paper silver mountain letter bridge market winter summer engine planet forest harbour music "
    "kitchen mirror candle ticket shadow valley thunder orange pencil island captain feather lantern copper meadow signal anchor"
).split()
READY_SECONDS = 300.0


@dataclass(frozen=True)
class Answer:
    """One streamed request as the client saw it."""

    ttft_seconds: float
    total_seconds: float
    text: str
    logprobs: list[dict[str, float]]
    usage: dict[str, Any]
    extra: dict[str, Any]


def prose(seed: int, num_words: int) -> str:
    """Words in an order that only this seed gives: two seeds share no prefix."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(num_words))


class Served:
    """A running server's address, with the few calls that benchmarks make."""

    def __init__(self, endpoint: str, process: subprocess.Popen[bytes], session: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self.process = process
        self._session = session

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """A REST call; raises RuntimeError with the server's words unless it succeeds."""
        async with self._session.request(method, self.endpoint + path, json=body) as response:
            text = await response.text()
            if response.status >= 400:
                raise RuntimeError(f"{method} {path}: {response.status} {text}")
            return json.loads(text) if response.content_type == "application/json" else text

    async def complete(self, model: str, prompt: str, *, replica: str | None = None, uds: str | None = None, max_tokens: int = 1) -> Answer:
        """One streamed greedy completion, through the API or, with `uds`, straight at an engine's socket."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 5, "stream": True}
        body["stream_options"] = {"include_usage": True}
        headers = {"x-xinference-debug": "1"} if uds is None else {}
        if replica is not None:
            headers["x-xinference-replica"] = replica
        if uds is None:
            return await self._stream(self._session, self.endpoint, body, headers)
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(uds)) as direct:
            return await self._stream(direct, "http://engine", body, headers)

    async def _stream(self, session: aiohttp.ClientSession, base: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        first: float | None = None
        text, logprobs, usage, extra = "", list[dict[str, float]](), dict[str, Any](), dict[str, Any]()
        begin = time.perf_counter()
        async with session.post(base + "/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status} {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(str(chunk["error"]))
                if chunk["choices"] and first is None:
                    first = time.perf_counter() - begin
                for choice in chunk["choices"]:
                    text += choice["text"]
                    logprobs += (choice.get("logprobs") or {}).get("top_logprobs", [])
                usage = chunk.get("usage") or usage
                extra = chunk.get("xinference") or extra
        return Answer(first if first is not None else float("nan"), time.perf_counter() - begin, text, logprobs, usage, extra)

    async def launch(self, spec: dict[str, Any]) -> list[dict[str, Any]]:
        """Launch, wait until ready, and return the replicas."""
        uid = spec["model_uid"]
        await self.call("POST", "/v1/models", spec)
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            model = await self.call("GET", f"/v1/models/{uid}")
            if model["state"] == "ready":
                return list(model["replicas"])
            if model["state"] == "failed":
                raise RuntimeError(f"the launch failed: {model['cause']}")
            await asyncio.sleep(0.5)
        raise RuntimeError(f"not ready within {READY_SECONDS} s")

    def tree_pss_bytes(self, pid: int) -> int:
        """Proportional set size of a process and all its children."""
        root = psutil.Process(pid)
        return sum(process.memory_full_info().pss for process in (root, *root.children(recursive=True)))


@contextlib.asynccontextmanager
async def server(port: int, environment: dict[str, str] | None = None) -> AsyncIterator[Served]:
    """`xinference-local` with a home of its own, stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="xinference-bench-") as home:
        env = {**os.environ, "XINFERENCE_HOME": home, **(environment or {})}
        log = open(Path(home) / "server.log", "wb")  # noqa: ASYNC230, SIM115  (closed below, after the process)
        command = [str(Path(sys.executable).parent / "xinference-local"), "--port", str(port)]
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)  # noqa: ASYNC220
        timeout = aiohttp.ClientTimeout(total=600)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                served = Served(f"http://127.0.0.1:{port}", process, session)
                await _until_ready(served)
                yield served
        finally:
            process.terminate()
            process.wait(60)
            log.close()


async def _until_ready(served: Served) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(aiohttp.ClientError, RuntimeError):
            await served.call("GET", "/ready")
            return
        if served.process.poll() is not None:
            raise RuntimeError("the server ended while starting")
        await asyncio.sleep(0.2)
    raise RuntimeError("the server was not ready within a minute")

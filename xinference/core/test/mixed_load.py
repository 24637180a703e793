"""Streams, short requests and launches at once against a running server, and what became of each, while a test breaks something."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

SHORT_WORKERS = 2
STREAM_WORKERS = 2
STREAM_TOKENS = 12
LAUNCH_SECONDS = 60.0


class MixedLoad:
    """Requests of several kinds, each repeated until the end.

    ``kept`` counts what has to succeed whatever happens to the other replica: streams of the steady one, short requests to whichever the
    route chooses, administration. ``failures`` says which of them did not. ``cut`` counts streams that ended with an error event; that
    may happen to those that the broken replica had begun to answer.
    """

    def __init__(self, endpoint: str, model: str, steady: str) -> None:
        self.kept: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()
        self.failures: list[str] = []
        self._endpoint = endpoint
        self._model = model
        self._steady = steady
        self._ending = asyncio.Event()
        self._launched = 0

    async def run(self, session: aiohttp.ClientSession, launches: dict[str, Any] | None) -> None:
        works = [self._repeat("short", lambda: self._short(session)) for _ in range(SHORT_WORKERS)]
        works += [self._repeat("steady stream", lambda: self._stream(session, self._steady)) for _ in range(STREAM_WORKERS)]
        works += [self._repeat("any stream", lambda: self._stream(session, None)) for _ in range(STREAM_WORKERS)]
        works += [self._repeat("ready", lambda: self._ready(session))]
        if launches is not None:
            works += [self._repeat("launch", lambda: self._launch(session, launches))]
        await asyncio.gather(*works)

    def end(self) -> None:
        """Let what runs come to its end and begin nothing new."""
        self._ending.set()

    async def progress(self, kinds: tuple[str, ...] = ("short", "steady stream", "any stream")) -> None:
        """Wait until each of these kinds has succeeded once more."""
        before = Counter(self.kept)
        while any(self.kept[kind] <= before[kind] for kind in kinds) and not self.failures:
            await asyncio.sleep(0.01)

    async def _repeat(self, kind: str, once: Any) -> None:
        number = 0
        while not self._ending.is_set():
            number += 1
            try:
                complaint = await once()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                complaint = f"{type(error).__name__}: {error}"
            if complaint is None:
                self.kept[kind] += 1
            elif kind == "any stream" and complaint.startswith("cut: "):
                self.cut[complaint.removeprefix("cut: ")] += 1
            else:
                self.failures.append(f"{kind} {number}: {complaint}")
            await asyncio.sleep(0.01)

    def _body(self, number: int, max_tokens: int) -> dict[str, Any]:
        prompt = f"prompt {number} of many that have little in common " * 3
        return {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

    async def _short(self, session: aiohttp.ClientSession) -> str | None:
        async with session.post(f"{self._endpoint}/v1/completions", json=self._body(self.kept["short"], 2)) as response:
            text = await response.text()
            return None if response.status == 200 else f"{response.status} {text}"

    async def _stream(self, session: aiohttp.ClientSession, replica: str | None) -> str | None:
        body = {**self._body(self.kept.total(), STREAM_TOKENS), "stream": True}
        headers = {} if replica is None else {"x-xinference-replica": replica}
        num_chunks = 0
        async with session.post(f"{self._endpoint}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                return f"{response.status} {await response.text()}"
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return None if num_chunks >= STREAM_TOKENS else f"{num_chunks} chunks of {STREAM_TOKENS}"
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"cut: {event['error']['code']}"
                    num_chunks += 1
        return "the stream ended without an end"

    async def _ready(self, session: aiohttp.ClientSession) -> str | None:
        async with session.get(f"{self._endpoint}/ready") as response:
            await response.read()
            return None if response.status == 200 else str(response.status)

    async def _launch(self, session: aiohttp.ClientSession, spec: dict[str, Any]) -> str | None:
        """Launch another model, wait until it serves, terminate it."""
        url = f"{self._endpoint}/v1/models"
        number, self._launched = self._launched, self._launched + 1
        spec = {**spec, "model_uid": f"{spec['model_uid']}-{number}"}
        async with session.post(url, json=spec) as response:
            if response.status != 202:
                return f"launch: {response.status} {await response.text()}"
        async with asyncio.timeout(LAUNCH_SECONDS):
            while True:
                async with session.get(f"{url}/{spec['model_uid']}") as response:
                    model = await response.json()
                if model["state"] == "failed":
                    return f"launch: {model['cause']}"
                if model["state"] == "ready":
                    break
                await asyncio.sleep(0.05)
        async with session.delete(f"{url}/{spec['model_uid']}") as response:
            return None if response.status == 200 else f"terminate: {response.status} {await response.text()}"


@asynccontextmanager
async def mixed_load(endpoint: str, model: str, steady: str, launches: dict[str, Any] | None = None) -> AsyncIterator[MixedLoad]:
    """A load that is on, each of its kinds proven to work, for the time of the block; whatever has to succeed did."""
    load = MixedLoad(endpoint, model, steady)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LAUNCH_SECONDS)) as session:
        running = asyncio.create_task(_reported(load.run(session, launches)))
        try:
            await load.progress()
            yield load
            await load.progress()
            load.end()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert not load.failures, (load.failures[:5], len(load.failures), load.kept, load.cut)


async def _reported(work: Coroutine[Any, Any, None]) -> None:
    await work

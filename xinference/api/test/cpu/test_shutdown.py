"""The end of a server, as its clients see it."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from xinference.api.app import create_app
from xinference.api.config import ApiConfig
from xinference.api.keys import KeyRing
from xinference.api.server import listen, serve
from xinference.api.test.fakes import OPEN_RING, FakeCluster, ScriptedReplica, chunk, model, replica, send_event, start_stream
from xinference.errors import InvalidRequest
from xinference.settings import Limits, Settings

MESSAGES: Any = [{"role": "user", "content": "x"}]


class Setup:
    """A server of its own, with one replica whose stream ends when ``go`` is set."""

    def __init__(self, path: Path, drain_seconds: float) -> None:
        self.go = asyncio.Event()
        self.cluster = FakeCluster()
        self.engine = ScriptedReplica(self._script)
        self._path = path / "s"
        self._settings = Settings(drain_seconds=drain_seconds)

    async def _script(self, request: web.Request, _: Any) -> web.StreamResponse:
        response = await start_stream(request)
        await send_event(response, chunk("one"))
        await self.go.wait()
        await send_event(response, "[DONE]")
        return response

    async def __aenter__(self) -> "Setup":
        self._serving = self.engine.serving(self._path)
        await self._serving.__aenter__()
        await self.cluster.put(model(), replica("m-0", self._path))
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = ApiConfig(event_poll_seconds=0.01)
        app = create_app(self.cluster, self._settings, Limits(), OPEN_RING, config=config)
        self.server = asyncio.create_task(serve(app, listener))
        self.http = aiohttp.ClientSession(self.url)
        self.client = openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="k", max_retries=0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        await self.client.close()
        if not self.server.done():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        await self.server
        await self._serving.__aexit__(None, None, None)

    async def stream(self) -> Any:
        stream = await self.client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert (await anext(stream)).choices[0].delta.content == "one"
        return stream

    async def status(self, path: str) -> tuple[int, Any]:
        async with self.http.get(path) as response:
            return response.status, await response.json()

    async def until_draining(self) -> None:
        async with asyncio.timeout(5):
            while (await self.status("/ready"))[0] != 503:
                await asyncio.sleep(0.005)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_an_open_stream_may_finish_while_new_work_is_refused(tmp_path: Path) -> None:
    async with Setup(tmp_path, drain_seconds=30.0) as setup:
        stream = await setup.stream()
        terminate()
        await setup.until_draining()
        status, body = await setup.status("/ready")
        assert (status, body["error"]["code"]) == (503, "server_shutting_down")
        assert (await setup.status("/health"))[0] == 200
        with pytest.raises(openai.InternalServerError) as caught:
            await setup.stream()
        assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("server_shutting_down", "5")
        setup.go.set()
        assert [event async for event in stream] == []
        async with asyncio.timeout(5):
            await setup.server


async def test_a_stream_that_does_not_finish_in_time_gets_an_error_event(tmp_path: Path) -> None:
    async with Setup(tmp_path, drain_seconds=0.1) as setup:
        stream = await setup.stream()
        terminate()
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
        assert caught.value.code == "server_shutting_down"
        async with asyncio.timeout(5):
            await setup.server
        assert setup.engine.left == 1


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with Setup(tmp_path, drain_seconds=300.0) as setup:
        stream = await setup.stream()
        terminate()
        await setup.until_draining()
        terminate()
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
        assert caught.value.code == "server_shutting_down"
        async with asyncio.timeout(5):
            await setup.server


async def test_streams_of_news_do_not_hold_up_the_end(tmp_path: Path) -> None:
    async with Setup(tmp_path, drain_seconds=300.0) as setup, setup.http.get("/v1/models/m/events?follow=true") as response:
        await response.content.readuntil(b"\n\n")
        terminate()
        rest = await response.content.read()
        assert b'"code":"server_shutting_down"' in rest
        async with asyncio.timeout(5):
            await setup.server


async def test_a_server_without_work_ends_quickly_and_frees_its_port(tmp_path: Path) -> None:
    async with Setup(tmp_path, drain_seconds=300.0) as setup:
        assert (await setup.status("/health"))[0] == 200
        terminate()
        async with asyncio.timeout(5):
            await setup.server
        listen("127.0.0.1", int(setup.url.rpartition(":")[2])).close()


async def test_other_machines_are_not_served_without_keys() -> None:
    listener = listen("0.0.0.0", 0)
    app = create_app(FakeCluster(), Settings(), Limits(), KeyRing(required=False))
    with pytest.raises(InvalidRequest, match="without API keys"):
        await serve(app, listener)
    assert listener.fileno() == -1


def test_a_taken_port_is_an_error() -> None:
    first = listen("127.0.0.1", 0)
    try:
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", first.getsockname()[1])
    finally:
        first.close()

"""Keys while requests run: limits of traffic, revocation of what is open, and tenants that never meet in a cache."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from xinference.api.auth import ADMIN, INFERENCE, MONITOR
from xinference.api.config import ApiConfig
from xinference.api.key_store import KeyStore
from xinference.api.keys import ADMIN_KEY_ID, ApiKey, KeyRing, tenant_salt
from xinference.api.test.bench import ANSWER, MESSAGES, WHOLE, setup, until, waiting
from xinference.api.test.fakes import FakeCluster, Served, answering, chunk, model, replica, serving, streaming
from xinference.model.llm.fake.config import FakeConfig
from xinference.model.llm.test.cpu.test_fake_sharing import PROMPT, SLOW, WHOLE_BLOCKS_TOKENS, Group
from xinference.model.llm.test.replicas import MODEL, eventually
from xinference.settings import Limits, Settings

CHAT = {"model": "m", "messages": MESSAGES}
END_SECONDS = 10.0  # for what is ended at once; the machine may be busy
ROOT = ApiKey.of("root", ADMIN, key_id=ADMIN_KEY_ID, requests_per_minute=0, concurrent_requests=0)


def ring(*keys: ApiKey, limits: Limits | None = None) -> KeyRing:
    """The administrator's key ("root"), the key of ``setup``'s client ("k"), and further ones."""
    return KeyRing((ROOT, *(keys or (ApiKey.of("k", INFERENCE, key_id="key-k"),))), limits=limits)


def http_of(served: Served, secret: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(served.url, headers={"authorization": f"Bearer {secret}"})


async def refusals(served: Served) -> dict[str, float]:
    """The refusals that /metrics counts, by limit."""
    async with http_of(served, "root") as http, http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    found = [line for line in lines if line.startswith("xinference_refused_total{")]
    return {line.partition('limit="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in found}


async def test_requests_at_once_are_refused_with_429_and_counted_until_one_ends(tmp_path: Path) -> None:
    started = asyncio.Event()
    keys = ring(ApiKey.of("k", INFERENCE, concurrent_requests=1), ApiKey.of("other", INFERENCE))
    async with setup(tmp_path, waiting(started, chunk("a")), keys=keys) as (_, _, served, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        await started.wait()
        with pytest.raises(openai.RateLimitError, match="1 open requests, which is its limit") as caught:
            await client.models.list()
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.type == "rate_limit_error"
        async with http_of(served, "other") as http, http.get("/v1/models") as response:
            assert response.status == 200
        assert (await refusals(served))["key_concurrent_requests"] == 1
        await stream.close()
        await eventually(lambda: no_longer_limited(client))


async def no_longer_limited(client: openai.AsyncOpenAI) -> bool:
    try:
        await client.models.list()
    except openai.RateLimitError:
        return False
    return True


async def test_requests_in_a_minute_are_refused_with_the_seconds_to_wait(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER), keys=ring(ApiKey.of("k", INFERENCE, requests_per_minute=2))) as (
        _,
        replicas,
        served,
        client,
    ):
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=MESSAGES)
        with pytest.raises(openai.RateLimitError, match="2 requests a minute") as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert 25 <= int(caught.value.response.headers["retry-after"]) <= 30
        assert len(replicas[0].received) == 2
        assert (await refusals(served))["key_requests_per_minute"] == 1


async def test_the_servers_limits_hold_for_other_keys_than_its_own(tmp_path: Path) -> None:
    limits = Limits(key_requests_per_minute=1)
    async with setup(tmp_path, answering(ANSWER), limits=limits, keys=ring(limits=limits)) as (_, _, served, client):
        await client.models.list()
        with pytest.raises(openai.RateLimitError):
            await client.models.list()
        async with http_of(served, "root") as http:
            for _ in range(5):
                async with http.get("/v1/models") as response:
                    assert response.status == 200


async def revoke(served: Served, key_id: str) -> int:
    async with http_of(served, "root") as http, http.delete(f"/v1/keys/{key_id}") as response:
        return response.status


async def made(served: Served, **fields: Any) -> dict[str, Any]:
    async with http_of(served, "root") as http, http.post("/v1/keys", json=fields) as response:
        assert response.status == 201
        found: dict[str, Any] = await response.json()
        return found


async def test_revoking_a_key_ends_its_stream_with_an_error_event_and_aborts_the_engine(tmp_path: Path) -> None:
    started = asyncio.Event()
    async with setup(tmp_path, waiting(started, chunk("a")), keys=ring(), store=KeyStore(tmp_path)) as (_, replicas, served, _):
        key, other = await made(served, name="one"), await made(served, name="other")
        async with http_of(served, key["key"]) as http, http_of(served, other["key"]) as http_of_other:
            async with (
                http.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response,
                http_of_other.post("/v1/chat/completions", json={**CHAT, "stream": True}) as stays,
            ):
                await response.content.readuntil(b"\n\n")
                await stays.content.readuntil(b"\n\n")
                assert await revoke(served, key["id"]) == 200
                async with asyncio.timeout(END_SECONDS):
                    error = json.loads((await response.content.read()).removeprefix(b"data: "))["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert "was revoked while the request was running" in error["message"]
                await until(lambda: replicas[0].left == 1)
                assert len(served.app.state.api.gateway.open) == 1
                assert not stays.content.at_eof()
            async with http.post("/v1/chat/completions", json=CHAT) as response:
                assert response.status == 401


async def test_revoking_a_key_ends_a_request_that_has_not_answered_yet_with_401(tmp_path: Path) -> None:
    started = asyncio.Event()
    async with setup(tmp_path, waiting(started), keys=ring(), store=KeyStore(tmp_path)) as (_, replicas, served, _):
        key = await made(served, name="one")
        async with http_of(served, key["key"]) as http:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
            await started.wait()
            assert await revoke(served, key["id"]) == 200
            async with asyncio.timeout(END_SECONDS):
                assert (await asking).status == 401
        await until(lambda: replicas[0].left == 1)


async def test_a_request_whose_key_is_revoked_while_its_body_arrives_reaches_no_replica(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER), keys=ring(), store=KeyStore(tmp_path)) as (_, replicas, served, _):
        key = await made(served, name="one")
        arrived = asyncio.Event()

        async def slow_body() -> Any:
            content = json.dumps(CHAT).encode()
            yield content[:10]
            await arrived.wait()
            yield content[10:]

        async with http_of(served, key["key"]) as http:
            headers = {"content-type": "application/json"}
            asking = asyncio.create_task(http.post("/v1/chat/completions", data=slow_body(), headers=headers))
            api = served.app.state.api
            await until(lambda: key["id"] in api.keys.last_used)
            assert await revoke(served, key["id"]) == 200
            arrived.set()
            assert (await asking).status == 401
        assert replicas[0].received == []


async def test_revoking_a_key_ends_what_it_watches(tmp_path: Path) -> None:
    config = ApiConfig(event_poll_seconds=0.02, xavier_stream_seconds=0.02, log_poll_seconds=0.02)
    cluster = FakeCluster()
    await cluster.put(model(state="launching"))
    cluster.log_lines = ["one\n"]
    async with serving(cluster, keys=ring(), store=KeyStore(tmp_path), config=config) as served:
        key = await made(served, name="eyes", scopes=[MONITOR, ADMIN])
        async with http_of(served, key["key"]) as http:
            paths = ("events?follow=true", "xavier/stream", "logs?follow=true")
            feeds = [await http.get(f"/v1/models/m/{path}") for path in paths]
            assert await revoke(served, key["id"]) == 200
            for feed in feeds:
                async with asyncio.timeout(END_SECONDS):
                    assert b'"code":"invalid_api_key"' in await feed.content.read()
        assert served.app.state.api.gateway.feeds == set()


async def test_a_stream_that_began_before_its_key_expired_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()

    async def script(request: Any, body: Any) -> Any:
        await go_on.wait()
        return await streaming(*WHOLE)(request, body)

    import xinference.api.edge as edge

    async with setup(tmp_path, script, keys=ring(ApiKey.of("k", INFERENCE, expires=2e9))) as (_, replicas, _, client):
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
        await until(lambda: replicas[0].received)
        monkeypatch.setattr(edge.time, "time", lambda: 3e9)
        with pytest.raises(openai.AuthenticationError, match="has expired"):
            await client.models.list()
        go_on.set()
        assert [part async for part in await asking]


TENANTS = (ApiKey.of("a", ADMIN, key_id="key-a"), ApiKey.of("b", ADMIN, key_id="key-b"), ApiKey.of("c", ADMIN, key_id="key-c"))


@pytest.mark.parametrize("isolate", [True, False])
async def test_replicas_get_a_salt_for_each_key_only_when_tenants_are_isolated(tmp_path: Path, isolate: bool) -> None:
    settings = Settings(isolate_tenants=isolate)
    async with setup(tmp_path, answering(ANSWER), settings=settings, keys=ring(*TENANTS)) as (_, replicas, served, _):
        for secret in ("a", "b"):
            async with http_of(served, secret) as http:
                for path, salt in [
                    ("/v1/chat/completions", None),
                    ("/v1/completions", "own"),
                    ("/v1/embeddings", "own"),
                    ("/tokenize", None),
                ]:
                    body = {**CHAT, "prompt": "x", "input": "x", **({"cache_salt": salt} if salt else {})}
                    async with http.post(path, json=body) as response:
                        assert response.status == 200, path
    salts = [body.get("cache_salt") for _, body, _ in replicas[0].received]
    if not isolate:
        assert salts == [None, "own", "own", None] * 2
        return
    assert salts == [salt for key in ("key-a", "key-b") for salt in (tenant_salt(key, None), *[tenant_salt(key, "own")] * 2, None)]
    assert len(set(salts)) == 5


async def test_tenants_never_hit_each_others_cache_and_one_tenant_hits_its_own_here_and_elsewhere(tmp_path: Path) -> None:
    """Two fake engines with the real shared cache. Each miss of one tenant stands beside a hit of the other at the same place."""
    async with Group(tmp_path, FakeConfig(faults=SLOW)) as engines:
        for name in ("r-0", "r-1"):
            await engines.launch(name)
        cluster = FakeCluster()
        await cluster.put(model(MODEL), *(replica(name, engine.uds) for name, engine in engines.replicas.items()))
        async with serving(cluster, keys=ring(*TENANTS), settings=Settings(isolate_tenants=True)) as served:

            async def cached(secret: str, name: str, **fields: Any) -> int:
                headers = {"x-xinference-replica": name}
                body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
                async with http_of(served, secret) as http, http.post("/v1/completions", json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    return int((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert await cached("a", "r-0") == 0
            await engines.saved("r-0")
            await engines.attached("r-1")
            assert await cached("c", "r-1") == 0
            assert await cached("c", "r-1", cache_salt=tenant_salt("key-a", None)) == 0
            assert await cached("a", "r-1") == WHOLE_BLOCKS_TOKENS  # from the other replica
            assert await cached("b", "r-0") == 0
            assert await cached("a", "r-0") == WHOLE_BLOCKS_TOKENS
            assert await cached("a", "r-0", cache_salt="own") == 0
            assert await cached("b", "r-0", cache_salt="own") == 0
            assert await cached("a", "r-0", cache_salt="own") == WHOLE_BLOCKS_TOKENS

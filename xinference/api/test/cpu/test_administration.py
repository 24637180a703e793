"""The administration routes: what reaches the supervisor, and what comes back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from xinference.api.config import ApiConfig
from xinference.api.test.fakes import FakeCluster, Served, model, serving
from xinference.errors import Conflict, InvalidRequest, NotSupported, XinferenceError
from xinference.settings import Limits


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[FakeCluster, Served, aiohttp.ClientSession]]:
    cluster = FakeCluster()
    await cluster.put(model())
    async with serving(cluster, **options) as served, aiohttp.ClientSession(served.url) as http:
        yield cluster, served, http


async def ask(http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with http.request(method, path, json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "call"),
    [
        ("DELETE", "/v1/models/m", None, 200, ("terminate_model", ("m", 30.0))),
        ("DELETE", "/v1/models/m?drain=2.5", None, 200, ("terminate_model", ("m", 2.5))),
        ("POST", "/v1/models/m/cancel", None, 200, ("cancel_launch", ("m",))),
        ("POST", "/v1/models/m/replicas", {"count": 2}, 202, ("add_replicas", ("m", 2))),
        ("POST", "/v1/models/m/replicas", None, 202, ("add_replicas", ("m", 1))),
        ("DELETE", "/v1/models/m/replicas/m-0?drain=1", None, 200, ("remove_replica", ("m", "m-0", 1.0))),
        ("POST", "/v1/models/m/replicas/m-0/restart", None, 202, ("restart_replica", ("m", "m-0"))),
        ("POST", "/v1/models/m/scale", {"replica": 3}, 202, ("scale_model", ("m", 3))),
        ("GET", "/v1/models/m/xavier", None, 200, ("xavier_status", ("m",))),
        ("POST", "/v1/models/m/xavier/clear", None, 200, ("xavier_clear", ("m",))),
        ("GET", "/v1/requests?model=m&limit=5", None, 200, ("list_requests", ("m", 5))),
    ],
)
async def test_a_verb_reaches_the_supervisor(method: str, path: str, body: Any, status: int, call: tuple[str, Any]) -> None:
    async with opened() as (cluster, _, http):
        found, _ = await ask(http, method, path, body)
        assert found == status
        assert call in cluster.calls


@pytest.mark.parametrize("uid", ["org/model", "a/b/c", "m.1-x"])
async def test_ids_may_hold_slashes(uid: str) -> None:
    async with opened() as (cluster, _, http):
        await cluster.put(model(uid))
        assert (await ask(http, "GET", f"/v1/models/{uid}"))[1]["id"] == uid
        assert (await ask(http, "GET", f"/v1/models/{uid.replace('/', '%2F')}"))[1]["id"] == uid
        assert await ask(http, "GET", f"/v1/models/{uid}/replicas") == (200, {"data": []})
        await ask(http, "POST", f"/v1/models/{uid}/xavier/clear")
        assert cluster.asked("xavier_clear") == [(uid,)]


async def test_models_are_listed_as_openai_lists_them() -> None:
    async with opened() as (_, _, http):
        status, body = await ask(http, "GET", "/v1/models")
    assert (status, body["object"]) == (200, "list")
    assert {**body["data"][0], "spec": 0}.items() >= {"id": "m", "object": "model", "owned_by": "xinference", "max_model_len": 4096}.items()


async def test_a_launch_is_accepted_with_the_place_of_its_events() -> None:
    async with opened() as (cluster, _, http):
        answer = await ask(http, "POST", "/v1/models", {"model_uid": "a/b", "model_path": "/x"})
        assert answer == (202, {"model_uid": "a/b", "events": "/v1/models/a/b/events"})
        assert cluster.asked("launch_model") == [({"model_uid": "a/b", "model_path": "/x"},)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models?dry_run=true", {"model_path": "/x"}),
        ("/v1/models", {"model_path": "/x", "dry_run": True}),
        ("/v1/models", {"model_path": "/x", "dry-run": True}),
    ],
)
async def test_a_dry_run_plans_and_launches_nothing(path: str, body: Any) -> None:
    async with opened() as (cluster, _, http):
        assert (await ask(http, "POST", path, body))[0] == 200
        assert cluster.asked("launch_model") == []
        assert len(cluster.asked("plan_model")) == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("unknown field 'replcia'", "replcia"), 400, None),
        (NotSupported("prefill/decode roles are not available in this version", "replica_config"), 400, "not_supported"),
        (Conflict("there is a model 'm' already", "model_uid"), 409, "conflict"),
    ],
)
async def test_a_launch_that_is_refused_says_why(error: XinferenceError, status: int, code: str | None) -> None:
    async with opened() as (cluster, _, http):
        cluster.fails["launch_model"] = error
        found, body = await ask(http, "POST", "/v1/models", {"model_path": "/x"})
    assert (found, body["error"]) == (
        status,
        {"message": error.message, "type": "invalid_request_error", "param": error.param, "code": code},
    )


@pytest.mark.parametrize("raw", [b"{", b"[]", b""])
async def test_a_launch_that_is_no_object_is_refused(raw: bytes) -> None:
    async with opened() as (cluster, _, http):
        async with http.post("/v1/models", data=raw, headers={"content-type": "application/json"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_json")
        assert cluster.asked("launch_model") == []


async def launched_then(http: aiohttp.ClientSession, cluster: FakeCluster, stage: str, state: str, message: str = "") -> tuple[int, Any]:
    """A launch that is waited for, and its end."""
    asking = asyncio.create_task(ask(http, "POST", "/v1/models", {"model_uid": "n", "model_path": "/x", "wait_ready": True}))
    async with asyncio.timeout(5):
        while not cluster.asked("events"):
            await asyncio.sleep(0.001)
    await cluster.happen("n", "loading")
    await cluster.happen("n", stage, state, message)
    return await asking


async def test_a_launch_can_be_waited_for() -> None:
    async with opened() as (cluster, _, http):
        found = await launched_then(http, cluster, "ready", "ready")
    assert found == (200, {"model_uid": "n", "events": "/v1/models/n/events", "state": "ready"})


async def test_a_launch_that_fails_while_waited_for_gives_its_cause() -> None:
    async with opened() as (cluster, _, http):
        status, body = await launched_then(http, cluster, "failed", "failed", "replica n-0: out of memory")
    assert (status, body["error"]["code"], body["error"]["message"]) == (500, "launch_failed", "replica n-0: out of memory")


async def test_a_launch_that_is_cancelled_while_waited_for_says_so() -> None:
    async with opened() as (cluster, _, http):
        status, body = await launched_then(http, cluster, "cancelled", "cancelled")
    assert (status, body["error"]["code"]) == (499, "launch_cancelled")


async def events_of(http: aiohttp.ClientSession, path: str, headers: Any = None) -> bytes:
    async with http.get(path, headers=headers) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return await response.read()


async def test_events_end_with_the_launch() -> None:
    async with opened() as (cluster, _, http):
        for stage in ("accepted", "loading", "ready"):
            await cluster.happen("m", stage)
        text = await events_of(http, "/v1/models/m/events")
    assert [line for line in text.split(b"\n") if line.startswith(b"id:")] == [b"id: 1", b"id: 2", b"id: 3"]
    assert text.count(b'"stage":"ready"') == 1
    assert text.endswith(b"\n\n")


@pytest.mark.parametrize(("query", "headers"), [("?after=2", None), ("", {"last-event-id": "2"}), ("?after=1", {"last-event-id": "2"})])
async def test_events_resume_where_a_reader_left_off(query: str, headers: Any) -> None:
    async with opened() as (cluster, _, http):
        for stage in ("accepted", "loading", "ready"):
            await cluster.happen("m", stage)
        text = await events_of(http, "/v1/models/m/events" + query, headers)
    assert [line for line in text.split(b"\n") if line.startswith(b"id:")] == [b"id: 3"]


async def test_events_go_on_when_followed_and_are_kept_alive() -> None:
    async with opened(config=ApiConfig(event_poll_seconds=0.02)) as (cluster, _, http):
        await cluster.happen("m", "ready")
        async with http.get("/v1/models/m/events?follow=true") as response:
            await response.content.readuntil(b'"ready"')
            await response.content.readuntil(b": keep-alive\n\n")
            await cluster.happen("m", "scaling")
            await response.content.readuntil(b'"scaling"')


@pytest.mark.parametrize("state", ["ready", "failed", "degraded"])
async def test_events_end_when_a_reader_has_seen_them_all(state: str) -> None:
    async with opened() as (cluster, _, http), asyncio.timeout(5):
        await cluster.put(model(state=state))
        for stage in ("accepted", "ready", "scaling"):
            await cluster.happen("m", stage)
        assert b'"scaling"' in await events_of(http, "/v1/models/m/events?after=2")
        assert await events_of(http, "/v1/models/m/events?after=3") == b""
        assert await events_of(http, "/v1/models/m/events", {"last-event-id": "99999"}) == b""


async def test_events_wait_for_a_launch_that_is_not_over_wherever_they_begin() -> None:
    async with opened(config=ApiConfig(event_poll_seconds=0.02)) as (cluster, _, http), asyncio.timeout(5):
        await cluster.put(model(state="launching"))
        async with http.get("/v1/models/m/events?after=7") as response:
            await response.content.readuntil(b": keep-alive\n\n")
            await cluster.put(model())
            assert b"data:" not in await response.read()


@pytest.mark.parametrize("resume", ["-1", "x", "9" * 16, "9" * 5000])
async def test_a_place_to_resume_from_is_a_sequence_number(resume: str) -> None:
    async with opened() as (_, _, http), http.get("/v1/models/m/events", headers={"last-event-id": resume}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "last-event-id")


async def test_no_request_of_a_model_that_is_not_there_can_be_aborted() -> None:
    async with opened() as (_, _, http):
        status, body = await ask(http, "POST", "/v1/models/nope/requests/x/abort")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_events_of_no_model_are_a_status() -> None:
    async with opened() as (_, _, http):
        status, body = await ask(http, "GET", "/v1/models/none/events")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_event_streams_are_limited_and_given_back() -> None:
    async with opened(limits=Limits(event_streams=1), config=ApiConfig(event_poll_seconds=0.01)) as (cluster, served, http):
        await cluster.put(model(state="launching"))
        async with http.get("/v1/models/m/events") as first:
            await first.content.readuntil(b"\n\n")
            status, body = await ask(http, "GET", "/v1/models/m/events")
            assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        async with asyncio.timeout(2):
            while served.app.state.api.gateway.feeds:
                await asyncio.sleep(0.005)
        async with http.get("/v1/models/m/events") as second:
            assert second.status == 200


async def test_a_log_is_text() -> None:
    async with opened() as (cluster, _, http):
        cluster.log_lines = ["one\n", "two\n", "three\n"]
        async with http.get("/v1/models/m/logs?tail=2&replica=m-0") as response:
            assert response.headers["content-type"] == "text/plain; charset=utf-8"
            assert await response.text() == "two\nthree\n"
        assert cluster.asked("logs") == [("m", "m-0", 2, None)]


async def test_a_log_can_be_followed() -> None:
    async with opened(config=ApiConfig(log_poll_seconds=0.01)) as (cluster, _, http):
        cluster.log_lines = ["one\n", "two\n"]
        async with http.get("/v1/models/m/logs?follow=true&tail=1") as response:
            assert await response.content.readuntil(b"\n\n") == b"data: two\n\n"
            cluster.log_lines += ["three\n", "four\n"]
            assert await response.content.readuntil(b"four\n\n")


async def test_cache_statistics_can_be_followed() -> None:
    async with opened(config=ApiConfig(xavier_stream_seconds=0.01)) as (_, _, http), http.get("/v1/models/m/xavier/stream") as response:
        for _ in range(3):
            assert await response.content.readuntil(b"\n\n") == b'data: {"enabled":true,"replicas":[]}\n\n'


async def test_the_cluster_can_be_seen() -> None:
    async with opened() as (_, _, http):
        assert await ask(http, "GET", "/v1/cluster") == (200, {"workers": ["w0"]})
        assert await ask(http, "GET", "/v1/workers") == (200, {"data": [{"worker_id": "w0"}]})
        assert await ask(http, "GET", "/v1/devices") == (200, {"data": []})


async def test_readiness_is_that_of_the_supervisor_and_health_is_not() -> None:
    async with opened() as (cluster, _, http):
        assert await ask(http, "GET", "/ready") == (200, {"status": "ready"})
        cluster.is_ready = False
        assert (await ask(http, "GET", "/ready"))[0] == 503
        assert await ask(http, "GET", "/health") == (200, {"status": "ok"})


async def test_openapi_has_every_body_and_no_dangling_reference() -> None:
    async with opened() as (_, _, http):
        _, document = await ask(http, "GET", "/openapi.json")
    schemas = document["components"]["schemas"]
    assert {"ChatCompletionBody", "CompletionBody", "EmbeddingBody", "LaunchSpec", "Scale", "ErrorBody"} <= set(schemas)
    assert "messages" in schemas["ChatCompletionBody"]["properties"]
    assert "enable_xavier" in schemas["LaunchSpec"]["properties"]
    references: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            references.extend(value[key] for key in ("$ref",) if isinstance(value.get(key), str))
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    collect(document)
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= set(schemas)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "default" in operation["responses"], (method, path)
            if path.endswith("completions"):
                assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]

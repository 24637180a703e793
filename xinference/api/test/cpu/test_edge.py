"""What every request passes: hosts, origins, sizes, ids, and the shape of errors."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from starlette.routing import BaseRoute

from xinference.api.app import create_app
from xinference.api.routing import ScopedRoute
from xinference.api.test.fakes import OPEN_RING, FakeCluster, Served, model, serving
from xinference.core.model_uid import ROUTE_WORDS
from xinference.errors import InternalError, LaunchFailed
from xinference.settings import Limits, Settings

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[FakeCluster, Served, aiohttp.ClientSession]]:
    cluster = FakeCluster()
    await cluster.put(model())
    async with serving(cluster, **options) as served, aiohttp.ClientSession(served.url) as http:
        yield cluster, served, http


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The error object of an answer; its shape is checked."""
    body = await response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", response.headers["x-request-id"])
    found: dict[str, Any] = body["error"]
    return found


def routes_of(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Method and declared path of every route."""
    for route in routes:
        assert isinstance(route, ScopedRoute), f"{route} checks no scope"
        for method in route.methods:
            yield method, route.path


def all_routes() -> set[tuple[str, str]]:
    return set(routes_of(list(create_app(FakeCluster(), Settings(), Limits(), OPEN_RING).routes)))


@pytest.mark.parametrize("given", ["abc", "A.b-c_9", "x" * 128])
async def test_a_request_id_is_echoed(given: str) -> None:
    async with opened() as (_, _, http), http.get("/health", headers={"x-request-id": given}) as response:
        assert response.headers.getall("x-request-id") == [given]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a/b", "é"])
async def test_a_request_id_that_is_none_is_replaced(given: str) -> None:
    async with opened() as (_, _, http), http.get("/health", headers={"x-request-id": given}) as response:
        assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])


async def test_a_request_id_in_the_body_is_taken() -> None:
    async with opened() as (_, _, http), http.post("/v1/chat/completions", json={**CHAT, "request_id": "mine"}) as response:
        assert response.headers["x-request-id"] == "mine"


async def test_a_foreign_host_is_refused() -> None:
    async with opened() as (_, served, http):
        for host, status in [("evil.example", 400), ("localhost", 200), (f"127.0.0.1:{served.port}", 200), ("[::1]:80", 200), ("", 400)]:
            async with http.get("/health", headers={"host": host}) as response:
                assert response.status == status, host
                if status == 400:
                    assert (await error_of(response))["code"] == "foreign_host"


async def test_a_proxys_host_can_be_allowed() -> None:
    settings = Settings(allowed_hosts=("models.example",))
    async with opened(settings=settings) as (_, _, http), http.get("/health", headers={"host": "models.example"}) as response:
        assert response.status == 200


async def test_a_page_of_another_site_cannot_write() -> None:
    async with opened() as (cluster, served, http):
        for origin in ("http://evil.example", "null"):
            for method, path in [("POST", "/v1/models/m/cancel"), ("DELETE", "/v1/models/m"), ("POST", "/v1/models/m/xavier/clear")]:
                async with http.request(method, path, headers={"origin": origin}) as response:
                    assert (response.status, (await error_of(response))["code"]) == (403, "foreign_origin")
        assert {name for name, _ in cluster.calls} <= {"route_changes"}
        async with http.post("/v1/models/m/cancel", headers={"origin": served.url}) as response:
            assert response.status == 200


async def test_no_page_is_told_that_it_may_read() -> None:
    async with opened() as (_, _, http):
        async with http.options(
            "/v1/models", headers={"origin": "http://evil.example", "access-control-request-method": "POST"}
        ) as response:
            assert response.status == 405
            assert not [name for name in response.headers if name.lower().startswith("access-control")]
        async with http.get("/v1/models", headers={"origin": "http://evil.example"}) as response:
            assert not [name for name in response.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v1/models/m/scale"])
async def test_a_body_that_is_not_declared_as_json_is_refused(content_type: str, path: str) -> None:
    async with opened() as (cluster, _, http):
        async with http.post(path, data=b'{"model_path":"/x"}', headers={"content-type": content_type}) as response:
            assert (response.status, (await error_of(response))["code"]) == (415, "unsupported_media_type")
        assert cluster.asked("launch_model") == []


async def test_a_body_over_the_limit_is_refused_announced_or_not() -> None:
    async with opened(limits=Limits(body_bytes=1000)) as (_, served, http):
        headers = {"content-type": "application/json"}

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * 100

        for data in (b" " * 1001, pieces()):
            async with http.post("/v1/chat/completions", data=data, headers=headers) as response:
                error = await error_of(response)
                assert (response.status, error["type"], error["code"], error["param"]) == (
                    413,
                    "invalid_request_error",
                    "request_too_large",
                    None,
                )
        async with http.post("/v1/chat/completions", data=b" " * 1000, headers=headers) as response:
            assert response.status == 400
        assert served.app.state.api.metrics.refused.labels("body_bytes")._value.get() == 2


async def test_a_body_that_never_ends_is_refused() -> None:
    async with opened(limits=Limits(body_read_seconds=0.1)) as (_, served, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_a_head_that_never_ends_costs_a_connection_only_so_long() -> None:
    async with opened(limits=Limits(head_read_seconds=0.1)) as (_, served, _):
        for start in (b"", b"GET /health HTTP/1.1\r\nhost: loc"):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(start)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()


async def test_what_is_not_http_is_refused_in_the_error_shape() -> None:
    async with opened() as (_, served, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"code":"invalid_http"' in answer


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/health/", 404, "not_found"),
        ("GET", "/v1/models/m/xavier/nothing", 404, "not_found"),
    ],
)
async def test_the_frameworks_own_errors_have_the_shape(method: str, path: str, status: int, code: str) -> None:
    async with opened() as (_, _, http), http.request(method, path) as response:
        assert (response.status, (await error_of(response))["code"]) == (status, code)


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("GET", "/v1/requests?limit=0", None, "limit"),
        ("GET", "/v1/models/m/logs?tail=x", None, "tail"),
        ("POST", "/v1/models/m/scale", {}, "replica"),
        ("POST", "/v1/models/m/scale", {"replica": "two"}, "replica"),
        ("POST", "/v1/models/m/scale", {"replica": 1, "x": 1}, "x"),
        ("DELETE", "/v1/models/m?drain=-1", None, "drain"),
        ("POST", "/v1/models/m/replicas", {"count": 0}, "count"),
        ("POST", "/v1/models/m/replicas", {"count": True}, "count"),
        ("POST", "/v1/models/m/replicas", {"count": "2"}, "count"),
        ("POST", "/v1/models/m/scale", {"replica": True}, "replica"),
        ("POST", "/v1/models/m/scale", {"replica": "3"}, "replica"),
        ("POST", "/v1/models/m/scale", {"replica": 3.0}, "replica"),
        ("GET", "/v1/models/m/events?after=-1", None, "after"),
        ("GET", "/v1/models/m/events?after=9007199254740992", None, "after"),
        ("GET", "/v1/models/m/events?after=x", None, "after"),
    ],
)
async def test_wrong_parameters_are_named(method: str, path: str, body: Any, param: str) -> None:
    async with opened() as (_, _, http), http.request(method, path, json=body) as response:
        error = await error_of(response)
        assert (response.status, error["type"], error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/models/demo/xavier/clear", "POST"),
        ("GET", "/v1/models/a/b/requests/x/abort", "POST"),
        ("DELETE", "/v1/models/m/xavier", "GET"),
        ("PUT", "/v1/models/m/replicas", "GET, POST"),
        ("POST", "/v1/models/m", "DELETE, GET"),
        ("PUT", "/v1/models", "GET, POST"),
    ],
)
async def test_a_method_that_a_path_does_not_take_is_told_which_it_takes(method: str, path: str, allow: str) -> None:
    async with opened() as (cluster, _, http), http.request(method, path, json={}) as response:
        assert (response.status, (await error_of(response))["code"], response.headers["allow"]) == (405, "method_not_allowed", allow)
    assert {name for name, _ in cluster.calls} <= {"route_changes"}


def test_every_word_of_a_path_below_a_model_is_kept_from_its_name() -> None:
    below = {word for _, path in all_routes() if "{uid:path}" in path for word in path.split("{uid:path}")[1].split("/") if word}
    assert {word for word in below if not word.startswith("{")} <= ROUTE_WORDS


async def test_a_fault_of_ours_says_nothing_of_its_inside(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as (cluster, _, http):
        cluster.fails["list_models"] = RuntimeError("secret detail")  # type: ignore[assignment]
        async with http.get("/v1/models") as response:
            text = await response.text()
            error = await error_of(response)
            assert (response.status, error["type"], error["code"]) == (500, "server_error", "internal_error")
            assert response.headers["x-should-retry"] == "false"
            assert response.headers["x-request-id"] in error["message"]
    assert "secret" not in text
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("error", [LaunchFailed("no memory"), InternalError("oops")])
async def test_what_would_fail_again_is_not_to_be_retried(error: Any) -> None:
    async with opened() as (cluster, _, http):
        cluster.fails["launch_model"] = error
        async with http.post("/v1/models", json={"model_path": "/x"}) as response:
            assert (response.status, response.headers["x-should-retry"]) == (500, "false")

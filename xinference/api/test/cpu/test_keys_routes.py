"""Every route with no key, with wrong ones and with a key of each scope: what is declared holds, and whoever is refused changes nothing."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.routing import BaseRoute

from xinference.api.app import create_app
from xinference.api.auth import ADMIN, INFERENCE, MONITOR, scopes_for
from xinference.api.key_store import KeyStore
from xinference.api.keys import ADMIN_KEY_ID, ApiKey, KeyRing
from xinference.api.routing import ScopedRoute
from xinference.api.test.fakes import OPEN_RING, FakeCluster, Served, model, replica, serving
from xinference.settings import Limits, Settings

PUBLIC = {("GET", "/health"), ("GET", "/ready")}
FOR_ALL = {("GET", "/v1/models"), ("GET", "/v1/models/{uid:path}"), ("GET", "/version"), ("GET", "/v1/limits"), ("GET", "/openapi.json")}
FOR_ASKING = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
}
FOR_LOOKING = {
    ("GET", "/metrics"),
    ("GET", "/v1/models/{uid:path}/events"),
    ("GET", "/v1/models/{uid:path}/replicas"),
    ("GET", "/v1/models/{uid:path}/xavier"),
    ("GET", "/v1/models/{uid:path}/xavier/stream"),
    ("GET", "/v1/requests"),
    ("GET", "/v1/requests/{request_id}"),
    ("GET", "/v1/cluster"),
    ("GET", "/v1/workers"),
    ("GET", "/v1/devices"),
}
FOR_ADMINISTRATORS = {
    ("POST", "/v1/models"),
    ("DELETE", "/v1/models/{uid:path}"),
    ("POST", "/v1/models/{uid:path}/cancel"),
    ("GET", "/v1/models/{uid:path}/logs"),
    ("POST", "/v1/models/{uid:path}/replicas"),
    ("DELETE", "/v1/models/{uid:path}/replicas/{replica_uid}"),
    ("POST", "/v1/models/{uid:path}/replicas/{replica_uid}/restart"),
    ("POST", "/v1/models/{uid:path}/scale"),
    ("POST", "/v1/models/{uid:path}/requests/{request_id}/abort"),
    ("POST", "/v1/models/{uid:path}/xavier/clear"),
    ("GET", "/v1/keys"),
    ("POST", "/v1/keys"),
    ("DELETE", "/v1/keys/{key_id}"),
}
OPENED_BY = {
    INFERENCE: FOR_ALL | FOR_ASKING,
    MONITOR: FOR_ALL | FOR_LOOKING,
    ADMIN: FOR_ALL | FOR_ASKING | FOR_LOOKING | FOR_ADMINISTRATORS,
}
KEYS = {
    scope: ApiKey.of(f"{scope}-secret", scope, key_id=ADMIN_KEY_ID if scope == ADMIN else f"key-{scope}")
    for scope in (ADMIN, INFERENCE, MONITOR)
}
RING_KEYS = (*KEYS.values(), ApiKey.of("expired-secret", ADMIN, key_id="key-old", expires=1.0))
STRANGERS = {
    "no key": {},
    "a wrong key": {"authorization": "Bearer wrong"},
    "an expired key": {"authorization": "Bearer expired-secret"},
    "an id for a key": {"authorization": "Bearer key-monitor"},
    "a digest for a key": {"authorization": f"Bearer {KEYS[ADMIN].digest.hex()}"},
    "another scheme": {"authorization": "Basic admin-secret"},
    "a key in another header": {"x-api-key": "admin-secret"},
    "a key as a cookie": {"cookie": "authorization=Bearer admin-secret"},
}
BODIES: dict[str, Any] = {
    "/v1/models": {"model_path": "/x"},
    "/v1/models/{uid:path}/scale": {"replica": 2},
    "/v1/keys": {"name": "made"},
    **{path: {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"} for _, path in FOR_ASKING},
}
CHAT = BODIES["/v1/chat/completions"]
STREAMS = {"/v1/models/{uid:path}/xavier/stream"}  # these do not end


def bearer(scope: str) -> dict[str, str]:
    return {"authorization": f"Bearer {scope}-secret"}


@asynccontextmanager
async def opened(home: Path, **options: Any) -> AsyncIterator[tuple[FakeCluster, Served, aiohttp.ClientSession, KeyStore]]:
    cluster, store = FakeCluster(), KeyStore(home)
    await cluster.put(model(), replica("m-0", None, state="loading"))
    ring = KeyRing(RING_KEYS)
    async with serving(cluster, keys=ring, store=store, **options) as served, aiohttp.ClientSession(served.url) as http:
        yield cluster, served, http, store


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


def filled(path: str) -> str:
    for name, value in (
        ("{uid:path}", "m"),
        ("{uid}", "m"),
        ("{replica_uid}", "m-0"),
        ("{request_id}", "r"),
        ("{key_id}", "key-inference"),
    ):
        path = path.replace(name, value)
    return path


def changes(cluster: FakeCluster, store: KeyStore) -> tuple[set[str], Any]:
    """What was asked of the cluster, but for what the API asks by itself and for everybody; and the file of keys."""
    return {name for name, _ in cluster.calls} - {"route_changes", "ready"}, store.load()


def test_every_route_is_known_to_this_test() -> None:
    """Whoever adds a route decides here who may use it."""
    assert all_routes() == PUBLIC | FOR_ALL | FOR_ASKING | FOR_LOOKING | FOR_ADMINISTRATORS


def test_the_declared_scopes_are_those_of_this_test() -> None:
    for method, path in all_routes() | {("GET", "/v1/new"), ("PUT", "/metrics")}:
        opening = {scope for scope, routes in OPENED_BY.items() if (method, path) in routes} or {ADMIN}
        assert scopes_for(method, path) == (None if (method, path) in PUBLIC else opening), (method, path)


@pytest.mark.parametrize("headers", STRANGERS.values(), ids=STRANGERS)
async def test_a_stranger_is_told_nothing_but_that_the_server_lives(headers: dict[str, str], tmp_path: Path) -> None:
    unknown = [("GET", "/no/such/path"), ("POST", "/"), ("PUT", "/v1/models"), ("OPTIONS", "/v1/keys"), ("HEAD", "/v1/keys")]
    async with opened(tmp_path) as (cluster, _, http, store):
        for method, path in [*sorted(all_routes() - PUBLIC), *unknown]:
            async with http.request(method, filled(path), headers=headers, json=BODIES.get(path)) as response:
                assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
                if method != "HEAD":
                    error = await error_of(response)
                    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
        assert changes(cluster, store) == (set(), {})
        for _, path in PUBLIC:
            async with http.get(path, headers=headers) as response:
                assert response.status == 200


@pytest.mark.parametrize("scope", OPENED_BY)
async def test_a_key_opens_the_routes_of_its_scope_and_no_others(scope: str, tmp_path: Path) -> None:
    shut = all_routes() - PUBLIC - OPENED_BY[scope]
    async with opened(tmp_path) as (cluster, _, http, store):
        for method, path in sorted(shut):
            async with http.request(method, filled(path), headers=bearer(scope), json=BODIES.get(path)) as response:
                error = await error_of(response)
                assert (response.status, error["type"], error["code"]) == (403, "permission_error", "insufficient_scope"), (method, path)
                assert f"yours has {scope}" in error["message"]
        assert changes(cluster, store) == (set(), {})
        for method, path in sorted(OPENED_BY[scope], key=lambda route: route == ("DELETE", "/v1/keys/{key_id}")):
            async with http.request(method, filled(path), headers=bearer(scope), json=BODIES.get(path)) as response:
                assert response.status not in (401, 403, 422), (method, path)
                assert response.status < 500 or path in BODIES, (method, path, await response.text())


async def test_what_the_document_declares_is_what_happens(tmp_path: Path) -> None:
    async with opened(tmp_path) as (cluster, _, http, store):
        async with http.get("/openapi.json", headers=bearer(INFERENCE)) as response:
            document = await response.json()
        walked = set()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                walked.add((method.upper(), path))
                assert operation["security"] == ([{"key": []}] if operation["x-scopes"] else [])
                for scope in (None, INFERENCE, MONITOR):
                    if scope in operation["x-scopes"]:
                        continue
                    headers = bearer(scope) if scope is not None else {}
                    async with http.request(method, filled(path), headers=headers) as response:
                        refused = 200 if not operation["x-scopes"] else 403 if scope is not None else 401
                        assert response.status == refused, (method, path, scope)
        assert walked == {(method, path.replace(":path", "")) for method, path in all_routes() if path != "/openapi.json"}
        assert changes(cluster, store) == (set(), {})


async def test_head_needs_what_get_needs(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, _, http, _):
        for scope, path, status in [
            (INFERENCE, "/metrics", 403),
            (MONITOR, "/metrics", 405),
            (INFERENCE, "/v1/keys", 403),
            (ADMIN, "/v1/keys", 405),
        ]:
            async with http.head(path, headers=bearer(scope)) as response:
                assert response.status == status, (scope, path)


async def test_only_an_administrator_sees_paths_of_the_server(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, _, http, _):
        for scope, shown in [(INFERENCE, False), (MONITOR, False), (ADMIN, True)]:
            async with http.get("/v1/models/m", headers=bearer(scope)) as response:
                one = await response.json()
            async with http.get("/v1/models", headers=bearer(scope)) as response:
                assert (await response.json())["data"] == [one]
            assert ("spec" in one) == shown


@pytest.mark.parametrize("scope", [INFERENCE, ADMIN])
async def test_steering_needs_an_administrators_key(scope: str, tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, _, http, _):
        headers = {**bearer(scope), "x-xinference-replica": "m-0"}
        async with http.post("/v1/chat/completions", json=CHAT, headers=headers) as response:
            error = await error_of(response)
    expected = (503, "no_replica_available") if scope == ADMIN else (403, "insufficient_scope")
    assert (response.status, error["code"], error["param"]) == (*expected, "x-xinference-replica")


async def made(http: aiohttp.ClientSession, status: int = 201, **fields: Any) -> dict[str, Any]:
    async with http.post("/v1/keys", json=fields, headers=bearer(ADMIN)) as response:
        assert response.status == status, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def test_a_key_is_made_used_listed_and_revoked(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, _, http, _):
        key = await made(
            http, name="build farm", scopes=["monitor", "inference", "monitor"], expires_in_seconds=3600, requests_per_minute=9
        )
        headers = {"authorization": f"Bearer {key['key']}"}
        async with http.get("/metrics", headers=headers) as response:
            assert response.status == 200
        async with http.get("/v1/keys", headers=bearer(ADMIN)) as response:
            listed = await response.json()
        assert [shown["id"] for shown in listed["data"]] == [ADMIN_KEY_ID, key["id"]]
        assert listed["data"][1]["last_used"] >= key["created"]
        assert listed["data"][1].items() >= {"name": "build farm", "scopes": ["inference", "monitor"], "requests_per_minute": 9}.items()
        assert key["key"] not in str(listed)
        async with http.delete(f"/v1/keys/{key['id']}", headers=bearer(ADMIN)) as response:
            assert (response.status, await response.json()) == (200, {"id": key["id"], "revoked": True})
        async with http.get("/metrics", headers=headers) as response:
            assert response.status == 401
        async with http.delete(f"/v1/keys/{key['id']}", headers=bearer(ADMIN)) as response:
            assert (response.status, (await error_of(response))["code"]) == (404, "not_found")
        async with http.delete("/v1/keys/admin", headers=bearer(ADMIN)) as response:
            assert (response.status, (await error_of(response))["code"]) == (409, "conflict")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"name": 1}, "name"),
        ({"name": "n", "scopes": []}, "scopes"),
        ({"name": "n", "scopes": ["root"]}, "scopes.0"),
        ({"name": "n", "scopes": "admin"}, "scopes"),
        ({"name": "n", "models": []}, "models"),
        ({"name": "n", "models": [""]}, "models.0"),
        ({"name": "n", "models": ["m"] * 129}, "models"),
        ({"name": "n", "models": ["m"], "scopes": ["inference", "monitor"]}, "models"),
        ({"name": "n", "models": ["m"], "scopes": ["admin"]}, "models"),
        ({"name": "n", "expires_in_seconds": 0}, "expires_in_seconds"),
        ({"name": "n", "expires_in_seconds": 10**400}, "expires_in_seconds"),
        ({"name": "n", "expires_in_seconds": True}, "expires_in_seconds"),
        ({"name": "n", "requests_per_minute": -1}, "requests_per_minute"),
        ({"name": "n", "concurrent_requests": 1.5}, "concurrent_requests"),
        ({"name": "n", "key": "mine"}, "key"),
    ],
)
async def test_a_key_that_cannot_be_is_refused_with_the_field(fields: Any, param: str, tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, _, http, store):
        error = (await made(http, 400, **fields))["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert store.load() == {}


async def test_a_key_for_some_models_asks_and_sees_those_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as (cluster, _, http, _):
        await cluster.put(model("org/b"))
        key = await made(http, name="n", models=["org/b", "not yet"])
        headers = {"authorization": f"Bearer {key['key']}"}
        for name, status in [("m", 403), ("none", 403), ("org/b", 503), ("not yet", 404)]:
            for path in ("/v1/chat/completions", "/tokenize", "/v1/embeddings"):
                body = {"model": name, "messages": CHAT["messages"]} if path != "/v1/embeddings" else {"model": name, "input": "x"}
                async with http.post(path, json=body, headers=headers) as response:
                    assert response.status == status, (name, path)
                    if status == 403:
                        error = await error_of(response)
                        assert (error["code"], error["param"]) == ("model_not_allowed", "model")
                        assert "m-0" not in error["message"]
        async with http.get("/v1/models", headers=headers) as response:
            assert [each["id"] for each in (await response.json())["data"]] == ["org/b"]
        for name, status in [("m", 403), ("none", 403), ("org/b", 200), ("not%20yet", 404)]:
            async with http.get(f"/v1/models/{name}", headers=headers) as response:
                assert response.status == status, name

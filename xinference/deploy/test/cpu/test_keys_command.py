"""``keys`` and the client's verbs for them against the real API: what is printed where, and what it says when it cannot be."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from xinference.api.key_store import KeyStore
from xinference.api.keys import key_ring
from xinference.api.test.fakes import FakeCluster, Served, model, serving
from xinference.client.async_client import AsyncClient
from xinference.client.sync_client import Client
from xinference.deploy.cli import cli, run
from xinference.errors import AuthenticationFailed, Conflict, InsufficientScope, NotFound
from xinference.settings import Settings

DAY = 24 * 3600


@pytest.fixture(params=[True], ids=["keys asked for"])
def required(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def served(tmp_path: Path, required: bool) -> AsyncIterator[Served]:
    cluster = FakeCluster()
    await cluster.put(model())
    keys = key_ring(Settings(require_key=required), "root")
    async with serving(cluster, keys=keys, store=KeyStore(tmp_path)) as found:
        yield found


Tool = Callable[..., Any]


@pytest.fixture
def tool(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    """Runs one command line with the administrator's key, or another; gives exit code, stdout and stderr."""
    monkeypatch.setenv("XINFERENCE_ENDPOINT", served.url)
    monkeypatch.setenv("COLUMNS", "250")

    async def call(*words: str, key: str = "root") -> tuple[int, str, str]:
        monkeypatch.setenv("XINFERENCE_API_KEY", key)
        code = await asyncio.to_thread(run, cli, list(words), "xinference")
        out, err = capsys.readouterr()
        return code, out, err

    return call


async def test_the_secret_is_alone_on_stdout_and_opens_the_server(tool: Tool) -> None:
    code, out, err = await tool("keys", "create", "ci")
    assert code == 0
    secret = out.strip()
    assert secret.startswith("xin-")
    assert len(out.splitlines()) == 1
    assert "shown this once" in err
    assert secret not in err
    assert (await tool("list", key=secret))[0] == 0
    code, _, err = await tool("keys", "list", key=secret)
    assert code == 1
    assert "scope 'admin'; yours has inference" in err


async def test_a_key_goes_through_its_life_as_json(tool: Tool) -> None:
    words = (
        "--scopes",
        "inference,monitor",
        "--expires",
        "30d",
        "--requests-per-minute",
        "600",
        "--concurrent-requests",
        "0",
        "-o",
        "json",
    )
    code, out, err = await tool("keys", "create", "board", *words)
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert (
        made.items() >= {"scopes": ["inference", "monitor"], "requests_per_minute": 600, "concurrent_requests": 0, "enforced": True}.items()
    )
    assert made["expires"] == made["created"] + 30 * DAY
    listed = json.loads((await tool("keys", "list", "-o", "json"))[1])
    assert listed[1] == {name: value for name, value in made.items() if name not in ("key", "enforced")}
    assert json.loads((await tool("keys", "revoke", made["id"], "-o", "json"))[1]) == {"id": made["id"], "revoked": True}
    code, out, err = await tool("keys", "revoke", made["id"], "-o", "json")
    assert (code, out, json.loads(err)["error"]["code"]) == (1, "", "not_found")


async def test_the_list_shows_what_a_key_may_and_since_when(tool: Tool) -> None:
    await tool("keys", "create", "n", "--models", "a,org/b", "--concurrent-requests", "4")
    code, out, _ = await tool("keys", "list")
    assert code == 0
    for word in ("admin", "active", "inference", "a, org/b", "never", "server's", "4"):
        assert word in out
    assert "xin-" not in out


@pytest.mark.parametrize("required", [False], indirect=True)
async def test_a_server_that_asks_for_no_key_is_told_of(tool: Tool) -> None:
    code, out, err = await tool("keys", "create", "n")
    assert (code, out[:4]) == (0, "xin-")
    assert "--require-key" in err


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("create",), 2, "Missing argument 'NAME'"),
        (("create", "a/b"), 2, "[name]"),
        (("create", "n", "--scopes", "root"), 2, "'root' is not one of inference, monitor, admin"),
        (("create", "n", "--scopes", "inference,"), 2, "empty name"),
        (("create", "n", "--expires", "30"), 2, "such as 30d"),
        (("create", "n", "--expires", "0d"), 2, "such as 30d"),
        (("create", "n", "--expires", "99999w"), 2, "[expires_in_seconds]"),
        (("create", "n", "--requests-per-minute", "-1"), 2, "not in the range"),
        (("create", "n", "--models", "m", "--scopes", "admin"), 2, "[models]"),
        (("revoke",), 2, "Missing argument 'ID'"),
        (("revoke", "../models/m"), 1, "there is no"),
        (("revoke", "admin"), 1, "admin.key"),
        (("rotate",), 2, "No such command"),
    ],
)
async def test_what_cannot_be_is_refused_in_words(tool: Tool, served: Served, words: tuple[str, ...], code: int, hint: str) -> None:
    found, out, err = await tool("keys", *words)
    assert (found, out) == (code, "")
    assert hint in err
    assert "Traceback" not in err
    assert len(served.app.state.api.keys.keys) == 1


async def test_a_wrong_key_is_told_where_the_right_one_is(tool: Tool) -> None:
    code, _, err = await tool("keys", "list", key="wrong")
    assert code == 1
    assert "admin.key" in err
    assert "wrong" not in err


async def test_a_name_that_is_taken_and_a_full_book_are_told(tool: Tool) -> None:
    await tool("keys", "create", "n")
    code, out, err = await tool("keys", "create", "n")
    assert (code, out) == (1, "")
    assert "there is a key named 'n' already" in err


async def test_both_faces_of_the_client_make_list_and_revoke(served: Served) -> None:
    def synchronously() -> None:
        with Client(served.url, "root") as client:
            made = client.create_key("one", scopes=["monitor"], expires_in_seconds=60, models=None)
            with Client(served.url, made["key"]) as monitor:
                assert monitor.cluster() == {"workers": ["w0"]}
                with pytest.raises(InsufficientScope):
                    monitor.keys()
            listed = client.keys()
            assert [key["id"] for key in listed] == ["admin", made["id"]]
            with pytest.raises(Conflict):
                client.create_key("one")
            assert client.revoke_key(made["id"])["revoked"] is True
            with pytest.raises(NotFound):
                client.revoke_key(made["id"])
            with Client(served.url, made["key"]) as monitor, pytest.raises(AuthenticationFailed):
                monitor.cluster()

    await asyncio.to_thread(synchronously)
    async with AsyncClient(served.url, "root") as client:
        made = await client.create_key("one")
        assert [key["id"] for key in await client.keys()] == ["admin", made["id"]]
        assert (await client.revoke_key(made["id"]))["revoked"] is True

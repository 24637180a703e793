"""Keys and real server processes: kept over kills and restarts, and no door opened on a file that cannot be relied on."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xinference.api.errors import KeyFileUnusable
from xinference.api.key_store import KeyStore, StoredKey
from xinference.api.keys import digest_of
from xinference.client.sync_client import Client
from xinference.deploy.serving import greeting, open_door
from xinference.deploy.test.servers import STOP_SECONDS, ServerProcess
from xinference.errors import AuthenticationFailed
from xinference.settings import Settings

DAMAGED = b'{"version": 1, "keys": ['


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess("local", tmp_path)
    yield server
    server.kill()


def start(server: ServerProcess, *words: str) -> None:
    server.start("--port", str(server.port), "--supervisor-port", "0", *words)


@pytest.mark.parametrize("content", [DAMAGED, b'{"version": 9, "keys": []}', b""])
def test_no_door_is_opened_on_keys_that_cannot_be_relied_on(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "api_keys.json"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(KeyFileUnusable, match=r"api_keys\.json"):
        open_door(Settings(home=tmp_path, port=0))


def test_a_server_that_finds_its_keys_damaged_ends_with_words_and_leaves_them(server: ServerProcess) -> None:
    server.home.mkdir()
    path = server.home / "api_keys.json"
    path.touch(0o600)
    path.write_bytes(DAMAGED)
    start(server)
    assert server.process is not None
    assert server.process.wait(timeout=STOP_SECONDS) == 2
    assert f"{path}, which holds the API keys, is damaged" in server.log
    assert "Traceback" not in server.log
    assert path.read_bytes() == DAMAGED


@pytest.mark.parametrize(("required", "told"), [(True, False), (False, True)])
def test_a_server_with_keys_that_asks_for_none_says_so(tmp_path: Path, required: bool, told: bool) -> None:
    KeyStore(tmp_path).change(lambda keys: {"k": StoredKey("k", "k", digest_of("k").hex(), ("inference",), 1.0)})
    settings = Settings(home=tmp_path, port=0, require_key=required)
    door = open_door(settings)
    cluster: Any = SimpleNamespace(settings=settings, worker=object(), address="")
    try:
        assert ("bind nobody" in "\n".join(greeting(door, cluster))) == told
    finally:
        door.listener.close()


def test_keys_outlive_a_kill_and_isolation_asks_for_them(server: ServerProcess) -> None:
    start(server, "--isolate-tenants")
    server.wait_until_serving()
    admin = (server.home / "admin.key").read_text().strip()
    with Client(server.endpoint) as nobody, pytest.raises(AuthenticationFailed):
        nobody.models()
    with Client(server.endpoint, admin) as client:
        kept, gone = client.create_key("kept", scopes=["monitor"]), client.create_key("gone")
        client.revoke_key(gone["id"])
    family = server.footprint()
    server.stop(signal.SIGKILL)
    assert family.wait_until_gone(30) == []
    start(server, "--require-key")
    server.wait_until_serving()
    with Client(server.endpoint, kept["key"]) as monitor:
        assert monitor.cluster()
    with Client(server.endpoint, gone["key"]) as client, pytest.raises(AuthenticationFailed):
        client.models()
    assert server.stop() == 0
    (row,) = json.loads((server.home / "api_keys.json").read_text())["keys"]
    assert row["name"] == "kept"
    assert row["last_used"] > row["created"]

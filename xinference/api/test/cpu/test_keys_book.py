"""Keys made, listed and revoked, and the file and the ring that stay in step whatever fails."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xinference.api import key_book, key_store
from xinference.api.auth import ADMIN
from xinference.api.errors import KeyStoreFailed
from xinference.api.key_book import KeyBook
from xinference.api.key_store import KeyStore
from xinference.api.keys import ADMIN_KEY_ID, ApiKey, KeyRing
from xinference.errors import AuthenticationFailed, Conflict, LimitExceeded, NotFound, NotSupported

ASKED = {"name": "n", "scopes": ("inference",), "models": None, "requests_per_minute": None, "concurrent_requests": None}


class Server:
    """The keys of one server with this home, as it is after a start."""

    def __init__(self, home: Path) -> None:
        self.store = KeyStore(home)
        stored = [row.key() for row in self.store.load().values()]
        self.ring = KeyRing((ApiKey.of("root", ADMIN, key_id=ADMIN_KEY_ID), *stored))
        self.book = KeyBook(self.ring, self.store)

    def accepts(self, secret: str) -> bool:
        try:
            self.ring.key_of(f"Bearer {secret}", 1.0)
        except AuthenticationFailed:
            return False
        return True

    async def make(self, name: str = "n", **fields: Any) -> dict[str, Any]:
        return await self.book.create({**ASKED, "name": name, **fields})


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


class FullDisk:
    """Makes the file unwritable, as a full disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __enter__(self) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        self._patch.setattr(os, "fsync", fail)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


async def test_a_key_is_accepted_at_once_and_after_a_restart_and_its_secret_is_nowhere(server: Server, tmp_path: Path) -> None:
    made = await server.make(scopes=("inference", "monitor"), models=None)
    secret = made["key"]
    assert secret.startswith("xin-")
    assert len(secret) >= 4 + 43  # 256 bits
    assert server.accepts(secret)
    assert Server(tmp_path).accepts(secret)
    assert all(secret not in path.read_text() for path in tmp_path.iterdir())
    listed = await server.book.rows()
    assert [shown["id"] for shown in listed] == [ADMIN_KEY_ID, made["id"]]
    assert all("key" not in shown and secret not in str(shown) and "sha256" not in shown for shown in listed)
    assert listed[1]["scopes"] == ["inference", "monitor"]


async def test_no_two_secrets_are_alike(server: Server) -> None:
    made = [await server.make(str(number)) for number in range(20)]
    assert len({each["key"] for each in made}) == len({each["id"] for each in made}) == 20


async def test_a_revoked_key_is_refused_at_once_and_after_a_restart(server: Server, tmp_path: Path) -> None:
    made, other = await server.make("a"), await server.make("b")
    assert await server.book.revoke(made["id"]) == {"id": made["id"], "revoked": True}
    for each in (server, Server(tmp_path)):
        assert not each.accepts(made["key"])
        assert each.accepts(other["key"])
    with pytest.raises(NotFound, match="GET /v1/keys"):
        await server.book.revoke(made["id"])


async def test_the_servers_own_key_cannot_be_revoked(server: Server) -> None:
    with pytest.raises(Conflict, match="delete that file and restart"):
        await server.book.revoke(ADMIN_KEY_ID)
    assert server.accepts("root")


async def test_names_are_taken_once_and_free_again_after_revocation(server: Server) -> None:
    made = await server.make("n")
    with pytest.raises(Conflict, match="a key named 'n' already") as caught:
        await server.make("n")
    assert caught.value.param == "name"
    await server.book.revoke(made["id"])
    await server.make("n")


async def test_the_number_of_keys_has_a_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_book, "MAX_KEYS", 2)
    await server.make("a")
    await server.make("b")
    with pytest.raises(LimitExceeded, match="revoke some"):
        await server.make("c")


async def test_a_key_that_cannot_be_written_is_not_made(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FullDisk(monkeypatch), pytest.raises(KeyStoreFailed, match="No space left on device; nothing was created") as caught:
        await server.make()
    assert (caught.value.status, caught.value.code) == (500, "key_store_failed")
    assert len(server.ring.keys) == 1
    assert Server(tmp_path).store.load() == {}


async def test_a_full_disk_keeps_no_revoked_key_in_and_the_next_change_forgets_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await server.make()
    with FullDisk(monkeypatch), pytest.raises(KeyStoreFailed, match="refused, but would be accepted after a restart"):
        await server.book.revoke(made["id"])
    assert not server.accepts(made["key"])
    await server.make("other")
    assert not server.accepts(made["key"])
    assert not Server(tmp_path).accepts(made["key"])


async def test_a_revocation_that_could_not_be_written_can_be_repeated(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await server.make()
    with FullDisk(monkeypatch), pytest.raises(KeyStoreFailed):
        await server.book.revoke(made["id"])
    assert Server(tmp_path).accepts(made["key"])
    await server.book.revoke(made["id"])
    assert not Server(tmp_path).accepts(made["key"])


async def test_a_revocation_that_could_not_be_written_holds_when_another_server_changes_the_file(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await server.make()
    with FullDisk(monkeypatch), pytest.raises(KeyStoreFailed):
        await server.book.revoke(made["id"])
    other = await Server(tmp_path).make("other")
    await server.book.look()
    assert server.accepts(other["key"])
    assert not server.accepts(made["key"])


async def test_a_file_that_is_damaged_while_the_server_runs_changes_nobodys_access(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    made = await server.make()
    server.store.path.write_bytes(b"{")
    for _ in range(3):
        await server.book.look()
    assert server.accepts(made["key"])
    assert not server.accepts("xin-other")
    assert caplog.text.count("is damaged") == 1
    with pytest.raises(KeyStoreFailed, match="nothing was created"):
        await server.make("b")
    with pytest.raises(KeyStoreFailed):
        await server.book.revoke(made["id"])
    assert not server.accepts(made["key"])


async def test_what_another_server_with_this_home_changes_is_taken_over(server: Server, tmp_path: Path) -> None:
    other = Server(tmp_path)
    made = await other.make()
    assert not server.accepts(made["key"])
    await server.book.look()
    assert server.accepts(made["key"])
    ended = []
    with server.ring.using(next(key for key in server.ring.keys if key.key_id == made["id"]), 0.0) as use:
        use.on_revoked(ended.append)
        await other.book.revoke(made["id"])
        await server.book.look()
    assert not server.accepts(made["key"])
    assert len(ended) == 1
    assert server.accepts("root")


async def test_the_file_is_looked_at_while_the_server_runs(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_book, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(key_book, "USE_SECONDS", 0.001)
    running = asyncio.create_task(server.book.run())
    try:
        made = await Server(tmp_path).make()
        async with asyncio.timeout(10):
            while not server.accepts(made["key"]):
                await asyncio.sleep(0.001)
            while KeyStore(tmp_path).load()[made["id"]].last_used is None:
                await asyncio.sleep(0.001)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_last_use_is_listed_at_once_and_written_at_the_end(server: Server, tmp_path: Path) -> None:
    made = await server.make()
    assert made["last_used"] is None
    server.ring.key_of(f"Bearer {made['key']}", 1234.5)
    assert (await server.book.rows())[1]["last_used"] == 1234.5
    await server.book.close()
    assert (await Server(tmp_path).book.rows())[1]["last_used"] == 1234.5


async def test_an_expired_key_is_listed_as_such(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await server.book.create({**ASKED}, lifetime_seconds=10)
    assert made["expires"] == made["created"] + 10
    assert made["state"] == "active"
    monkeypatch.setattr("time.time", lambda: made["expires"])
    assert (await server.book.rows())[1]["state"] == "expired"


async def test_a_client_that_leaves_does_not_stop_a_change_half_way(server: Server, tmp_path: Path) -> None:
    asking = asyncio.create_task(server.make())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(10):
        while len(server.ring.keys) == 1:
            await asyncio.sleep(0.001)
    assert len(Server(tmp_path).ring.keys) == 2


async def test_a_server_without_a_home_says_that_it_keeps_no_keys() -> None:
    book = KeyBook(KeyRing(), None)
    with pytest.raises(NotSupported, match="no home"):
        await book.create({**ASKED})
    await book.run()
    await book.close()


WRITER = """
import sys
from pathlib import Path
from xinference.api.key_store import KeyStore, StoredKey
store, number = KeyStore(Path(sys.argv[1])), 0
while True:
    name = str(number)
    row = StoredKey(name, name, format(number, "064x"), ("inference",), 1.0)
    store.change(lambda keys: {**keys, name: row})
    print(number, flush=True)
    number += 1
"""


def test_a_server_that_is_killed_while_it_writes_leaves_all_that_it_had_confirmed(tmp_path: Path) -> None:
    for round_number in range(3):
        home = tmp_path / str(round_number)
        home.mkdir()
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(home)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        confirmed = -1
        for line in writer.stdout:
            confirmed = int(line)
            if confirmed == 5 + 7 * round_number:
                writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=10)
        keys = KeyStore(home).load()
        assert len(keys) in (confirmed + 1, confirmed + 2)  # the one that was written when it died may be there
        assert set(keys) >= {str(number) for number in range(confirmed + 1)}
        key_store.KeyStore(home).change(lambda keys: {})
        assert sorted(path.name for path in home.iterdir()) == ["api_keys.json", "api_keys.lock"]

"""The file of keys: what it holds, what it refuses, and that no failure leaves it between two states."""

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xinference.api.errors import KeyFileUnusable
from xinference.api.key_store import FILE_NAME, Keys, KeyStore, StoredKey
from xinference.api.keys import digest_of
from xinference.errors import InvalidRequest


def row(name: str = "a", **fields: Any) -> StoredKey:
    return StoredKey(
        **{"id": f"key-{name}", "name": name, "sha256": digest_of(name).hex(), "scopes": ("inference",), "created": 1.0, **fields}
    )


def adding(*rows: StoredKey) -> Callable[[Keys], Keys]:
    return lambda keys: {**keys, **{each.id: each for each in rows}}


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path)


def test_a_home_without_a_file_has_no_keys(store: KeyStore) -> None:
    assert (store.load(), store.stamp()) == ({}, None)


def test_what_is_written_is_read_again_and_closed_to_others(store: KeyStore) -> None:
    whole = row(
        "b", models=("m", "n"), expires=5.5, requests_per_minute=3, concurrent_requests=0, last_used=2.0, scopes=("admin", "monitor")
    )
    store.change(adding(row(), whole))
    assert KeyStore(store.path.parent).load() == {"key-a": row(), "key-b": whole}
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.path.parent.iterdir()} == {
        FILE_NAME: 0o600,
        "api_keys.lock": 0o600,
    }


def test_a_row_is_the_key_that_requests_are_checked_against() -> None:
    key = row(models=("m",), expires=5.5, requests_per_minute=3, concurrent_requests=4).key()
    assert (key.digest, key.scopes, key.key_id, key.models) == (digest_of("a"), {"inference"}, "key-a", {"m"})
    assert (key.expires, key.requests_per_minute, key.concurrent_requests) == (5.5, 3, 4)
    assert row().key().models is None


def test_a_change_of_nothing_writes_nothing(store: KeyStore) -> None:
    store.change(adding(row()))
    before = store.stamp()
    store.change(lambda keys: dict(keys))
    assert store.stamp() == before
    store.change(adding(row("b")))
    assert store.stamp() != before


def test_a_refused_edit_changes_nothing_and_frees_the_lock(store: KeyStore) -> None:
    store.change(adding(row()))

    def refuse(_: Keys) -> Keys:
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest, match="no"):
        store.change(refuse)
    store.change(adding(row("b")))
    assert set(store.load()) == {"key-a", "key-b"}


def one_row(**changed: Any) -> dict[str, Any]:
    fields = {"id": "k", "name": "n", "sha256": "0" * 64, "scopes": ["inference"], "created": 1.0, **changed}
    return {name: value for name, value in fields.items() if value is not None}


DAMAGED = {
    "empty": b"",
    "cut": json.dumps({"version": 1, "keys": [one_row()]}).encode()[:-3],
    "zeros": bytes(200),
    "not utf-8": b'{"version": 1, "keys": [], "\xff": 1}',
    "another shape": b"[]",
    "no version": b'{"keys": []}',
    "deep": b"[" * 100_000,
    "an unknown field": json.dumps({"version": 1, "keys": [one_row(owner="x")]}).encode(),
    **{
        name: json.dumps({"version": 1, "keys": [one_row(**changed)]}).encode()
        for name, changed in {
            "no digest": {"sha256": None},
            "a short digest": {"sha256": "00"},
            "no hex": {"sha256": "g" * 64},
            "an unknown scope": {"scopes": ["root"]},
            "no scope": {"scopes": []},
            "a scope that is no list": {"scopes": "admin"},
            "no models": {"models": []},
            "a number as text": {"created": "1"},
        }.items()
    },
    "one id twice": json.dumps({"version": 1, "keys": [one_row(), one_row(sha256="1" * 64)]}).encode(),
    "one digest twice": json.dumps({"version": 1, "keys": [one_row(), one_row(id="l")]}).encode(),
}


def put(store: KeyStore, raw: bytes, mode: int = 0o600) -> None:
    store.path.write_bytes(raw)
    store.path.chmod(mode)


@pytest.mark.parametrize("raw", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_with_what_to_do_and_left_as_it_is(store: KeyStore, raw: bytes) -> None:
    put(store, raw)
    for use in (store.load, lambda: store.change(adding(row()))):
        with pytest.raises(KeyFileUnusable, match=r"damaged.*restore it from a copy, or delete it") as caught:
            use()
        assert str(store.path) in caught.value.message
    assert store.path.read_bytes() == raw


def test_a_file_of_a_later_version_is_not_taken_for_damaged(store: KeyStore) -> None:
    put(store, b'{"version": 2, "keys": []}')
    with pytest.raises(KeyFileUnusable, match="version 2, this server reads 1"):
        store.load()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused(store: KeyStore, mode: int) -> None:
    store.change(adding(row()))
    store.path.chmod(mode)
    with pytest.raises(KeyFileUnusable, match="chmod 600"):
        store.load()


def test_a_link_and_a_directory_are_no_files_of_keys(store: KeyStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch(0o600)
    store.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyFileUnusable, match="cannot be read"):
        store.load()
    store.path.unlink()
    store.path.mkdir(0o700)
    with pytest.raises(KeyFileUnusable, match="cannot be read"):
        store.load()


def test_a_file_that_never_ends_is_not_read_to_its_end(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xinference.api.key_store.MAX_FILE_BYTES", 100)
    put(store, b" " * 101)
    with pytest.raises(KeyFileUnusable, match="larger than 100 bytes"):
        store.load()


@pytest.mark.parametrize("step", ["fsync", "write", "rename", "open"])
def test_a_failure_at_any_step_leaves_the_old_keys_and_no_draft(store: KeyStore, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    store.change(adding(row()))
    before = store.path.read_bytes()

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        match step:
            case "fsync":
                patched.setattr(os, "fsync", full)
            case "write":
                patched.setattr("msgspec.json.format", full)
            case "rename":
                patched.setattr(Path, "rename", full)
            case "open":
                real = os.open
                patched.setattr(os, "open", lambda path, *a, **k: full() if f".{FILE_NAME}." in str(path) else real(path, *a, **k))
        with pytest.raises(OSError, match="No space left"):
            store.change(adding(row("b")))
    assert store.path.read_bytes() == before
    assert {path.name for path in store.path.parent.iterdir()} == {FILE_NAME, "api_keys.lock"}
    assert set(store.change(adding(row("b")))) == {"key-a", "key-b"}


def test_the_content_is_on_the_disk_before_it_has_the_name_and_the_name_afterwards(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash of the machine leaves depends on this order alone."""
    steps: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(handle: int) -> None:
        steps.append("directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "content")
        fsync(handle)

    def noted_rename(path: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    store.change(adding(row()))
    assert steps == ["content", "rename", "directory"]


def test_the_draft_of_a_server_that_died_is_swept_and_never_read(store: KeyStore) -> None:
    draft = store.path.parent / f".{FILE_NAME}.0123"
    draft.write_bytes(b"half")
    assert store.load() == {}
    store.change(adding(row()))
    assert not draft.exists()


def test_servers_that_share_a_home_lose_none_of_each_others_keys(store: KeyStore) -> None:
    def work(index: int) -> None:
        for number in range(10):
            KeyStore(store.path.parent).change(adding(row(f"{index}-{number}")))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.load()) == 40

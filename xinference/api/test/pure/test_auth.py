"""Scopes, where a server may listen, and the administrator's key."""

import stat
from pathlib import Path

import pytest

from xinference.api.auth import ADMIN, INFERENCE, MONITOR, ROUTE_SCOPES, SCOPES, is_loopback, load_admin_key, scopes_for
from xinference.errors import InvalidRequest


def test_a_route_that_nobody_listed_is_for_administrators() -> None:
    assert scopes_for("GET", "/v1/new") == {ADMIN}
    assert scopes_for("POST", "/v1/models") == {ADMIN}
    assert scopes_for("DELETE", "/v1/models/{uid:path}") == {ADMIN}


def test_inference_monitor_and_public_routes_are_listed() -> None:
    assert scopes_for("POST", "/v1/chat/completions") == {INFERENCE, ADMIN}
    assert scopes_for("GET", "/v1/models") == scopes_for("HEAD", "/v1/models") == SCOPES
    assert scopes_for("GET", "/metrics") == {MONITOR, ADMIN}
    assert scopes_for("GET", "/health") is None


def test_an_administrator_may_do_everything_and_nobody_else_may_write() -> None:
    assert all(ADMIN in scopes for scopes in ROUTE_SCOPES.values())
    assert {method for (method, _), scopes in ROUTE_SCOPES.items() if MONITOR in scopes} == {"GET"}


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.0.0.9", True), ("localhost", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_only_addresses_of_this_machine_are_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


def test_the_admin_key_is_drawn_once_and_closed_to_others(tmp_path: Path) -> None:
    home = tmp_path / "home"
    key = load_admin_key(home)
    assert len(key) > 40
    assert load_admin_key(home) == key
    assert stat.S_IMODE((home / "admin.key").stat().st_mode) == 0o600
    assert [path.name for path in home.iterdir()] == ["admin.key"]


def test_two_homes_have_different_keys(tmp_path: Path) -> None:
    assert load_admin_key(tmp_path / "a") != load_admin_key(tmp_path / "b")


def test_an_admin_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_admin_key(tmp_path)
    (tmp_path / "admin.key").chmod(0o644)
    with pytest.raises(InvalidRequest, match="can be read by other users"):
        load_admin_key(tmp_path)


def test_an_empty_admin_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "admin.key").touch(0o600)
    with pytest.raises(InvalidRequest, match="empty"):
        load_admin_key(tmp_path)


def test_an_admin_key_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "admin.key").touch(0o600)
    (tmp_path / "admin.key").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="holds no key"):
        load_admin_key(tmp_path)

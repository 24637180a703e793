"""Keys, scopes, and where a server may listen."""

import stat
from pathlib import Path

import pytest

from xinference.api.auth import ADMIN, INFERENCE, ApiKey, KeyRing, check_bind, is_loopback, key_ring, load_admin_key, required_scope
from xinference.errors import AuthenticationFailed, InvalidRequest
from xinference.settings import Settings

RING = KeyRing((ApiKey.of("root-key", ADMIN, INFERENCE), ApiKey.of("user-key", INFERENCE)))


@pytest.mark.parametrize(("header", "scopes"), [("Bearer root-key", {ADMIN, INFERENCE}), ("bearer user-key", {INFERENCE})])
def test_a_key_gives_its_scopes(header: str, scopes: set[str]) -> None:
    assert RING.scopes_of(header) == scopes


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic root-key", "root-key", "Bearer root-ke", "Bearer root-keyy", "Bearer é"]
)
def test_no_key_or_a_wrong_one_gives_nothing(header: str | None) -> None:
    with pytest.raises(AuthenticationFailed) as caught:
        RING.scopes_of(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_a_ring_holds_no_key_in_clear() -> None:
    assert "root-key" not in repr(RING)


def test_a_server_that_asks_for_no_key_lets_everybody_do_everything() -> None:
    assert KeyRing(required=False).scopes_of(None) == {ADMIN, INFERENCE}


def test_a_required_ring_without_keys_lets_nobody_in() -> None:
    with pytest.raises(AuthenticationFailed):
        KeyRing().scopes_of("Bearer anything")


def test_a_route_that_nobody_listed_is_for_administrators() -> None:
    assert required_scope("GET", "/v1/new") == ADMIN
    assert required_scope("POST", "/v1/models") == ADMIN
    assert required_scope("DELETE", "/v1/models/{uid:path}") == ADMIN


def test_inference_and_public_routes_are_listed() -> None:
    assert required_scope("POST", "/v1/chat/completions") == INFERENCE
    assert required_scope("GET", "/v1/models") == INFERENCE
    assert required_scope("HEAD", "/v1/models") == INFERENCE
    assert required_scope("GET", "/health") is None


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


def test_keys_are_off_on_loopback_unless_wanted() -> None:
    assert not key_ring(Settings(), "a").required
    assert key_ring(Settings(require_key=True), "a").required
    assert key_ring(Settings(host="0.0.0.0"), "a").required
    assert key_ring(Settings(), "a", ("user",)).required


def test_a_users_key_does_not_administer() -> None:
    ring = key_ring(Settings(), "root", ("user",))
    assert ring.scopes_of("Bearer user") == {INFERENCE}
    assert ring.scopes_of("Bearer root") == {ADMIN, INFERENCE}


@pytest.mark.parametrize("ring", [KeyRing(required=False), KeyRing(), KeyRing((ApiKey.of("k", ADMIN),), required=False)])
def test_other_machines_are_not_served_without_keys(ring: KeyRing) -> None:
    check_bind("127.0.0.1", ring)
    with pytest.raises(InvalidRequest, match="without API keys"):
        check_bind("0.0.0.0", ring)


def test_other_machines_are_served_with_keys() -> None:
    check_bind("0.0.0.0", RING)

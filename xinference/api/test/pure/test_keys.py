"""What a key allows, how much of it, and what its revocation ends. The clocks are moved by hand."""

from typing import Any

import pytest

from xinference.api.auth import ADMIN, INFERENCE, SCOPES
from xinference.api.errors import KeyLimited, error_headers
from xinference.api.keys import ADMIN_KEY_ID, EVERYBODY, ApiKey, Bucket, KeyRing, check_bind, key_ring, tenant_salt
from xinference.errors import AuthenticationFailed, InsufficientScope, InvalidRequest, XinferenceError
from xinference.settings import Limits, Settings

RING = KeyRing((ApiKey.of("root-key", ADMIN), ApiKey.of("user-key", INFERENCE)))


@pytest.mark.parametrize(("header", "scopes"), [("Bearer root-key", {ADMIN}), ("bearer  user-key ", {INFERENCE})])
def test_a_key_gives_its_scopes(header: str, scopes: set[str]) -> None:
    assert RING.key_of(header, 0.0).scopes == scopes


NO_KEY = (None, "", "Bearer", "Bearer ", "Bearer  \t", "Basic root-key", "root-key", "root-key Bearer")
WRONG_KEY = ("Bearer root-ke", "Bearer root-keyy", "Bearer é", "Bearer \udcff", "Bearer root-key user-key")


@pytest.mark.parametrize(
    ("header", "words"), [*((header, "send the header") for header in NO_KEY), *((header, "not known") for header in WRONG_KEY)]
)
def test_no_key_or_a_wrong_one_gives_nothing_and_is_told_apart(header: str | None, words: str) -> None:
    with pytest.raises(AuthenticationFailed, match=words) as caught:
        RING.key_of(header, 0.0)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert "xinference keys create" in caught.value.message


def test_a_ring_holds_no_key_in_clear() -> None:
    assert "root-key" not in repr([vars(key) for key in RING.keys])


def test_a_server_that_asks_for_no_key_lets_everybody_do_everything() -> None:
    assert KeyRing(required=False).key_of(None, 0.0) is EVERYBODY
    assert EVERYBODY.scopes == SCOPES


def test_a_required_ring_without_keys_lets_nobody_in() -> None:
    with pytest.raises(AuthenticationFailed):
        KeyRing().key_of("Bearer anything", 0.0)


def test_a_key_is_refused_from_the_second_on_in_which_it_expires() -> None:
    ring = KeyRing((ApiKey.of("k", INFERENCE, expires=100.0),))
    assert ring.key_of("Bearer k", 99.9).expires == 100.0
    with pytest.raises(AuthenticationFailed, match="has expired"):
        ring.key_of("Bearer k", 100.0)


def test_only_a_use_that_was_let_in_counts_as_a_use() -> None:
    ring = KeyRing((ApiKey.of("k", INFERENCE, key_id="a", expires=100.0), ApiKey.of("never", INFERENCE, key_id="b")))
    ring.key_of("Bearer k", 7.0)
    for header in ("Bearer k", "Bearer x"):
        with pytest.raises(AuthenticationFailed):
            ring.key_of(header, 200.0)
    assert ring.last_used == {"a": 7.0}


def test_a_key_for_some_models_says_the_same_of_others_whether_or_not_they_are_there() -> None:
    key = ApiKey.of("k", INFERENCE, models=frozenset({"a", "b/c"}))
    key.check_model("b/c")
    with pytest.raises(InsufficientScope, match="may only ask: a, b/c") as caught:
        key.check_model("b")
    assert (caught.value.status, caught.value.code, caught.value.param) == (403, "model_not_allowed", "model")
    ApiKey.of("k", INFERENCE).check_model("anything")


def limit_of(ring: KeyRing, key: ApiKey, now: float = 0.0) -> str | None:
    """The limit that keeps one more request out, None if it is let in and over again."""
    try:
        with ring.using(key, now):
            return None
    except KeyLimited as error:
        refused = error
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert int(dict(error_headers(refused))[b"retry-after"]) >= 1
    return refused.limit


def test_requests_at_once_are_limited_for_each_key_and_given_back() -> None:
    one, other = ApiKey.of("1", INFERENCE, concurrent_requests=2), ApiKey.of("2", INFERENCE, concurrent_requests=1)
    ring = KeyRing((one, other))
    with ring.using(one, 0.0):
        with ring.using(one, 0.0):
            assert limit_of(ring, one) == "key_concurrent_requests"
            assert limit_of(ring, other) is None
        assert limit_of(ring, one) is None
    with pytest.raises(ZeroDivisionError), ring.using(other, 0.0):
        raise ZeroDivisionError
    assert limit_of(ring, other) is None


def test_requests_in_a_minute_are_limited_for_each_key_and_come_back_one_by_one() -> None:
    key, other = ApiKey.of("1", INFERENCE, requests_per_minute=6), ApiKey.of("2", INFERENCE, requests_per_minute=6)
    ring = KeyRing((key, other))
    assert [limit_of(ring, key) for _ in range(8)] == [None] * 6 + ["key_requests_per_minute"] * 2
    assert limit_of(ring, other) is None
    later = [limit_of(ring, key, now) for now in (9.9, 10.0, 10.1, 20.0)]
    assert later == ["key_requests_per_minute", None, "key_requests_per_minute", None]


def test_a_bucket_says_when_to_come_again_and_holds_no_more_than_a_minute() -> None:
    bucket = Bucket(2, 0.0)
    assert [bucket.take(0.0), bucket.take(0.0), bucket.take(0.0)] == [0.0, 0.0, 30.0]
    assert bucket.take(12.0) == pytest.approx(18.0)
    assert [bucket.take(1e6), bucket.take(1e6), bucket.take(1e6)] == [0.0, 0.0, 30.0]


def test_a_request_that_is_refused_for_being_one_too_many_at_once_costs_nothing_of_the_minute() -> None:
    key = ApiKey.of("1", INFERENCE, concurrent_requests=1, requests_per_minute=2)
    ring = KeyRing((key,))
    with ring.using(key, 0.0):
        assert {limit_of(ring, key) for _ in range(5)} == {"key_concurrent_requests"}
    assert limit_of(ring, key) is None


@pytest.mark.parametrize(("own", "refused"), [(None, True), (0, False), (2, False)])
def test_the_servers_limits_hold_for_keys_without_their_own(own: int | None, refused: bool) -> None:
    for field in ("concurrent_requests", "requests_per_minute"):
        key = ApiKey.of("k", INFERENCE, **{field: own})
        ring = KeyRing((key,), limits=Limits(**{f"key_{field}": 1}))
        with ring.using(key, 0.0):
            assert limit_of(ring, key) == (f"key_{field}" if refused else None)


def test_there_is_no_limit_unless_somebody_sets_one_and_never_one_for_the_servers_own_key() -> None:
    assert (Limits().key_concurrent_requests, Limits().key_requests_per_minute) == (0, 0)
    ring = key_ring(Settings(), "root")
    admin = ring.keys[0]
    assert (admin.key_id, admin.concurrent_requests, admin.requests_per_minute) == (ADMIN_KEY_ID, 0, 0)


def ended_by(key_id: str, ring: KeyRing, key: ApiKey) -> list[str]:
    """What a revocation ends of a request that opened two things, one before and one after it."""
    ended: list[Any] = []
    with ring.using(key, 0.0) as use:
        use.on_revoked(lambda error: ended.append(error))
        ring.revoke(key_id)
        use.on_revoked(lambda error: ended.append(error))
    assert all(isinstance(error, XinferenceError) and error.status == 401 for error in ended)
    return [error.message for error in ended]


def test_revoking_a_key_refuses_it_and_ends_what_it_opened_before_and_after() -> None:
    keys = [ApiKey.of("k", INFERENCE, key_id="a"), ApiKey.of("l", INFERENCE, key_id="b")]
    ring = KeyRing(keys)
    assert ended_by("b", ring, keys[0]) == []
    words = ended_by("a", ring, keys[0])
    assert len(words) == 2
    assert "revoked" in words[0]
    with pytest.raises(AuthenticationFailed):
        ring.key_of("Bearer k", 0.0)


def test_keys_are_off_on_loopback_unless_wanted() -> None:
    stored = [ApiKey.of("user", INFERENCE)]
    assert not key_ring(Settings(), "a", stored).required
    assert key_ring(Settings(require_key=True), "a").required
    assert key_ring(Settings(isolate_tenants=True), "a").required
    assert key_ring(Settings(host="0.0.0.0"), "a").required


def test_the_servers_own_key_and_the_stored_ones_are_accepted() -> None:
    ring = key_ring(Settings(require_key=True), "root", [ApiKey.of("user", INFERENCE)])
    assert ring.key_of("Bearer user", 0.0).scopes == {INFERENCE}
    assert ring.key_of("Bearer root", 0.0).is_admin


@pytest.mark.parametrize("ring", [KeyRing(required=False), KeyRing(), KeyRing((ApiKey.of("k", ADMIN),), required=False)])
def test_other_machines_are_not_served_without_keys(ring: KeyRing) -> None:
    check_bind("127.0.0.1", ring)
    with pytest.raises(InvalidRequest, match="without API keys"):
        check_bind("0.0.0.0", ring)


def test_other_machines_are_served_with_keys() -> None:
    check_bind("0.0.0.0", RING)


def test_no_two_tenants_have_a_salt_in_common_whatever_they_send() -> None:
    asked = [
        (tenant, given)
        for tenant in ("key-1", "key-12", "1", "")
        for given in (None, "x", "2", "2:x", "5:key-1:x", tenant_salt("key-1", "x"))
    ]
    salts = [tenant_salt(tenant, given) for tenant, given in asked]
    assert len(set(salts)) == len(asked)
    assert salts == [tenant_salt(tenant, given) for tenant, given in asked]
    assert tenant_salt("key-1", None) == tenant_salt("key-1", "")

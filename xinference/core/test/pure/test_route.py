"""Choosing a replica."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference.core.route import PrefixRouter, RouteLimits, choose_replica, rendezvous_order

LIMITS = RouteLimits(load_factor=1.25, burst_requests=8, young_seconds=5.0, remembered_prefixes=4)
THREE = ("m-0", "m-1", "m-2")
uids = st.lists(st.text(st.characters(codec="ascii"), min_size=1, max_size=6), min_size=1, max_size=6, unique=True)
digests = st.binary(min_size=1, max_size=16)


def prefixes(count: int) -> list[str]:
    return [f"prefix {number}" for number in range(count)]


def test_the_same_prefix_goes_to_the_same_replica() -> None:
    router = PrefixRouter(LIMITS)
    loads = dict.fromkeys(THREE, 0)
    chosen = {router.choose("m", THREE, loads, "a long prompt", 1000.0 + step) for step in range(20)}
    assert len(chosen) == 1


def test_another_process_chooses_the_same_replica() -> None:
    loads = dict.fromkeys(THREE, 0)
    for prefix in prefixes(50):
        assert PrefixRouter(LIMITS).choose("m", THREE, loads, prefix, 1.0) == PrefixRouter(LIMITS).choose(
            "m", THREE[::-1], loads, prefix, 9.0
        )


def test_different_prefixes_are_spread() -> None:
    router = PrefixRouter(LIMITS)
    counts = Counter(router.choose("m", THREE, dict.fromkeys(THREE, 0), prefix, 1000.0) for prefix in prefixes(3000))
    assert all(800 < counts[uid] < 1200 for uid in THREE)


def test_a_replica_that_goes_moves_only_its_own_prefixes() -> None:
    for digest in (bytes([n]) for n in range(200)):
        before = rendezvous_order(THREE, digest)[0]
        after = rendezvous_order(["m-0", "m-2"], digest)[0]
        assert after == before or before == "m-1"


def test_a_burst_of_one_cold_prompt_goes_to_one_replica() -> None:
    router = PrefixRouter(LIMITS)
    loads = dict.fromkeys(("m-0", "m-1"), 0)
    for step in range(8):
        loads[router.choose("m", ["m-0", "m-1"], loads, "cold", 1000.0 + step / 100)] += 1
    assert sorted(loads.values()) == [0, 8]


def test_beyond_the_burst_the_other_replica_helps() -> None:
    router = PrefixRouter(LIMITS)
    loads = dict.fromkeys(("m-0", "m-1"), 0)
    for _ in range(16):
        loads[router.choose("m", ["m-0", "m-1"], loads, "cold", 1000.0)] += 1
    assert min(loads.values()) >= 6


def test_an_old_prefix_is_balanced_within_the_load_factor() -> None:
    router = PrefixRouter(LIMITS)
    loads = dict.fromkeys(THREE, 0)
    router.choose("m", THREE, loads, "old", 1000.0)
    for _ in range(30):
        loads[router.choose("m", THREE, loads, "old", 1006.0)] += 1
    assert max(loads.values()) <= 13  # 1.25 x 30 / 3, rounded up


def test_without_a_prefix_the_least_loaded_serves() -> None:
    loads = {"m-0": 3, "m-1": 1, "m-2": 2}
    assert PrefixRouter(LIMITS).choose("m", THREE, loads, "\0 \n", 1000.0) == "m-1"


def test_an_excluded_replica_is_never_chosen() -> None:
    router = PrefixRouter(LIMITS)
    loads = dict.fromkeys(THREE, 0)
    for prefix in prefixes(50):
        assert router.choose("m", ["m-0", "m-2"], loads, prefix, 1000.0) != "m-1"


def test_the_memory_of_prefixes_is_bounded() -> None:
    router = PrefixRouter(LIMITS)
    for prefix in prefixes(100):
        router.choose("m", THREE, dict.fromkeys(THREE, 0), prefix, 1000.0)
    assert len(router._first_seen) == 4


def test_a_prefix_that_no_text_codec_likes_is_routed() -> None:
    assert PrefixRouter(LIMITS).choose("m", THREE, dict.fromkeys(THREE, 0), "\ud800", 1.0) in THREE


@given(st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 50), min_size=1, max_size=6), digests, st.booleans())
def test_the_chosen_replica_is_one_of_them_and_within_its_bound(loads: dict[str, int], digest: bytes, young: bool) -> None:
    chosen = choose_replica(loads, digest, young, LIMITS)
    mean_with_new = (sum(loads.values()) + 1) / len(loads)
    most = max(8, -(-1.25 * mean_with_new // 1)) if young else -(-1.25 * mean_with_new // 1)
    assert loads[chosen] < most


@given(uids, digests)
def test_the_order_does_not_depend_on_the_order_of_the_input(replica_uids: list[str], digest: bytes) -> None:
    assert rendezvous_order(replica_uids, digest) == rendezvous_order(sorted(replica_uids), digest)
    assert sorted(rendezvous_order(replica_uids, digest)) == sorted(replica_uids)


@given(uids, st.integers(1, 80), st.booleans())
def test_any_sequence_of_one_prefix_stays_balanced_once_it_is_old(replica_uids: list[str], requests: int, young: bool) -> None:
    loads = dict.fromkeys(replica_uids, 0)
    for _ in range(requests):
        loads[choose_replica(loads, b"x", young, LIMITS)] += 1
    bound = -(-1.25 * requests / len(loads) // 1)
    assert max(loads.values()) <= (max(bound, 8) if young else bound)


@pytest.mark.parametrize("young", [True, False])
def test_one_replica_takes_everything(young: bool) -> None:
    assert choose_replica({"m-0": 10_000}, b"x", young, LIMITS) == "m-0"

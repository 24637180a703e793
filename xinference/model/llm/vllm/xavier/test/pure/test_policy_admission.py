"""The doorkeeper: what it remembers, for how long, and what it costs."""

import random

import pytest

from xinference.model.llm.vllm.xavier.policy.admission import DOORKEEPER_BYTES_PER_PLACE, DOORKEEPER_TAGS_PER_PLACE, Doorkeeper


def keys(seed: int, count: int) -> list[tuple[int, int]]:
    drawn = random.Random(seed)
    return [(drawn.getrandbits(64), drawn.getrandbits(64)) for _ in range(count)]


def test_a_key_is_seen_after_it_was_noted_and_asking_does_not_note_it() -> None:
    door = Doorkeeper(100)
    asked = keys(1, 4)
    assert door.num_seen(asked) == 0
    assert door.num_seen(asked) == 0
    door.note(asked)
    assert door.num_seen(asked) == 4


def test_only_leading_keys_count_as_seen() -> None:
    door = Doorkeeper(100)
    asked = keys(1, 4)
    door.note([*asked[:2], asked[3]])
    assert door.num_seen(asked) == 2
    assert door.num_seen([]) == 0


def test_a_key_whose_tag_is_zero_is_told_from_an_empty_slot() -> None:
    door = Doorkeeper(1)
    assert door.num_seen([(0, 1 << 16)]) == 0
    door.note([(0, 1 << 16)])
    assert door.num_seen([(0, 1 << 16)]) == 1


def test_keys_that_differ_only_in_their_second_word_are_told_apart() -> None:
    door = Doorkeeper(100)
    door.note([(7, 1)])
    assert door.num_seen([(7, 2)]) == 0


def test_what_was_noted_long_ago_is_forgotten_and_what_was_noted_lately_is_not() -> None:
    num_places = 1000
    door = Doorkeeper(num_places)
    old, recent = keys(1, 500), keys(2, 500)
    door.note(old)
    door.note(keys(3, 3 * DOORKEEPER_TAGS_PER_PLACE * num_places))
    door.note(recent)
    assert sum(door.num_seen([key]) for key in old) < 50
    assert sum(door.num_seen([key]) for key in recent) > 400


def test_content_that_never_came_is_hardly_ever_taken_for_seen() -> None:
    door = Doorkeeper(1000)
    door.note(keys(1, 20_000))
    assert sum(door.num_seen([key]) for key in keys(2, 20_000)) < 10


def test_a_place_is_guarded_by_a_fixed_number_of_bytes() -> None:
    assert Doorkeeper(77).nbytes() == 77 * DOORKEEPER_BYTES_PER_PLACE


def test_a_doorkeeper_without_places_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one place"):
        Doorkeeper(0)

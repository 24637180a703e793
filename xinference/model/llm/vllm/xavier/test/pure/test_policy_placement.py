"""The placement book by example: what goes first, what never goes, what a refusal leaves, what a move costs."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from xinference.model.llm.vllm.xavier.config import BOOK_BYTES_PER_PLACE
from xinference.model.llm.vllm.xavier.errors import BookImbalance
from xinference.model.llm.vllm.xavier.policy.admission import Doorkeeper
from xinference.model.llm.vllm.xavier.policy.placement import (
    DECISION_BYTES_PER_PLACE,
    EVICTION_SCAN_PLACES,
    Counts,
    PlacementBook,
    Reservation,
)
from xinference.model.llm.vllm.xavier.policy.places import FREE, PINNED, RESERVED, STORED, WITHDRAWN, PlaceTable
from xinference.model.llm.vllm.xavier.policy.recency import RecencyOrder


def store(book: PlacementBook, parent: int | None, count: int, num_seen: int = 0) -> list[int]:
    """Reserve and commit a chain that must get all its places."""
    got = book.reserve(parent, count, num_seen)
    assert got.refused is None
    for place in got.places:
        assert book.commit(place)
    return got.places


def test_a_place_costs_exactly_the_bytes_that_are_budgeted_for_it() -> None:
    num_places = 1000
    assert PlacementBook(num_places).nbytes() + Doorkeeper(num_places).nbytes() == num_places * DECISION_BYTES_PER_PLACE
    assert DECISION_BYTES_PER_PLACE <= BOOK_BYTES_PER_PLACE


def test_no_python_object_exists_for_a_stored_block() -> None:
    def allocated(num_places: int) -> int:
        book = PlacementBook(num_places)
        before = sys.getallocatedblocks()
        for _ in range(num_places // 4):
            store(book, None, 4)
        return sys.getallocatedblocks() - before

    allocated(64)
    assert allocated(4000) < 100


def test_a_book_without_places_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one place"):
        PlacementBook(0)


def test_a_full_book_gives_up_the_oldest_chain_from_its_tail() -> None:
    book = PlacementBook(6)
    old = store(book, None, 3)
    store(book, None, 3)
    assert book.reserve(None, 2) == Reservation([old[2], old[1]], [old[2], old[1]], None)
    assert book.view(old[0]).state == "stored"


def test_a_touched_prefix_outlives_what_is_older_and_its_own_tail_goes_before_its_head() -> None:
    book = PlacementBook(6)
    old, new = store(book, None, 3), store(book, None, 3)
    book.touch(old[:2], reused=False)
    assert book.reserve(None, 6).evicted == [old[2], new[2], new[1], new[0], old[1], old[0]]


def test_a_chain_that_goes_on_later_is_kept_on_the_older_side_of_its_head() -> None:
    book = PlacementBook(4)
    head = store(book, None, 1)
    other = store(book, None, 1)
    tail = store(book, head[0], 2)
    assert book.reserve(None, 4).evicted == [tail[1], tail[0], head[0], other[0]]


def test_nothing_is_evicted_for_a_chain_from_that_chain_itself() -> None:
    book = PlacementBook(3)
    chain = store(book, None, 3)
    assert book.reserve(chain[2], 1) == Reservation([], [], "capacity")
    assert book.reserve(None, 5).places == [chain[2], chain[1], chain[0]]


def test_pinned_places_and_their_ancestors_stay() -> None:
    book = PlacementBook(4)
    chain = store(book, None, 4)
    book.pin(chain[2])
    book.pin(chain[2])
    assert book.reserve(None, 4).evicted == [chain[3]]
    book.unpin(chain[2])
    assert book.reserve(None, 4).refused == "capacity"
    book.unpin(chain[2])
    assert book.reserve(None, 4) == Reservation([chain[2], chain[1], chain[0]], [chain[2], chain[1], chain[0]], "capacity")


def test_a_refused_chain_keeps_its_leading_blocks_and_nothing_past_the_gap() -> None:
    book = PlacementBook(3)
    got = book.reserve(None, 5)
    assert (len(got.places), got.refused) == (3, "capacity")
    assert book.counts() == Counts(free=0, reserved=3, stored=0, withdrawn=0, pinned=0)


def test_content_not_seen_before_does_not_displace_content_that_was_reused() -> None:
    book = PlacementBook(10)  # two of them protected
    reused = store(book, None, 2)
    book.touch(reused)
    fresh = store(book, None, 8)
    got = book.reserve(None, 10)
    assert (sorted(got.evicted), got.refused) == (sorted(fresh), "admission")
    for place in got.places:
        book.abort(place)
    assert book.reserve(None, 10, num_seen=10).refused is None


def test_a_reused_mark_ages_by_what_is_reused_after_it() -> None:
    book = PlacementBook(10)  # two of them protected
    chains = [store(book, None, 1) for _ in range(10)]
    book.touch(chains[0])
    book.touch(chains[1])
    assert book.view(chains[0][0]).reused
    book.touch(chains[2])
    assert not book.view(chains[0][0]).reused
    # Aged, it starts again as the newest of those used once.
    assert book.reserve(None, 9).evicted == [*(chain[0] for chain in chains[3:]), chains[0][0]]


def test_content_seen_before_starts_protected_but_not_ahead_of_its_parent() -> None:
    book = PlacementBook(20)
    assert book.view(store(book, None, 1, num_seen=1)[0]).reused
    once = store(book, None, 1)
    again = store(book, once[0], 1, num_seen=1)
    assert not book.view(again[0]).reused


def test_a_child_of_an_aborted_parent_is_refused_at_its_commit() -> None:
    book = PlacementBook(4)
    first, second, third = book.reserve(None, 3).places
    book.abort(first)
    assert book.counts() == Counts(free=1, reserved=2, stored=0, withdrawn=1, pinned=0)
    assert not book.commit(second)
    assert not book.commit(third)
    assert book.counts() == Counts(free=4, reserved=0, stored=0, withdrawn=0, pinned=0)


def test_a_place_is_not_given_out_again_while_its_child_is_being_copied() -> None:
    book = PlacementBook(2)
    first, second = book.reserve(None, 2).places
    book.abort(first)
    assert book.reserve(None, 1).refused == "capacity"
    book.abort(second)
    assert book.reserve(None, 2).refused is None


def test_an_aborted_parent_waits_for_all_its_children() -> None:
    book = PlacementBook(3)
    first, second = book.reserve(None, 2).places
    (third,) = book.reserve(first, 1).places
    book.abort(first)
    book.abort(second)
    assert book.view(first).state == "withdrawn"
    book.abort(third)
    assert book.counts().free == 3


def test_a_child_committed_before_its_parent_is_refused() -> None:
    book = PlacementBook(2)
    first, second = book.reserve(None, 2).places
    assert not book.commit(second)
    assert book.commit(first)


def test_a_chain_does_not_go_on_under_a_parent_that_is_gone() -> None:
    book = PlacementBook(4)
    first, _ = book.reserve(None, 2).places
    book.abort(first)
    assert book.reserve(first, 1) == Reservation([], [], "parent_gone")
    assert book.reserve(3, 1) == Reservation([], [], "parent_gone")


def test_a_cleared_place_is_free_only_after_its_last_reader() -> None:
    book = PlacementBook(1)
    (place,) = store(book, None, 1)
    book.pin(place)
    book.pin(place)
    assert book.clear() == 0
    assert book.view(place).state == "withdrawn"
    book.unpin(place)
    assert book.reserve(None, 1).refused == "capacity"
    book.unpin(place)
    assert book.counts().free == 1


def test_a_clear_leaves_only_what_somebody_still_holds() -> None:
    book = PlacementBook(10)
    stored = store(book, None, 4)
    reserved = book.reserve(stored[3], 2).places
    book.pin(stored[1])
    assert book.clear() == 3
    assert book.counts() == Counts(free=7, reserved=2, stored=0, withdrawn=1, pinned=1)
    assert not book.commit(reserved[0])
    assert not book.commit(reserved[1])
    book.unpin(stored[1])
    assert book.counts() == Counts(free=10, reserved=0, stored=0, withdrawn=0, pinned=0)
    assert len(set(book.reserve(None, 10).places)) == 10


def test_a_clear_cancels_reservations_of_content_seen_before_too() -> None:
    book = PlacementBook(2)
    (place,) = book.reserve(None, 1, num_seen=1).places
    book.clear()
    assert book.view(place).state == "cancelled"
    assert not book.commit(place)


def test_places_of_a_cleared_chain_start_again_without_children() -> None:
    book = PlacementBook(2)
    store(book, None, 2)
    book.clear()
    assert store(book, None, 1) == [0]
    assert store(book, None, 1) == [1]
    assert book.reserve(None, 2).evicted == [0, 1]


def test_restored_chains_are_given_up_in_the_order_in_which_they_were_restored() -> None:
    book = PlacementBook(4)
    book.restore(3, None)
    book.restore(1, 3)
    book.restore(0, None)
    assert book.reserve(None, 1).places == [2]
    assert book.reserve(None, 3).evicted == [1, 3, 0]


def test_a_place_in_use_or_without_its_parent_is_not_restored() -> None:
    book = PlacementBook(4)
    book.restore(3, None)
    with pytest.raises(BookImbalance):
        book.restore(3, None)
    with pytest.raises(BookImbalance):
        book.restore(2, 1)
    (given,) = book.reserve(None, 1).places
    book.abort(given)
    with pytest.raises(BookImbalance):
        book.restore(given, None)


@pytest.mark.parametrize("prefix", [[1], [1, 0], [0, 2], [0, 0], [0, 1, 9]])
def test_what_is_not_a_stored_prefix_is_not_touched(prefix: list[int]) -> None:
    book = PlacementBook(10)
    assert store(book, None, 3) == [0, 1, 2]
    other = store(book, None, 1)
    with pytest.raises(BookImbalance):
        book.touch(prefix)
    assert not any(book.view(place).reused for place in range(4))
    assert book.reserve(None, 10).evicted == [2, 1, 0, *other]


@pytest.mark.parametrize("verb", ["commit", "abort", "pin", "unpin", "view"])
def test_a_place_that_does_not_exist_is_an_index_error(verb: str) -> None:
    book = PlacementBook(4)
    store(book, None, 4)
    for place in (-1, 4):
        with pytest.raises(IndexError):
            getattr(book, verb)(place)


def opcodes(act: Callable[[], Any]) -> int:
    """Bytecodes that a call executes in the policy package."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "/policy/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(previous)
    return count


def full_book(num_places: int) -> PlacementBook:
    book = PlacementBook(num_places)
    for _ in range(num_places // 8):
        store(book, None, 8)
    return book


def costs(num_places: int) -> dict[str, int]:
    """Bytecodes of each verb on a full book."""
    book = full_book(num_places)
    (place,) = book.reserve(None, 1).places
    chain = list(range(num_places - 8, num_places))  # the newest
    verbs: dict[str, Callable[[], Any]] = {
        "commit": lambda: book.commit(place),
        "reserve": lambda: book.reserve(None, 4),
        "pin": lambda: book.pin(chain[-1]),
        "unpin": lambda: book.unpin(chain[-1]),
        "touch": lambda: book.touch(chain),
    }
    return {name: opcodes(verb) for name, verb in verbs.items()}


def test_the_work_of_each_verb_does_not_depend_on_the_places_held() -> None:
    few, many = costs(800), costs(16_000)
    assert few == many
    assert all(few.values())


def test_a_reservation_passes_over_a_bounded_number_of_places() -> None:
    book = PlacementBook(EVICTION_SCAN_PLACES + 2)
    pinned = [store(book, None, 1)[0] for _ in range(EVICTION_SCAN_PLACES + 1)]
    (free_to_go,) = store(book, None, 1)
    for place in pinned:
        book.pin(place)
    assert book.reserve(None, 1).refused == "capacity"
    book.unpin(pinned[-1])
    book.pin(free_to_go)
    assert book.reserve(None, 1).evicted == [pinned[-1]]


def test_a_long_reservation_scans_the_held_places_once() -> None:
    def cost(count: int) -> int:
        book = full_book(800)
        for place in range(7, 32, 8):
            book.pin(place)
        return opcodes(lambda: book.reserve(None, count))

    assert cost(60) - cost(50) == cost(50) - cost(40)


def spoil_num(table: PlaceTable) -> None:
    table.num[STORED] -= 1


def spoil_pinned(table: PlaceTable) -> None:
    table.num_pinned += 1


def spoil_children(table: PlaceTable) -> None:
    table.children[0] += 1


def spoil_parent(table: PlaceTable) -> None:
    table.parent[1] = 3


def spoil_pins(table: PlaceTable) -> None:
    table.flags[0] |= PINNED


def spoil_withdrawn(table: PlaceTable) -> None:
    table.move(2, WITHDRAWN)


def spoil_free(table: PlaceTable) -> None:
    table.move(3, RESERVED)


@pytest.mark.parametrize(
    "spoil",
    [spoil_num, spoil_pinned, spoil_children, spoil_parent, spoil_pins, spoil_withdrawn, spoil_free],
    ids=lambda spoil: spoil.__name__,
)
def test_books_that_contradict_each_other_are_found(spoil: Callable[[PlaceTable], None]) -> None:
    table = PlaceTable(6)
    for parent in (-1, 0, 1, -1):
        place = table.take_free()
        table.enter(place, parent, seen=False)
        table.move(place, STORED)
    table.cut(3)
    table.release(3)
    table.check()
    assert table.state(3) == FREE
    spoil(table)
    with pytest.raises(BookImbalance):
        table.check()


def test_an_order_that_contradicts_the_places_is_found() -> None:
    order = RecencyOrder(10)
    order.add(0, -1, seen=True)
    order.add(1, 0, seen=False)
    order.check([-1, 0], [0, 1])
    for parent, stored in (([-1, 0], [0]), ([-1, 0, -1], [0, 1, 2]), ([1, -1], [0, 1])):
        with pytest.raises(BookImbalance):
            order.check(parent, stored)


def test_a_book_checks_its_table_and_its_order() -> None:
    book = PlacementBook(4)
    (place,) = store(book, None, 1)
    book.check()
    book._order.drop(place)
    with pytest.raises(BookImbalance, match="order"):
        book.check()
    book._table.num[STORED] = 0
    with pytest.raises(BookImbalance, match="by state"):
        book.check()

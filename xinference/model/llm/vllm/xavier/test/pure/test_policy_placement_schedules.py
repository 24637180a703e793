"""Random schedules: the placement book does what a book of plain lists does, and its promises hold after every move."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from xinference.model.llm.vllm.xavier.errors import BookImbalance
from xinference.model.llm.vllm.xavier.policy.placement import EVICTION_SCAN_PLACES, PlacementBook, PlaceView
from xinference.model.llm.vllm.xavier.policy.recency import PROTECTED_SHARE
from xinference.model.llm.vllm.xavier.test.naive_book import NaiveBook, NaivePlace

PICK = st.integers(min_value=0, max_value=1 << 16)
FREE = PlaceView("free", None, 0, 0, False)


class Schedules(RuleBasedStateMachine):
    """Both books, move by move."""

    @initialize(num_places=st.integers(1, 12), adopted=st.lists(PICK, max_size=8), data=st.data())
    def start(self, num_places: int, adopted: list[int], data: st.DataObject) -> None:
        self.book = PlacementBook(num_places)
        self.naive = NaiveBook(num_places, int(num_places * PROTECTED_SHARE), EVICTION_SCAN_PLACES)
        for place in dict.fromkeys(pick % num_places for pick in adopted):
            parent = data.draw(st.sampled_from([None, *self.naive.places]))
            self.book.restore(place, parent)
            self.naive.places[place] = NaivePlace("reserved", parent)
            assert self.naive.commit(place)

    def pick(self, number: int, *states: str) -> int:
        held = sorted(place for place, held in self.naive.places.items() if held.state in states)
        return held[number % len(held)]

    def any_in(self, *states: str) -> bool:
        return any(held.state in states for held in self.naive.places.values())

    @rule(number=PICK, kind=st.sampled_from(["root", "kept", "kept", "any"]), count=st.integers(1, 5), num_seen=st.integers(0, 5))
    def reserve(self, number: int, kind: str, count: int, num_seen: int) -> None:
        parent = None if kind == "root" else number % self.book.num_places
        if kind == "kept" and self.any_in("reserved", "stored"):
            parent = self.pick(number, "reserved", "stored")
        before = self.views()
        parents = [view.parent for view in before]
        got = self.book.reserve(parent, count, num_seen)
        assert (got.evicted, got.refused) == self.naive.reserve(parent, count, num_seen, got.places)
        for index, place in enumerate(got.evicted):
            assert (before[place].state, before[place].num_pins) == ("stored", 0)
            children = {child for child, above in enumerate(parents) if above == place}
            assert children <= set(got.evicted[:index]), "a place went before its children"
        if got.refused is not None and not got.places:
            assert self.views() == before
        assert (len(got.places) == count) == (got.refused is None)

    @precondition(lambda self: self.any_in("reserved", "cancelled"))
    @rule(number=PICK)
    def commit(self, number: int) -> None:
        place = self.pick(number, "reserved", "cancelled")
        assert self.book.commit(place) == self.naive.commit(place)

    @precondition(lambda self: self.any_in("reserved", "cancelled"))
    @rule()
    def commit_all_in_order_of_reservation(self) -> None:
        for place in [place for place, held in self.naive.places.items() if held.state in ("reserved", "cancelled")]:
            assert self.book.commit(place) == self.naive.commit(place)

    @precondition(lambda self: self.any_in("reserved", "cancelled"))
    @rule(number=PICK)
    def abort(self, number: int) -> None:
        place = self.pick(number, "reserved", "cancelled")
        self.book.abort(place)
        self.naive.abort(place)

    @precondition(lambda self: self.any_in("stored"))
    @rule(number=PICK)
    def pin(self, number: int) -> None:
        place = self.pick(number, "stored")
        self.book.pin(place)
        self.naive.places[place].pins += 1

    @precondition(lambda self: any(held.pins for held in self.naive.places.values()))
    @rule(number=PICK)
    def unpin(self, number: int) -> None:
        pinned = sorted(place for place, held in self.naive.places.items() if held.pins)
        self.book.unpin(pinned[number % len(pinned)])
        self.naive.unpin(pinned[number % len(pinned)])

    @precondition(lambda self: self.any_in("stored"))
    @rule(number=PICK, reused=st.booleans())
    def touch(self, number: int, reused: bool) -> None:
        prefix = self.naive.ancestors(self.pick(number, "stored"))
        self.book.touch(prefix, reused=reused)
        self.naive.touch(prefix, reused)

    @precondition(lambda self: self.any_in("stored"))
    @rule(number=PICK, other=PICK, reused=st.booleans())
    def touch_two_fragments(self, number: int, other: int, reused: bool) -> None:
        prefix = [*self.naive.ancestors(self.pick(number, "stored")), *self.naive.ancestors(self.pick(other, "stored"))]
        prefix = list(dict.fromkeys(prefix))
        self.book.touch(prefix, reused=reused)
        self.naive.touch(prefix, reused)

    @rule(sometimes=st.integers(0, 5))
    def clear(self, sometimes: int) -> None:
        if not sometimes:
            assert self.book.clear() == self.naive.clear()

    @rule(number=PICK)
    def what_is_not_allowed_is_refused_and_changes_nothing(self, number: int) -> None:
        place = number % self.book.num_places
        state = self.naive.places[place].state if place in self.naive.places else "free"
        before = self.views()
        refused = [
            (self.book.commit, state in ("reserved", "cancelled")),
            (self.book.abort, state in ("reserved", "cancelled")),
            (self.book.pin, state == "stored"),
            (self.book.unpin, state != "free" and self.naive.places[place].pins > 0),
            (lambda place: self.book.touch([place]), state == "stored" and len(self.naive.ancestors(place)) == 1),
            (lambda place: self.book.restore(place, None), state == "free"),
        ]
        for verb, allowed in refused:
            if not allowed:
                try:
                    verb(place)
                except BookImbalance:
                    assert self.views() == before
                else:
                    raise AssertionError(f"{verb} accepted place {place}, which is {state}")

    def views(self) -> list[PlaceView]:
        return [self.book.view(place) for place in range(self.book.num_places)]

    @invariant()
    def both_books_agree(self) -> None:
        for place, view in enumerate(self.views()):
            held = self.naive.places.get(place)
            if held is None:
                assert view == FREE
            else:
                reused = place in self.naive.protected
                assert view == PlaceView(held.state, held.parent, len(self.naive.children(place)), held.pins, reused)  # type: ignore[arg-type]

    @invariant()
    def places_add_up_and_the_books_balance(self) -> None:
        counts = self.book.counts()
        assert counts.free + counts.reserved + counts.used == self.book.num_places
        assert counts.free == self.book.num_places - len(self.naive.places)
        assert counts.pinned == sum(held.pins > 0 for held in self.naive.places.values())
        self.book.check()

    @invariant()
    def a_stored_chain_has_no_gap_and_its_head_is_the_last_to_go(self) -> None:
        order = [*self.naive.probation, *self.naive.protected]
        for place in order:
            parent = self.book.view(place).parent
            if parent is not None:
                assert self.book.view(parent).state == "stored"
                assert order.index(parent) > order.index(place)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)

"""One load for many: who leads, who waits, who goes on alone, and that nobody waits long."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from xinference.model.llm.vllm.xavier.policy.leaders import PATIENCE_FLOOR_SECONDS, LoadBoard

NOW = 70_001.0
LATE = 2 * 10.0 + 0.001


def board_with_a_leader(followers_max: int = 8) -> LoadBoard:
    """ "first" loads key 1 and expects ten seconds."""
    board = LoadBoard(followers_max, patience_factor=2.0)
    board.lead(1, "first", 10.0, NOW)
    return board


def test_the_first_to_miss_a_block_leads_and_goes_on_leading() -> None:
    assert LoadBoard(8, 2.0).verdict(1, "first", NOW) == "lead"
    assert board_with_a_leader().verdict(1, "first", NOW + 1) == "lead"


def test_others_wait_for_the_same_block_and_not_for_another() -> None:
    board = board_with_a_leader()
    assert board.verdict(1, "second", NOW) == "wait"
    assert board.verdict(2, "third", NOW) == "lead"


def test_as_many_wait_as_may_and_the_rest_go_on_alone() -> None:
    board = board_with_a_leader(followers_max=2)
    assert [board.verdict(1, name, NOW) for name in "abcab"] == ["wait", "wait", "alone", "wait", "wait"]


def test_a_follower_that_left_makes_room() -> None:
    board = board_with_a_leader(followers_max=1)
    assert board.verdict(1, "a", NOW) == "wait"
    board.done("a")
    assert board.verdict(1, "b", NOW) == "wait"


def test_a_follower_that_waits_for_another_block_makes_room() -> None:
    board = board_with_a_leader(followers_max=1)
    board.lead(2, "other", 10.0, NOW)
    assert board.verdict(1, "a", NOW) == "wait"
    assert board.verdict(2, "a", NOW) == "wait"
    assert board.verdict(1, "b", NOW) == "wait"


def test_after_a_leader_is_done_the_next_asker_leads() -> None:
    board = board_with_a_leader()
    assert board.verdict(1, "second", NOW) == "wait"
    board.done("first")
    assert board.verdict(1, "second", NOW) == "lead"


def test_a_late_leader_is_replaced_and_its_end_does_not_end_its_successor() -> None:
    board = board_with_a_leader()
    assert board.verdict(1, "second", NOW + 20) == "wait"
    assert board.verdict(1, "third", NOW + LATE) == "lead"
    board.lead(1, "third", 10.0, NOW + LATE)
    board.done("first")
    assert board.verdict(1, "fourth", NOW + LATE) == "wait"


def test_a_follower_waits_no_longer_in_all_than_for_its_first_leader() -> None:
    board = board_with_a_leader()
    assert board.verdict(1, "second", NOW) == "wait"
    board.done("first")
    board.lead(1, "third", 10.0, NOW + 19)
    assert board.verdict(1, "second", NOW + 19) == "wait"
    assert board.verdict(1, "second", NOW + LATE) == "alone"
    assert board.verdict(1, "fourth", NOW + LATE) == "wait"


def test_patience_ends_at_the_same_time_however_often_one_asks() -> None:
    asked_once, asked_often = board_with_a_leader(), board_with_a_leader()
    asked_once.verdict(1, "second", NOW)
    for step in range(200):
        assert asked_often.verdict(1, "second", NOW + step / 10) == "wait"
    assert asked_once.verdict(1, "second", NOW + LATE) == asked_often.verdict(1, "second", NOW + LATE)


def test_a_follower_whose_patience_is_over_makes_room() -> None:
    board = board_with_a_leader(followers_max=1)
    assert board.verdict(1, "a", NOW) == "wait"
    board.done("first")
    board.lead(1, "third", 10.0, NOW + 19)
    assert board.verdict(1, "a", NOW + 19) == "wait"
    assert board.verdict(1, "b", NOW + LATE) == "alone"
    assert board.verdict(1, "a", NOW + LATE) == "alone"
    assert board.verdict(1, "b", NOW + LATE) == "wait"


def test_a_load_that_should_take_no_time_is_not_late_within_a_step() -> None:
    board = LoadBoard(8, 2.0)
    board.lead(1, "first", 0.0, NOW)
    assert board.verdict(1, "second", NOW + PATIENCE_FLOOR_SECONDS) == "wait"
    assert board.verdict(1, "third", NOW + PATIENCE_FLOOR_SECONDS + 0.001) == "lead"


def test_a_request_whose_wait_ended_may_wait_anew() -> None:
    board = board_with_a_leader()
    assert board.verdict(1, "second", NOW) == "wait"
    board.done("second")
    board.lead(1, "third", 10.0, NOW + LATE)
    assert board.verdict(1, "second", NOW + LATE) == "wait"


def test_done_with_an_unknown_request_is_nothing() -> None:
    board = board_with_a_leader()
    board.done("nobody")
    assert board.verdict(1, "second", NOW) == "wait"


class Crowd(RuleBasedStateMachine):
    """A few requests and blocks; whatever happens, few wait, and each at most as long as its first leader was given."""

    FOLLOWERS_MAX = 2

    def __init__(self) -> None:
        super().__init__()
        self.board = LoadBoard(self.FOLLOWERS_MAX, 2.0)
        self.now = NOW
        self.waiting_since: dict[str, float] = {}
        self.last: dict[str, tuple[int, str]] = {}
        self.leads: dict[str, int] = {}

    @rule(key=st.integers(1, 2), request=st.sampled_from("abcdef"), expected=st.floats(0, 5))
    def ask_and_do_as_told(self, key: int, request: str, expected: float) -> None:
        if self.leads.get(request, key) != key:  # a request that loads is asked about again only once its load has ended
            self.end(request)
        verdict = self.board.verdict(key, request, self.now)
        assert self.board.verdict(key, request, self.now) == verdict
        self.last[request] = (key, verdict)
        if verdict == "wait":
            since = self.waiting_since.setdefault(request, self.now)
            assert self.now - since <= 2 * 5.0
        if verdict == "lead":
            self.board.lead(key, request, expected, self.now)
            self.waiting_since.pop(request, None)
            self.leads[request] = key

    @rule(request=st.sampled_from("abcdef"))
    def end(self, request: str) -> None:
        self.board.done(request)
        self.leads.pop(request, None)
        self.last.pop(request, None)
        self.waiting_since.pop(request, None)

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def few_wait_for_one_block(self) -> None:
        for key in (1, 2):
            waiting = [name for name, told in self.last.items() if told == (key, "wait")]
            assert sum(self.board.verdict(key, name, self.now) == "wait" for name in waiting) <= self.FOLLOWERS_MAX


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=60, deadline=None)

"""The two tables of states."""

from itertools import product

import pytest

from xinference.core.states import (
    ENDED,
    HELD,
    MODEL_MOVES,
    REPLICA_MOVES,
    IllegalMove,
    ModelEvent,
    ModelState,
    ReplicaEvent,
    ReplicaState,
    model_event_for,
    next_model_state,
    next_replica_state,
)


def replica_walk(*events: ReplicaEvent) -> ReplicaState | IllegalMove:
    state: ReplicaState | IllegalMove = ReplicaState.CREATING
    for event in events:
        assert isinstance(state, ReplicaState)
        state = next_replica_state(state, event)
    return state


def test_a_replica_goes_from_creating_over_loading_to_ready() -> None:
    assert replica_walk(ReplicaEvent.CREATED, ReplicaEvent.BECAME_READY) is ReplicaState.READY


def test_a_failed_a_lost_and_a_stopped_replica_can_be_started_again() -> None:
    for end in (ReplicaEvent.FAIL, ReplicaEvent.WORKER_LOST, ReplicaEvent.STOP):
        assert replica_walk(ReplicaEvent.CREATED, end, ReplicaEvent.RELAUNCH) is ReplicaState.CREATING


def test_a_replica_that_is_gone_does_not_become_ready() -> None:
    late = replica_walk(ReplicaEvent.FAIL, ReplicaEvent.BECAME_READY)
    assert late == IllegalMove("failed", "became_ready")
    assert str(late) == "no move 'became_ready' from state 'failed'"


def test_a_loading_replica_cannot_be_drained() -> None:
    assert isinstance(replica_walk(ReplicaEvent.CREATED, ReplicaEvent.DRAIN), IllegalMove)


def test_every_pair_of_state_and_event_has_an_answer_that_is_a_value() -> None:
    for state, event in product(ReplicaState, ReplicaEvent):
        assert isinstance(next_replica_state(state, event), (ReplicaState, IllegalMove))
    for model_state, model_event in product(ModelState, ModelEvent):
        assert isinstance(next_model_state(model_state, model_event), (ModelState, IllegalMove))


def test_whatever_holds_something_can_fail_be_lost_and_be_stopped() -> None:
    for state in HELD:
        assert {ReplicaEvent.FAIL, ReplicaEvent.WORKER_LOST, ReplicaEvent.STOP} <= REPLICA_MOVES[state].keys()


def test_every_replica_state_has_an_exit_and_is_reached() -> None:
    reached = {target for moves in REPLICA_MOVES.values() for target in moves.values()}
    assert reached == set(ReplicaState)
    assert all(REPLICA_MOVES[state] for state in ReplicaState)


def test_every_model_state_but_the_last_can_be_terminated() -> None:
    for state in set(ModelState) - {ModelState.TERMINATED, ModelState.TERMINATING}:
        assert MODEL_MOVES[state][ModelEvent.TERMINATE] is ModelState.TERMINATING
    assert MODEL_MOVES[ModelState.TERMINATED] == {}
    assert ModelState.TERMINATED in ENDED


@pytest.mark.parametrize(
    ("state", "ready", "wanted", "event"),
    [
        (ModelState.READY, 2, 2, None),
        (ModelState.READY, 1, 2, ModelEvent.DEGRADE),
        (ModelState.READY, 0, 2, ModelEvent.LOSE_ALL),
        (ModelState.DEGRADED, 1, 2, None),
        (ModelState.DEGRADED, 2, 2, ModelEvent.RECOVER),
        (ModelState.UNAVAILABLE, 1, 2, ModelEvent.DEGRADE),
        (ModelState.UNAVAILABLE, 2, 2, ModelEvent.RECOVER),
        (ModelState.LAUNCHING, 0, 2, None),
        (ModelState.FAILED, 0, 2, None),
        (ModelState.TERMINATING, 0, 2, None),
    ],
)
def test_a_serving_models_state_follows_its_replicas(state: ModelState, ready: int, wanted: int, event: ModelEvent | None) -> None:
    assert model_event_for(state, ready, wanted) is event


@pytest.mark.parametrize("ready", [0, 1, 2])
@pytest.mark.parametrize("state", [ModelState.READY, ModelState.DEGRADED, ModelState.UNAVAILABLE])
def test_the_event_that_is_named_leads_to_a_state_that_needs_none(state: ModelState, ready: int) -> None:
    event = model_event_for(state, ready, 2)
    after = state if event is None else next_model_state(state, event)
    assert isinstance(after, ModelState)
    assert model_event_for(after, ready, 2) is None

"""What a model's cache status says of who reads from whom."""

from typing import Any

import pytest

from xinference.core.cache_service import attachment
from xinference.core.keeper import ReplicaKeeper
from xinference.core.orders import ReplicaReport
from xinference.core.placement import Placement
from xinference.core.relaunch import RelaunchLimits
from xinference.core.states import ReplicaState
from xinference.core.test.fakes import FakeWorkers, ManualClock


def keeper(state: ReplicaState) -> ReplicaKeeper:
    nobody: Any = None
    made = ReplicaKeeper(Placement("m-1", "w1"), nobody, FakeWorkers(), ManualClock(), RelaunchLimits())
    made.state, made.report = state, ReplicaReport("", "m-1", 7, state.value)
    return made


@pytest.mark.parametrize(
    ("state", "mapped", "attached", "reason"),
    [
        (ReplicaState.READY, frozenset({7}), True, None),
        (ReplicaState.DRAINING, frozenset({7}), True, None),
        (ReplicaState.READY, frozenset({6}), False, "not mapped; the replica's log says why"),
        (ReplicaState.LOADING, frozenset(), False, "loading"),
        (ReplicaState.READY, None, False, "it has no segment itself"),
        (ReplicaState.FAILED, None, False, "failed"),
    ],
)
def test_a_peer_is_attached_when_the_readers_segment_names_its_present_start(
    state: ReplicaState, mapped: frozenset[int] | None, attached: bool, reason: str | None
) -> None:
    assert attachment(keeper(state), mapped) == {"attached": attached, "reason": reason}

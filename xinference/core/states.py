"""What can become of a replica and of a model: two tables, and nothing else decides.

Replica
            created           became_ready           drain
  creating ─────────> loading ────────────> ready ─────────> draining
     ^                   │                    │                  │
     │                   └──── fail ──────────┴──────────────────┤  (from creating too)
     │                         worker_lost -> lost               v
     └───────────────────────── relaunch ──────────── failed, lost, stopped     stop: from everywhere -> stopped

Model
              launched             degrade             lose_all
  launching ──────────> ready ───────────────> degraded ──────────> unavailable
     │  │                 ^ <──── recover ──────┴──────────────────────┘
     │  ├ fail ──> failed         terminate: from everywhere but terminated -> terminating ─ terminated ─> terminated
     │  └ cancel > cancelled

An illegal move is an error value: a late report about a replica that is gone must not take the supervisor down.
"""

from dataclasses import dataclass
from enum import StrEnum


class ReplicaState(StrEnum):
    CREATING = "creating"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"


class ReplicaEvent(StrEnum):
    CREATED = "created"
    BECAME_READY = "became_ready"
    DRAIN = "drain"
    STOP = "stop"
    FAIL = "fail"
    WORKER_LOST = "worker_lost"
    RELAUNCH = "relaunch"


class ModelState(StrEnum):
    LAUNCHING = "launching"
    READY = "ready"
    DEGRADED = "degraded"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TERMINATING = "terminating"
    TERMINATED = "terminated"


class ModelEvent(StrEnum):
    LAUNCHED = "launched"
    FAIL = "fail"
    CANCEL = "cancel"
    DEGRADE = "degrade"
    LOSE_ALL = "lose_all"
    RECOVER = "recover"
    TERMINATE = "terminate"
    TERMINATED = "terminated"


@dataclass(frozen=True)
class IllegalMove:
    """The event does not exist in the state; nothing was changed."""

    state: str
    event: str

    def __str__(self) -> str:
        return f"no move '{self.event}' from state '{self.state}'"


_GONE = {ReplicaEvent.RELAUNCH: ReplicaState.CREATING, ReplicaEvent.STOP: ReplicaState.STOPPED}
_ENDS = {
    ReplicaEvent.STOP: ReplicaState.STOPPED,
    ReplicaEvent.FAIL: ReplicaState.FAILED,
    ReplicaEvent.WORKER_LOST: ReplicaState.LOST,
}
REPLICA_MOVES: dict[ReplicaState, dict[ReplicaEvent, ReplicaState]] = {
    ReplicaState.CREATING: {ReplicaEvent.CREATED: ReplicaState.LOADING, **_ENDS},
    ReplicaState.LOADING: {ReplicaEvent.BECAME_READY: ReplicaState.READY, **_ENDS},
    ReplicaState.READY: {ReplicaEvent.DRAIN: ReplicaState.DRAINING, **_ENDS},
    ReplicaState.DRAINING: dict(_ENDS),
    ReplicaState.STOPPED: dict(_GONE),
    ReplicaState.FAILED: dict(_GONE),
    ReplicaState.LOST: dict(_GONE),
}
# States in which a worker holds something for the replica, or may.
HELD = frozenset({ReplicaState.CREATING, ReplicaState.LOADING, ReplicaState.READY, ReplicaState.DRAINING})

_TERMINATE = {ModelEvent.TERMINATE: ModelState.TERMINATING}
MODEL_MOVES: dict[ModelState, dict[ModelEvent, ModelState]] = {
    ModelState.LAUNCHING: {
        ModelEvent.LAUNCHED: ModelState.READY,
        ModelEvent.FAIL: ModelState.FAILED,
        ModelEvent.CANCEL: ModelState.CANCELLED,
        **_TERMINATE,
    },
    ModelState.READY: {ModelEvent.DEGRADE: ModelState.DEGRADED, ModelEvent.LOSE_ALL: ModelState.UNAVAILABLE, **_TERMINATE},
    ModelState.DEGRADED: {ModelEvent.RECOVER: ModelState.READY, ModelEvent.LOSE_ALL: ModelState.UNAVAILABLE, **_TERMINATE},
    ModelState.UNAVAILABLE: {ModelEvent.RECOVER: ModelState.READY, ModelEvent.DEGRADE: ModelState.DEGRADED, **_TERMINATE},
    ModelState.FAILED: dict(_TERMINATE),
    ModelState.CANCELLED: dict(_TERMINATE),
    ModelState.TERMINATING: {ModelEvent.TERMINATED: ModelState.TERMINATED},
    ModelState.TERMINATED: {},
}
SERVING = frozenset({ModelState.READY, ModelState.DEGRADED, ModelState.UNAVAILABLE})
ENDED = frozenset({ModelState.FAILED, ModelState.CANCELLED, ModelState.TERMINATED})


def next_replica_state(state: ReplicaState, event: ReplicaEvent) -> ReplicaState | IllegalMove:
    return REPLICA_MOVES[state].get(event) or IllegalMove(state, event)


def next_model_state(state: ModelState, event: ModelEvent) -> ModelState | IllegalMove:
    return MODEL_MOVES[state].get(event) or IllegalMove(state, event)


def model_event_for(state: ModelState, num_ready: int, num_wanted: int) -> ModelEvent | None:
    """Which event brings a serving model's state in line with its replicas, or None if it is."""
    if state not in SERVING:
        return None
    if num_ready == 0:
        target, event = ModelState.UNAVAILABLE, ModelEvent.LOSE_ALL
    elif num_ready < num_wanted:
        target, event = ModelState.DEGRADED, ModelEvent.DEGRADE
    else:
        target, event = ModelState.READY, ModelEvent.RECOVER
    return None if state is target else event

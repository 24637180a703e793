"""What happened to a model, in order, with sequence numbers that a reader can resume from."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from xinference.core.changes import Changes

MAX_EVENTS = 1000  # per model; a reader that is further behind gets what is left


class Stage(StrEnum):
    """What an event is about. The last four end a launch or a model."""

    ACCEPTED = "accepted"
    INSPECTING = "inspecting"
    PLANNED = "planned"
    RESERVING = "reserving"
    CREATING = "creating"
    LOADING = "loading"
    REPLICA_READY = "replica_ready"
    REPLICA_FAILED = "replica_failed"
    REPLICA_LOST = "replica_lost"
    RELAUNCHING = "relaunching"
    DRAINING = "draining"
    REPLICA_STOPPED = "replica_stopped"
    SCALING = "scaling"
    STATE = "state"
    CACHE_CLEARED = "cache_cleared"
    ROLLING_BACK = "rolling_back"
    TERMINATING = "terminating"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TERMINATED = "terminated"


FINAL = frozenset({Stage.READY, Stage.FAILED, Stage.CANCELLED, Stage.TERMINATED})


@dataclass(frozen=True)
class Event:
    """One line of a model's history. ``time`` is unix seconds, ``progress`` of the launch is 0..1."""

    seq: int
    time: float
    stage: Stage
    replica_uid: str | None
    message: str
    state: str
    progress: float

    def to_wire(self) -> dict[str, Any]:
        return {
            "seq": self.seq,
            "time": self.time,
            "stage": self.stage.value,
            "replica_uid": self.replica_uid,
            "message": self.message,
            "state": self.state,
            "progress": self.progress,
        }


class EventLog:
    """A bounded history of one model that can be waited on."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._changes = Changes()
        self._last_seq = 0

    def add(self, stage: Stage, message: str, *, state: str, time: float, progress: float, replica_uid: str | None = None) -> Event:
        self._last_seq += 1
        event = Event(self._last_seq, time, stage, replica_uid, message, state, progress)
        self._events.append(event)
        self._changes.bump()
        return event

    def after(self, seq: int) -> list[Event]:
        """Events with a sequence number above ``seq``, oldest first."""
        return [event for event in self._events if event.seq > seq]

    async def wait_after(self, seq: int, wait_seconds: float) -> list[Event]:
        """The same, but waits up to ``wait_seconds`` for the first one; empty on timeout."""
        known = self._changes.version
        found = self.after(seq)
        if not found:
            await self._changes.wait_for_newer(known, wait_seconds)
            found = self.after(seq)
        return found

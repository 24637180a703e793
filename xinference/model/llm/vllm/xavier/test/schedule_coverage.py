"""Which events befell requests and loads in which state: a table in which no cell that can be filled may stay empty."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from xinference.model.llm.vllm.xavier.test.vllm_schedule import Replica

EVENTS = ("publish", "evict", "load", "failed load", "abort", "preempt", "clear", "crash", "restart")
STATES = (
    "waiting",  # in the queue, asked about or not
    "following",  # waits for another request's load
    "load queued",  # its blocks are allocated, the helper thread has not brought them
    "load ended",  # they are there, the scheduler has not heard so
    "load reported",  # it has, and has not gone on with the request
    "leaving",  # aborted while its load is under way
    "prefill",
    "decode",
    "preempted",
    "saving",  # blocks are on their way into places
    "in flight",  # a step was dispatched whose outcome is not reported
)
# Cells that cannot be filled, and why.
IMPOSSIBLE = {("abort", "leaving"): "it was aborted already: a second abort is not passed on"}
_ONE_IN_FLIGHT = "this scheduler is told one step's outcome before it schedules the next; both happen while it schedules"
IMPOSSIBLE_SYNCHRONOUS = {(event, "in flight"): _ONE_IN_FLIGHT for event in ("evict", "preempt")}
_COUNTERS = {
    "saves_blocks": "publish",
    "evictions": "evict",
    "loads_sync": "load",
    "loads_async": "load",
    "failed_loads": "failed load",
    "clears": "clear",
}
# What makes a schedule count.
REACHED = ("load", "publish", "preempt", "abort")


@dataclass
class Coverage:
    """Counts of (event, state)."""

    cells: Counter[tuple[str, str]] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    _preempted: set[int] = field(default_factory=set)
    _counters: dict[int, dict[str, int]] = field(default_factory=dict)

    def watch(self, replica: Replica) -> tuple[Replica, set[str]]:
        """A replica before something happens."""
        self._counters.setdefault(id(replica), _read(replica))
        return replica, set(states_of(replica))

    def note(self, replica: Replica, seen: tuple[Replica, set[str]]) -> None:
        """The replica afterwards. What happened in the middle of it and was noted then is not counted twice."""
        before, states = seen
        if before is not replica:  # died: noted by ``ended``
            return
        counts, self._counters[id(replica)] = self._counters[id(replica)], _read(replica)
        happened = {event for name, event in _COUNTERS.items() if replica.counter(name) > counts[name]}
        if id(replica) in self._preempted:
            happened.add("preempt")
            self._preempted.discard(id(replica))
        for event in happened:
            self._count(event, states)

    def preempted(self, replica: Replica, output: Any) -> None:
        """A step was scheduled."""
        if output.preempted_req_ids:
            self._preempted.add(id(replica))

    def aborted(self, replica: Replica, request_id: str) -> None:
        """A request is about to be aborted."""
        about = {"saving", "in flight"} & set(states_of(replica))
        self._count("abort", about | {state_of(replica, request_id)})

    def ended(self, replica: Replica, event: str) -> None:
        """A replica is about to end."""
        self._count(event, set(states_of(replica)))

    def merge(self, other: "Coverage") -> None:
        """Add another schedule's counts."""
        self.cells.update(other.cells)
        self.events.update(other.events)

    def counts(self) -> bool:
        """Whether the schedule reached what schedules are for."""
        return any(self.events[event] for event in REACHED)

    def empty(self, depth: int) -> list[tuple[str, str]]:
        """Cells that can be filled and are not."""
        impossible = IMPOSSIBLE if depth > 1 else IMPOSSIBLE | IMPOSSIBLE_SYNCHRONOUS
        return [(e, s) for e in EVENTS for s in STATES if not self.cells[e, s] and (e, s) not in impossible]

    def wrongly_impossible(self, depth: int) -> list[tuple[str, str]]:
        """Cells that are filled although they are listed as impossible."""
        impossible = IMPOSSIBLE if depth > 1 else IMPOSSIBLE | IMPOSSIBLE_SYNCHRONOUS
        return [cell for cell in impossible if self.cells[cell]]

    def table(self) -> str:
        """All cells, for people."""
        width = max(map(len, STATES)) + 1
        lines = [" " * 12 + "".join(state.rjust(width) for state in STATES)]
        lines += [event.ljust(12) + "".join(str(self.cells[event, state]).rjust(width) for state in STATES) for event in EVENTS]
        return "\n".join(lines)

    def _count(self, event: str, states: set[str]) -> None:
        self.events[event] += 1
        self.cells.update((event, state) for state in states)


def _read(replica: Replica) -> dict[str, int]:
    return {name: replica.counter(name) for name in _COUNTERS}


def states_of(replica: Replica) -> Iterator[str]:
    """The states of all that is under way in a replica."""
    for request_id in replica.scheduler.requests:
        yield state_of(replica, request_id)
    if replica.engine.state.open_saves:
        yield "saving"
    if replica.in_flight:
        yield "in flight"


def state_of(replica: Replica, request_id: str) -> str:
    """The state of a request."""
    scheduler = replica.scheduler
    request = scheduler.requests[request_id]
    if request.is_finished():
        return "leaving"
    status = request.status.name
    if status == "WAITING_FOR_REMOTE_KVS":
        if request_id in scheduler.finished_recving_kv_req_ids:
            return "load reported"
        job = replica.engine.state.open_loads.get(request_id)
        return "load queued" if job is not None and not job.done else "load ended"
    if status == "RUNNING":
        return "prefill" if request.num_computed_tokens < request.num_prompt_tokens else "decode"
    known = scheduler.connector._half._requests.get(request_id)
    if known is not None and known.waiting:
        return "following"
    return "preempted" if status == "PREEMPTED" else "waiting"

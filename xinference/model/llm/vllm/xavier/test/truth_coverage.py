"""Which event met which state: counted over all schedules, so that a table says what they have tried. No cell that can happen is empty."""

from collections import Counter
from collections.abc import Iterable

STATES = (
    "idle",
    "waiting",
    "following",
    "load_queued",
    "load_copying",
    "load_ended",
    "prefill",
    "decode",
    "preempted",
    "ending",
    "save_queued",
    "save_copying",
    "clear_pending",
    "frozen",
)

# What a schedule does, and what comes of it: the latter by the counter that says so.
EVENTS = (
    "add",
    "abort",
    "preempt",
    "clear",
    "crash",
    "crash_at_a_store",
    "stop",
    "restart",
    "no_room",
    "peer_added",
    "peer_removed",
    "freeze",
    "save_fails",
    "load_fails",
)
OUTCOMES = {
    "saves_blocks": "publish",
    "evictions": "evict",
    "loads_sync": "load_own",
    "loads_async": "load_beside",
    "failed_loads": "load_failed",
    "drops_capacity": "tier_full",
    "drops_source_reused": "source_reused",
    "drops_epoch": "drop_old",
    "drops_tainted": "drop_tainted",
    "peer_detached": "detached",
    "followers_gave_up": "gave_up",
}
ROWS = (*EVENTS, *OUTCOMES.values())
REACHED = frozenset({"publish", "load_own", "load_beside", "preempt", "abort"})


def _cells(events: str, states: str, reason: str) -> dict[tuple[str, str], str]:
    return {(event, state): reason for event in events.split() for state in states.split()}


# Cells that cannot happen -> why.
IMPOSSIBLE: dict[tuple[str, str], str] = {
    **_cells("abort", "idle", "an abort is of a request"),
    **_cells("abort", "ending", "a request that was aborted, and waits for the report of its load, is not aborted again"),
    **_cells(
        "preempt",
        "idle waiting following load_queued load_copying load_ended preempted ending",
        "only running requests are preempted, and here the state is that of the request",
    ),
    **_cells("stop", "load_copying save_copying", "a shutdown is between two steps, and lets a copy end first"),
    **_cells(
        "load_fails load_own load_beside load_failed", "idle", "a load is a request's, which keeps its blocks until the load is reported"
    ),
    **_cells("evict tier_full drop_tainted gave_up", "idle", "places are taken, saves dropped and waits ended in steps of requests"),
    **_cells("publish source_reused save_fails", "load_copying", "one thread copies: while it loads it saves nothing"),
    **_cells("publish source_reused", "save_copying", "what a copy brought is settled after it"),
    **_cells("detached", "load_copying save_copying", "the thread that copies is the one that looks at the control page"),
    **_cells("detached", "frozen", "a frozen thread does not look at the control page"),
}


# Cells that can happen, but not once in some two thousand schedules: only a run of COUNT_FOR_ALL must reach them.
RARE = frozenset(
    {
        ("no_room", "load_ended"),
        ("no_room", "save_copying"),
        ("freeze", "load_copying"),
        ("save_fails", "load_queued"),
        ("load_fails", "preempted"),
        ("load_own", "preempted"),
        ("load_beside", "load_copying"),
        ("load_beside", "save_copying"),
        ("source_reused", "load_queued"),
        ("drop_old", "load_copying"),
        ("drop_old", "save_copying"),
        ("drop_tainted", "preempted"),
        ("gave_up", "load_copying"),
        ("gave_up", "preempted"),
        ("gave_up", "ending"),
        ("gave_up", "save_copying"),
    }
)
COUNT_FOR_COVERAGE, COUNT_FOR_ALL = 10_000, 1_000_000


class Coverage:
    """Counts cells; and says whether a schedule reached anything."""

    def __init__(self) -> None:
        self.cells: Counter[tuple[str, str]] = Counter()
        self.reached = False

    def note(self, event: str, states: Iterable[str]) -> None:
        """An event happened in these states."""
        self.reached |= event in REACHED
        self.cells.update((event, state) for state in states)

    def empty(self, count: int = COUNT_FOR_ALL) -> list[tuple[str, str]]:
        """Cells that so many schedules should have reached, and did not."""
        if count < COUNT_FOR_COVERAGE:
            return []
        unneeded = IMPOSSIBLE.keys() | (RARE if count < COUNT_FOR_ALL else frozenset())
        return [(row, state) for row in ROWS for state in STATES if not self.cells[row, state] and (row, state) not in unneeded]

    def surprising(self) -> list[tuple[str, str]]:
        """Cells that happened although they cannot."""
        return [cell for cell in IMPOSSIBLE if self.cells[cell]]

    def table(self) -> str:
        """Events down, states across; ``-`` where it cannot happen."""
        width = max(len(row) for row in ROWS)
        lines = [" " * width + "".join(f"{state:>14}" for state in STATES)]
        for row in ROWS:
            cells = ("-" if (row, state) in IMPOSSIBLE else str(self.cells[row, state]) for state in STATES)
            lines.append(f"{row:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
        return "\n".join(lines)

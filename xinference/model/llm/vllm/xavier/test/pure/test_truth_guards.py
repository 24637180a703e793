"""Each guard, left out, is noticed by some schedule: by a drawn one among the first, or by one made for it where chance takes longer."""

import pytest

from xinference.model.llm.vllm.xavier.test.truth_coverage import Coverage
from xinference.model.llm.vllm.xavier.test.truth_events import Event, Pause
from xinference.model.llm.vllm.xavier.test.truth_guards import GUARDS, Guard, without
from xinference.model.llm.vllm.xavier.test.truth_runs import failure_of, quiet, run
from xinference.model.llm.vllm.xavier.test.truth_schedule import Schedule, draw
from xinference.model.llm.vllm.xavier.test.truth_world import Shape

QUICK_SCHEDULES = 150
A, B = 0, 1


def of(number: int) -> int:
    """What an ``add`` or a ``warm`` of this prompt is called (see ``prompt``), without a salt."""
    return next(what for what in range(number * 128, number * 128 + 128) if what % 7 and what % 13)


FOUR_BLOCKS, FIVE_BLOCKS = of(2 * 16), of(2 * 19)  # 17 tokens, and 20 of which these are the first
OTHERS = of(1 + 2 * 15), of(1 + 2 * 17), of(1 + 2 * 18 + 40 * 5)
UNTOLD = 4  # a restart of which the pages do not tell
SMALL, ROOMY = Shape(16, 4, 32), Shape(16, 12, 32)

# guard -> a schedule that needs it
WITNESSES = {
    # The owner overwrites its whole slab in the middle of a peer's copy.
    "peer_generation_after_copy": Schedule(
        0,
        (SMALL, ROOMY),
        (
            Event("warm", A, FOUR_BLOCKS),
            Event("add", B, FOUR_BLOCKS),
            Event("step", B, 0),
            Event("copy", B, 0, (Pause(0, tuple(Event("warm", A, other) for other in OTHERS)),)),
        ),
    ),
    # The copier hears of a clear between the answer and the allocation.
    "clear_waits_for_a_promise": Schedule(
        0,
        (ROOMY, ROOMY),
        (
            Event("warm", A, FOUR_BLOCKS),
            Event("add", A, FIVE_BLOCKS),
            Event("clear", A, 0),
            Event("step", A, 0, (Pause(1, (Event("poll", A, 0),)),)),
        ),
    ),
    # A new start of the owner while the page still names the old one, which a peer has mapped, or wants to map.
    "replaced_owner_is_let_go": Schedule(
        0,
        (ROOMY, ROOMY),
        (Event("warm", A, FOUR_BLOCKS), Event("crash", A, 1), Event("restart", A, UNTOLD), Event("poll", B, 0)),
    ),
    "incarnation_compare": Schedule(
        0,
        (ROOMY, ROOMY),
        (
            Event("warm", A, FOUR_BLOCKS),
            Event("crash", A, 1),
            *[Event("poll", B, 0)] * 2,
            Event("restart", A, UNTOLD),
            *[Event("poll", B, 0)] * 4,
        ),
    ),
    # The first block of a chain is torn in the file of a dead owner: what follows it has lost its parent.
    "orphans_are_withdrawn": Schedule(
        0,
        (ROOMY, ROOMY),
        (Event("warm", A, FOUR_BLOCKS), Event("crash", A, 1), Event("damage", A, 0), Event("restart", A, UNTOLD)),
    ),
    # A full tier, all of it about to be loaded, and another request of that step that wants a place: looked at before the load ends.
    "pinned_is_not_evicted": Schedule(
        0,
        (SMALL, ROOMY),
        (
            Event("warm", A, FOUR_BLOCKS),
            Event("add", A, FOUR_BLOCKS),
            Event("add", A, OTHERS[0]),
            Event("step", A, 0, tuple(Pause(stop, (Event("thaw", B, 0),)) for stop in range(8))),
        ),
    ),
    # A second request takes the blocks of a load within this step for the engine's own; the load fails.
    "nobody_builds_on_unwritten": Schedule(
        0,
        (ROOMY, ROOMY),
        (
            Event("warm", A, FOUR_BLOCKS),
            Event("load_fails", A, 0),
            Event("add", A, FOUR_BLOCKS),
            Event("add", A, FIVE_BLOCKS),
            Event("step", A, 0),
            Event("copy", A, 0),
        ),
    ),
}


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_that_is_left_out_is_noticed(guard: Guard) -> None:
    witness = WITNESSES.get(guard.name)
    schedules = [witness] if witness is not None else (draw(seed) for seed in range(QUICK_SCHEDULES))
    with without(guard), quiet() as directory:
        assert any(failure_of(schedule, directory) is not None for schedule in schedules)


@pytest.mark.parametrize("name", list(WITNESSES))
def test_with_its_guard_a_witness_ends_well(name: str) -> None:
    coverage = Coverage()
    with quiet() as directory:
        run(WITNESSES[name], coverage, directory)
    assert coverage.reached
    assert name in {guard.name for guard in GUARDS}

"""Schedules that once ended wrongly, as small as they became, and that the runner tells right from wrong."""

from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.test.truth_coverage import IMPOSSIBLE, ROWS, STATES, Coverage
from xinference.model.llm.vllm.xavier.test.truth_events import Event, Pause
from xinference.model.llm.vllm.xavier.test.truth_guards import GUARDS, without
from xinference.model.llm.vllm.xavier.test.truth_runs import Failure, failure_of, quiet, run, run_many, shrink
from xinference.model.llm.vllm.xavier.test.truth_schedule import Schedule, draw
from xinference.model.llm.vllm.xavier.test.truth_world import Shape

FINDINGS = {
    # The lost word was the generation, and withdrawing the record at adoption made it valid again, without a place in the book.
    "a record that lost its generation stays withdrawn when its file is adopted": Schedule(
        101000,
        (Shape(16, 2, 16), Shape(10, 20, 32)),
        (
            Event("warm", 0, 9141798 * 128),
            Event("warm", 0, 3813873 * 128),
            Event("crash", 0, 3811449),
            Event("damage", 0, 9320638),
            Event("restart", 0, 5080154),
        ),
    ),
}


@pytest.mark.parametrize("schedule", FINDINGS.values(), ids=list(FINDINGS))
def test_what_was_found_once_is_mended(tmp_path: Path, schedule: Schedule) -> None:
    run(schedule, Coverage(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_few_hundred_schedules_find_nothing() -> None:
    """Many more run in the suite of processes, where the table must have no hole."""
    coverage = Coverage()
    others = run_many(200, 1_000_000, coverage)
    assert others < 20
    assert coverage.surprising() == []
    assert sum(coverage.cells.values()) > 5000


def test_a_seed_means_the_same_schedule_every_time() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_a_schedule_runs_the_same_way_every_time() -> None:
    first, second = Coverage(), Coverage()
    with quiet() as directory:
        for seed in range(30):
            run(draw(seed), first, directory)
            run(draw(seed), second, directory)
            assert first.cells == second.cells, f"seed {seed}"


def test_a_failure_is_shrunk_to_what_matters_and_names_its_seed() -> None:
    guard = next(guard for guard in GUARDS if guard.name == "save_after_forward")
    with without(guard), pytest.raises(Failure) as caught:
        run_many(50, 0, Coverage())
    failure = caught.value
    assert len(failure.smallest.events) <= 4 < len(failure.schedule.events)
    assert f"--seed {failure.schedule.seed}" in str(failure)
    assert "holds other bytes than its key's" in str(failure)
    with quiet() as directory:
        assert failure_of(failure.smallest, directory) is None, "with the guard in place it passes"
        with pytest.raises(ValueError, match="does not fail"):
            shrink(failure.smallest, directory)


def test_events_within_events_are_shrunk_too() -> None:
    """A clear that another thread hears of in the middle of a step."""
    guard = next(guard for guard in GUARDS if guard.name == "load_of_older_epoch_fails")
    noise = (Event("tell", 1, 3), Event("add", 1, 77))
    with without(guard), quiet() as directory:
        seed = next(seed for seed in range(5000) if failure_of(draw(seed), directory) is not None)
        schedule = draw(seed)
        bloated = Schedule(seed, schedule.shapes, (*noise, *schedule.events, *noise))
        smallest = shrink(bloated, directory).smallest
    assert len(smallest.events) < len(schedule.events)
    assert any(isinstance(pause, Pause) for event in smallest.events for pause in event.pauses)


def test_every_impossible_cell_is_one_of_the_table_and_says_why() -> None:
    for (row, state), reason in IMPOSSIBLE.items():
        assert row in ROWS
        assert state in STATES
        assert len(reason) > 20


def test_a_hole_in_the_table_is_named() -> None:
    coverage = Coverage()
    possible = [(row, state) for row in ROWS for state in STATES if (row, state) not in IMPOSSIBLE]
    for row, state in possible[1:]:
        coverage.note(row, [state])
    assert coverage.empty() == possible[:1]
    impossible = next(iter(IMPOSSIBLE))
    coverage.note(impossible[0], [impossible[1]])
    assert coverage.surprising() == [impossible]

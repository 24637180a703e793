"""What random schedules have found, and whether their runner tells right from wrong."""

from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.directory.records import GENERATION
from xinference.model.llm.vllm.xavier.store.tier import CpuTier
from xinference.model.llm.vllm.xavier.test.segments import fill, key, open_segment
from xinference.model.llm.vllm.xavier.test.truth_coverage import COUNT_FOR_COVERAGE, IMPOSSIBLE, RARE, ROWS, STATES, Coverage
from xinference.model.llm.vllm.xavier.test.truth_events import Event, Pause
from xinference.model.llm.vllm.xavier.test.truth_guards import GUARDS, without
from xinference.model.llm.vllm.xavier.test.truth_runs import Failure, failure_of, quiet, run, run_many, shrink
from xinference.model.llm.vllm.xavier.test.truth_schedule import Schedule, draw


def test_a_record_that_lost_what_withdrawing_gives_back_is_not_found_after_an_adoption(tmp_path: Path) -> None:
    """Its generation is one too low: withdrawn once, it would be valid, and no book would know of it."""
    segment = open_segment(tmp_path)
    fill(segment, 0, key(0))
    fill(segment, 1, key(1), key(0))
    segment._table._records[GENERATION] -= 1
    segment.close()
    successor = open_segment(tmp_path, incarnation=8)
    tier = CpuTier.of(successor)
    assert successor.key_of(0) is None
    assert tier.used_blocks == 0, "the block after it has lost its parent"
    tier.check()


def test_some_schedules_find_nothing() -> None:
    """Many more run in the suite of processes, where the table must have no hole."""
    coverage = Coverage()
    others = run_many(60, 1_000_000, coverage)
    assert others < 10
    assert coverage.surprising() == []
    assert sum(coverage.cells.values()) > 1000


def test_a_seed_means_the_same_schedule_every_time() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_a_schedule_runs_the_same_way_every_time() -> None:
    first, second = Coverage(), Coverage()
    with quiet() as directory:
        for seed in range(15):
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
    assert not RARE & IMPOSSIBLE.keys()
    assert {row for row, _ in RARE} <= set(ROWS)


def test_a_hole_in_the_table_is_named() -> None:
    coverage = Coverage()
    possible = [(row, state) for row in ROWS for state in STATES if (row, state) not in IMPOSSIBLE]
    for row, state in possible[1:]:
        coverage.note(row, [state])
    assert coverage.empty() == possible[:1]
    assert coverage.empty(COUNT_FOR_COVERAGE) == [cell for cell in possible[:1] if cell not in RARE]
    assert coverage.empty(COUNT_FOR_COVERAGE - 1) == []
    impossible = next(iter(IMPOSSIBLE))
    coverage.note(impossible[0], [impossible[1]])
    assert coverage.surprising() == [impossible]

"""Random schedules on vLLM's real schedulers. By command, with other seeds and longer: ``make test-schedules``."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.test.schedule_world import World
from xinference.model.llm.vllm.xavier.test.schedules import ENVIRONMENT, Schedules, by_hand

COUNT = 500
TIMEOUT_SECONDS = 900  # an idle machine with two cores takes a tenth of it


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "shm"
    path.mkdir()
    return path


@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_no_schedule_gives_a_wrong_token_or_upsets_a_book_and_everything_befell_everything(depth: int, shm: Path, tiny_model: Path) -> None:
    with by_hand() as clock:
        schedules = Schedules(shm, tiny_model, depth, clock)
        for seed in range(2 * COUNT):
            if schedules.num_counted == COUNT:
                break
            failure = schedules.run(seed)
            assert failure is None, str(failure)
    print(schedules.coverage.table())
    assert schedules.num_counted == COUNT
    assert schedules.coverage.empty(depth) == []
    assert schedules.coverage.wrongly_impossible(depth) == []


def test_a_schedule_that_fails_is_cut_down_to_what_it_takes(shm: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(world: World, index: int, number: int) -> None:
        assert not world.reached["finished"], "broken on purpose"

    monkeypatch.setattr(World, "_on_clear", broken)
    with by_hand() as clock:
        schedules = Schedules(shm, tiny_model, 1, clock)
        failures = (schedules.run(seed) for seed in range(200))
        failure = next(failure for failure in failures if failure is not None)
    kinds = [event.kind for event in failure.events]
    assert kinds[-1] == "clear"
    assert kinds.count("clear") == 1
    assert len(kinds) <= 6
    assert f"--depth 1 --seed {failure.seed} --count 1" in str(failure)


def test_schedules_find_reads_that_are_not_looked_over_after_the_copy(
    depth: int, shm: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentReader, "still", lambda self, place, generation: True)
    with by_hand() as clock:
        schedules = Schedules(shm, tiny_model, depth, clock)
        failures = (schedules.run(seed) for seed in range(COUNT))
        failure = next(failure for failure in failures if failure is not None)
    assert type(failure.error).__name__ in ("WrongBytes", "WrongToken")

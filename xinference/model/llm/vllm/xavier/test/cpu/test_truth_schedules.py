"""Ten thousand random schedules against the model of the truth, without a hole in the table of what they tried."""

import pytest

from xinference.model.llm.vllm.xavier.test.truth_coverage import COUNT_FOR_COVERAGE, Coverage
from xinference.model.llm.vllm.xavier.test.truth_runs import run_many


@pytest.mark.timeout(1200)
def test_no_random_schedule_contradicts_the_model_and_every_event_meets_every_state(capsys: pytest.CaptureFixture[str]) -> None:
    coverage = Coverage()
    run_many(COUNT_FOR_COVERAGE, 0, coverage)
    with capsys.disabled():
        print(f"\n{coverage.table()}")
    assert coverage.empty(COUNT_FOR_COVERAGE) == []
    assert coverage.surprising() == []

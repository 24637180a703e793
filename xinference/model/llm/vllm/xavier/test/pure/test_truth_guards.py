"""Each guard, left out, is noticed by some schedule. The suite of processes looks as far as it must; here from where it was found last."""

import pytest

from xinference.model.llm.vllm.xavier.test.truth_guards import GUARDS, Guard, without
from xinference.model.llm.vllm.xavier.test.truth_runs import failure_of, quiet
from xinference.model.llm.vllm.xavier.test.truth_schedule import draw

QUICK_SCHEDULES = 130


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_that_is_left_out_is_noticed(guard: Guard) -> None:
    seeds = [*guard.found_by, *range(QUICK_SCHEDULES)]
    with without(guard), quiet() as directory:
        assert any(failure_of(draw(seed), directory) is not None for seed in seeds)

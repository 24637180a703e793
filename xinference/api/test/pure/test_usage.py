"""The usage figure is that of the accounting, when there is one."""

from typing import Any

import pytest

from xinference.api.usage import Figure, correct, debug_object, time_to_first_token

USAGE = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105, "prompt_tokens_details": {"cached_tokens": 96, "other": 1}}
SOURCES = {"local": 16, "peer_gpu": 0, "gpu_tier": 0, "cpu_tier": 32, "peer_cpu": 0, "remote": 0, "handed_over": 0, "computed": 52}
RECORD = {"prompt_tokens": 100, "sources": SOURCES, "cached_tokens": 48, "recomputed_tokens": 7}


def test_the_record_wins_over_the_engine() -> None:
    found = correct(USAGE, RECORD, expected=True)
    assert found.usage == {**USAGE, "prompt_tokens_details": {"cached_tokens": 48, "other": 1}}
    assert (found.figure, found.record) == (Figure.RECORD, RECORD)


def test_without_a_record_the_engines_figure_stands_and_the_lack_is_told() -> None:
    found = correct(USAGE, None, expected=True)
    assert found.usage == USAGE
    assert found.figure is Figure.MISSING


def test_a_model_that_does_not_share_has_the_engines_figure() -> None:
    assert correct(USAGE, None, expected=False).figure is Figure.ENGINE


def test_a_record_of_another_length_is_not_believed() -> None:
    found = correct(USAGE, {**RECORD, "prompt_tokens": 50}, expected=True)
    assert found.usage["prompt_tokens_details"]["cached_tokens"] == 96
    assert (found.figure, found.record) == (Figure.MISMATCH, None)


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}])
def test_cached_tokens_is_always_a_number(details: Any) -> None:
    found = correct({"prompt_tokens": 3, "prompt_tokens_details": details}, None, expected=False)
    assert found.usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_usage_given_is_not_changed() -> None:
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 1}}
    correct(usage, RECORD, expected=True)
    assert usage == {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 1}}


def test_the_debug_object_tells_the_replica_and_the_sources() -> None:
    assert debug_object("m-0", RECORD, 0.01234) == {"replica": "m-0", "sources": SOURCES, "recomputed_tokens": 7, "ttft_ms": 12.34}


def test_the_time_to_the_first_token_is_that_of_the_record() -> None:
    assert time_to_first_token({**RECORD, "times": {"queued": 10.0, "first_token": 10.25}}, 3.0) == 0.25


@pytest.mark.parametrize(
    "times", [{}, {"queued": None, "first_token": 1.0}, {"queued": 2.0, "first_token": None}, {"queued": 2.0, "first_token": 1.0}]
)
def test_without_both_times_the_measured_one_stands(times: Any) -> None:
    assert time_to_first_token({**RECORD, "times": times}, 3.0) == 3.0
    assert time_to_first_token(None, 3.0) == 3.0
    assert time_to_first_token(None, None) is None


def test_the_debug_object_invents_nothing() -> None:
    assert debug_object("m-0", None, None) == {"replica": "m-0", "sources": None, "recomputed_tokens": None, "ttft_ms": None}

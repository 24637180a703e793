from array import array

import pytest

from xinference.model.llm.vllm.xavier.directory.counters import COUNTERS, HISTOGRAMS, LATENCY_BOUNDS, Counters, latency_bucket
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES


def test_counters_start_at_zero_and_add_up_by_name() -> None:
    counters = Counters(memoryview(array("Q", bytes(4096))))
    counters.add("evictions")
    counters.add("evictions", 41)
    counters.add("load_bytes", 1 << 40)
    assert counters.value("evictions") == 42
    assert {name: value for name, value in counters.items() if value} == {"evictions": 42, "load_bytes": 1 << 40}
    assert len(dict(counters.items())) == len(COUNTERS)


def test_an_unknown_counter_is_an_error_and_not_a_new_counter() -> None:
    with pytest.raises(KeyError):
        Counters(memoryview(array("Q", bytes(4096)))).add("misspelt")


def test_a_counter_wraps_instead_of_raising_in_a_hook() -> None:
    counters = Counters(memoryview(array("Q", bytes(4096))))
    counters.add("steps", (1 << 64) - 1)
    counters.add("steps", 2)
    assert counters.value("steps") == 1


def test_every_source_has_a_counter_and_every_counter_says_what_one_unit_is() -> None:
    names = [spec.name for spec in COUNTERS]
    assert [name for name in names if name.startswith("prompt_tokens_")] == [f"prompt_tokens_{source}" for source in SOURCES]
    assert all(len(spec.help) > 10 and spec.metric for spec in COUNTERS)
    assert len({(spec.metric, spec.labels) for spec in COUNTERS}) == len(COUNTERS)


def test_a_latency_falls_into_the_lowest_bucket_that_holds_it() -> None:
    assert latency_bucket("load", 0.0) == latency_bucket("load", 0.001) == "load_seconds_le_0_001"
    assert latency_bucket("load", 0.0011) == "load_seconds_le_0_0025"
    assert latency_bucket("save", LATENCY_BOUNDS[-1] + 1) == "save_seconds_le_inf"


def test_every_latency_has_a_counter_and_every_histogram_a_sum() -> None:
    names = {spec.name for spec in COUNTERS}
    assert {latency_bucket(kind, bound * 1.1) for kind in ("load", "save") for bound in (0.0, *LATENCY_BOUNDS)} <= names
    assert set(HISTOGRAMS.values()) <= names

from array import array

import pytest

from xinference.model.llm.vllm.xavier.directory.counters import COUNTERS, Counters
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

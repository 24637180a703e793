"""Guards of a namespace's fields that nothing else here would miss."""

from dataclasses import replace

import pytest

from xinference.model.llm.vllm.xavier.connector import identity
from xinference.model.llm.vllm.xavier.connector.facts import EngineFacts
from xinference.model.llm.vllm.xavier.test.pure.test_connector_facts import CONFIG, FACTS, GROUP


def digest(facts: EngineFacts) -> str:
    return identity.namespace_of(facts, CONFIG, "layout", "root").digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": (replace(GROUP, kind="OtherSpec"),)},
        {"groups": (replace(GROUP, block_size=64),)},
        {"groups": (replace(GROUP, page_bytes=8192),)},
        {"groups": (replace(GROUP, layer_names=("layer.1", "layer.0")),)},
        {"groups": (replace(GROUP, details=()),)},
        {"parallel_sizes": (("tensor_parallel_size", 2), ("pipeline_parallel_size", 1))},
        {"parallel_sizes": (("tensor_parallel_size", 1), ("pipeline_parallel_size", 2))},
        {"hash_block_size": 64},
    ],
)
def test_engines_that_differ_share_nothing_also_where_one_of_them_would_be_refused(changes: dict[str, object]) -> None:
    assert digest(replace(FACTS, **changes)) != digest(FACTS)  # type: ignore[arg-type]


def test_another_python_is_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(FACTS)
    monkeypatch.setattr(identity.platform, "python_version_tuple", lambda: ("3", "99", "0"))
    assert digest(FACTS) != before

"""What the API is told of a model."""

from typing import Any

import pytest

from xinference.core.deployment import Deployment
from xinference.core.plan import plan_launch
from xinference.core.spec import parse_spec
from xinference.core.test.fakes import model, snapshot


def table(**fields: Any) -> dict[str, Any]:
    spec = parse_spec({"model_path": "/m", **fields})
    plan = plan_launch(spec, "m", model(), snapshot())
    found: dict[str, Any] = Deployment("m", spec, model(), plan, 0.0).table()["model"]
    return found


@pytest.mark.parametrize(
    ("fields", "fatal"),
    [
        ({}, True),
        ({"engine_config": {"enable_chunked_prefill": True}}, True),
        ({"engine_config": {"enable_chunked_prefill": False}}, False),
        ({"replica": 2, "replica_config": [{"engine_config": {"enable_chunked_prefill": False}}, {}]}, True),
        ({"model_engine": "fake"}, False),
    ],
)
def test_a_seed_is_fatal_to_an_engine_on_a_cpu_that_computes_prompts_in_parts(fields: dict[str, Any], fatal: bool) -> None:
    assert table(**fields)["seed_is_fatal"] is fatal

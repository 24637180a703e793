"""Replicas on vLLM's real schedulers, for the tests of this layer that need them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xinference.model.llm.vllm.xavier.policy.rates import MeasuredRates
from xinference.model.llm.vllm.xavier.transfer.copier import Copier


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Any model; only its configuration is read."""
    pytest.importorskip("vllm")
    from xinference.model.llm.random_model import make_random_model

    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(params=[1, 2], ids=["synchronous", "asynchronous"])
def depth(request: pytest.FixtureRequest) -> int:
    """Steps in flight: vLLM's Scheduler, and its AsyncScheduler."""
    return int(request.param)


@pytest.fixture
def make(depth: int, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes replicas whose copier runs when the test says so."""
    from xinference.model.llm.vllm.xavier.test.vllm_schedule import Replica

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(Copier, "start", lambda self: None)
    # A scripted forward pass may be faster than a load. What is measured here must not decide what is loaded.
    monkeypatch.setattr(MeasuredRates, "observe_prefill", lambda self, num_tokens, seconds: None)
    monkeypatch.setattr(MeasuredRates, "observe_copy", lambda self, num_bytes, seconds: None)
    made: list[Replica] = []

    def one(uid: str, **kinds: Any) -> Replica:
        made.append(Replica(tmp_path, uid, tiny_model, depth=depth, **kinds))
        return made[-1]

    yield one
    for replica in made:
        replica.close()

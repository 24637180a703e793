"""A clear of a model's shared cache and its records, over replicas that answer, are slow, or do not answer at all."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from xinference.core.cache_service import CacheService
from xinference.core.errors import Unreachable
from xinference.core.states import HELD, ReplicaState
from xinference.errors import InvalidRequest
from xinference.model.llm.vllm.xavier.directory.counters import COUNTERS
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES

GONE = Unreachable("it does not answer")


@dataclass
class World:
    """A model with replicas, and what each of them answers: a value, or an error to raise."""

    answers: dict[str, dict[str, Any]]
    enable_xavier: bool = True
    states: dict[str, ReplicaState] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    bumps: int = 0
    deaf_workers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keepers = {
            uid: SimpleNamespace(uid=uid, state=self.states.get(uid, ReplicaState.READY), report=uid, incarnation=1) for uid in self.answers
        }
        self.deployment = SimpleNamespace(
            keepers=keepers,
            epoch=4,
            spec=SimpleNamespace(enable_xavier=self.enable_xavier),
            plan=SimpleNamespace(cache=None),
            record=lambda *arguments: None,
        )
        state = SimpleNamespace(
            deployment=lambda uid: self.deployment,
            deployments={"m": self.deployment},
            replica=lambda model, uid: keepers[uid],
            controls=SimpleNamespace(bump=self._bump),
            controls_by_worker=lambda: {"w1": [self.deployment.epoch], "w2": [self.deployment.epoch]},
            clock=SimpleNamespace(wall=lambda: 0.0),
        )
        self.service = CacheService(state, self)  # type: ignore[arg-type]

    def _bump(self) -> None:
        self.bumps += 1

    async def ask(self, report: str, verb: str, *arguments: object, wait_seconds: float = 0.0) -> Any:
        answer = self.answers[report].get(verb, GONE)
        if isinstance(answer, list) and verb == "cache_report":
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def apply_controls(self, worker_id: str, controls: list[int]) -> None:
        if worker_id in self.deaf_workers:
            raise GONE
        self.told.append(f"{worker_id}: epoch {controls[0]}")


def report(used_bytes: int) -> dict[str, Any]:
    tier = dict.fromkeys(("budget_bytes", "file_bytes", "book_bytes", "blocks", "capacity_blocks"), 0)
    return {
        "namespace": "n",
        "epoch_confirmed": 4,
        "attached": [],
        "tiers": {"cpu": {**tier, "used_bytes": used_bytes}},
        "sources": dict.fromkeys(SOURCES, 0),
        "counters": {spec.name: 0 for spec in COUNTERS},
    }


def record(queued: float) -> dict[str, Any]:
    return {"times": {"queued": queued}}


def clear(world: World) -> dict[str, Any]:
    return asyncio.run(world.service.clear("m"))


def test_a_clear_starts_an_epoch_tells_every_worker_and_says_what_it_freed() -> None:
    world = World({"a": {"cache_report": [report(900), report(100)], "epoch_confirmed": True}})
    assert clear(world) == {"status": "cleared", "epoch": 5, "pending": [], "bytes_freed": 800}
    assert world.told == ["w1: epoch 5", "w2: epoch 5"]
    assert world.bumps == 1


def test_a_clear_that_a_replica_has_not_confirmed_is_pending() -> None:
    world = World({"a": {"epoch_confirmed": True}, "slow": {"epoch_confirmed": False}, "gone": {}})
    outcome = clear(world)
    assert (outcome["status"], outcome["pending"]) == ("pending", ["slow", "gone"])


def test_replicas_that_do_not_run_are_not_waited_for() -> None:
    stopped = next(state for state in ReplicaState if state not in HELD)
    world = World({"a": {"epoch_confirmed": True}, "b": {}}, states={"b": stopped})
    assert clear(world)["status"] == "cleared"


def test_a_worker_that_does_not_answer_does_not_end_a_clear() -> None:
    world = World({"a": {"epoch_confirmed": True}}, deaf_workers=("w1",))
    assert clear(world)["status"] == "cleared"
    assert world.told == ["w2: epoch 5"]


def test_a_cache_that_filled_meanwhile_freed_nothing_rather_than_less() -> None:
    world = World({"a": {"cache_report": [report(100), report(900)], "epoch_confirmed": True}})
    assert clear(world)["bytes_freed"] == 0


def test_a_model_without_a_shared_cache_is_told_so() -> None:
    with pytest.raises(InvalidRequest, match="without Xavier"):
        clear(World({"a": {}}, enable_xavier=False))


def test_a_replica_that_does_not_answer_has_neither_report_nor_records() -> None:
    world = World({"gone": {}})
    status = asyncio.run(world.service.status("m"))
    assert status["replicas"][0]["tiers"] == {}
    assert asyncio.run(world.service.record("m", "gone", "0" * 32, 0.1)) is None
    assert asyncio.run(world.service.recent("m", 5)) == []


def test_the_newest_records_are_given_as_many_as_were_asked_for() -> None:
    world = World({"a": {"recent_requests": [record(3.0), record(1.0)]}, "b": {"recent_requests": [record(4.0), record(2.0)]}})
    found = asyncio.run(world.service.recent(None, 3))
    assert [entry["times"]["queued"] for entry in found] == [4.0, 3.0, 2.0]


def test_models_without_a_shared_cache_are_not_asked_for_records() -> None:
    world = World({"a": {"recent_requests": [record(3.0)]}}, enable_xavier=False)
    assert asyncio.run(world.service.recent("m", 3)) == []

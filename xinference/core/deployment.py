"""One launched model: its spec and plan, its replicas, its history. Plain values and the decisions over them; starts nothing itself."""

from dataclasses import dataclass, field
from typing import Any

from xinference.core.events import EventLog, Stage
from xinference.core.keeper import ReplicaKeeper
from xinference.core.plan import LaunchPlan
from xinference.core.spec import LaunchSpec
from xinference.core.states import IllegalMove, ModelEvent, ModelState, ReplicaState, model_event_for, next_model_state
from xinference.core.topology import ModelFacts

FINAL_STAGE = {
    ModelState.FAILED: Stage.FAILED,
    ModelState.CANCELLED: Stage.CANCELLED,
    ModelState.TERMINATED: Stage.TERMINATED,
    ModelState.TERMINATING: Stage.TERMINATING,
}
# Share of a launch's progress that a replica has made.
PROGRESS = {ReplicaState.CREATING: 0.1, ReplicaState.LOADING: 0.4, ReplicaState.READY: 1.0}


@dataclass
class Deployment:
    """A model. ``epoch`` is the clear epoch of its cache; ``created`` is unix seconds."""

    model_uid: str
    spec: LaunchSpec
    facts: ModelFacts
    plan: LaunchPlan
    created: float
    state: ModelState = ModelState.LAUNCHING
    cause: str | None = None
    epoch: int = 1
    events: EventLog = field(default_factory=EventLog)
    keepers: dict[str, ReplicaKeeper] = field(default_factory=dict)
    log_tails: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def record(self, stage: Stage, message: str, now: float, replica_uid: str | None = None) -> None:
        self.events.add(stage, message, state=self.state.value, time=now, progress=self.progress(), replica_uid=replica_uid)

    def move(self, event: ModelEvent, now: float, cause: str | None = None) -> bool:
        """Change state; an event that does not fit changes nothing and gives False."""
        after = next_model_state(self.state, event)
        if isinstance(after, IllegalMove):
            return False
        before, self.state = self.state, after
        if cause is not None:
            self.cause = cause
        elif after is ModelState.READY:
            self.cause = None
        if after is ModelState.READY and before is ModelState.LAUNCHING:
            self.record(Stage.READY, f"{self.num_ready} replicas serve", now)
        else:
            self.record(FINAL_STAGE.get(after, Stage.STATE), cause or f"{before.value} -> {after.value}", now)
        return True

    def follow_replicas(self, now: float) -> None:
        """Bring a serving model's state in line with its replicas."""
        event = model_event_for(self.state, self.num_ready, len(self.keepers))
        if event is not None:
            self.move(event, now)

    @property
    def num_ready(self) -> int:
        return sum(keeper.state is ReplicaState.READY for keeper in self.keepers.values())

    def progress(self) -> float:
        if self.state not in (ModelState.LAUNCHING,) or not self.keepers:
            return 1.0 if self.state is not ModelState.LAUNCHING else 0.0
        return sum(PROGRESS.get(keeper.state, 0.0) for keeper in self.keepers.values()) / len(self.keepers)

    def to_wire(self) -> dict[str, Any]:
        """The model object of the REST API, without its details."""
        return {
            "id": self.model_uid,
            "object": "model",
            "created": int(self.created),
            "owned_by": "xinference",
            "max_model_len": self.plan.max_model_len,
            "state": self.state.value,
            "replica": len(self.keepers) or self.spec.replica,
            "xavier": self.spec.enable_xavier,
            "model_name": self.spec.model_name or self.model_uid,
        }

    def table(self) -> dict[str, Any]:
        """What the API needs in order to route."""
        replicas = [
            {
                "replica_uid": keeper.uid,
                "state": keeper.state.value,
                "endpoint": {"uds": keeper.report.uds},
                "incarnation": f"{keeper.incarnation:016x}",
            }
            for keeper in self.keepers.values()
            if keeper.state in (ReplicaState.READY, ReplicaState.DRAINING) and keeper.report.uds is not None
        ]
        details = {"cause": self.cause, "sharing": self.spec.enable_xavier, "seed_is_fatal": self._seed_is_fatal()}
        return {"model": {**self.to_wire(), **details}, "replicas": replicas}

    def _seed_is_fatal(self) -> bool:
        """Whether a request with a seed of its own can kill an engine.

        vLLM rewinds a request's random generator after each part of a chunked prefill, which generators on a CPU cannot do.
        """
        on_cpu = self.plan.kv_cache_bytes is not None
        configs = [self.spec.engine_config_of(index) for index in range(self.spec.replica)]
        return on_cpu and not all(config.get("enable_chunked_prefill") is False for config in configs)


def replica_wire(keeper: ReplicaKeeper, load: tuple[int, int] | None) -> dict[str, Any]:
    """The replica object of the REST API. ``load`` is (running, waiting), None where there is no engine to ask."""
    running, waiting = load or (0, 0)
    return {
        "replica_uid": keeper.uid,
        "state": keeper.state.value,
        "cause": keeper.cause,
        "worker_id": keeper.placement.worker_id,
        "devices": list(keeper.placement.devices),
        "address": keeper.report.uds,
        "incarnation": f"{keeper.incarnation:016x}",
        "pid": keeper.report.pid,
        "restarts": keeper.restarts,
        "since": keeper.since,
        "running": running,
        "waiting": waiting,
    }

"""Tables from the code: counters, metrics, limits, settings, states, errors."""

import importlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

from fastapi.routing import APIRoute
from pydantic_settings import BaseSettings
from rst import code, table, text

import xinference.api.errors
import xinference.client.errors
import xinference.deploy.background
import xinference.deploy.demo
import xinference.errors
from xinference.api.app import create_app
from xinference.api.auth import ADMIN, scopes_for
from xinference.api.keys import KeyRing
from xinference.api.metrics_page import cache_families
from xinference.core.events import FINAL, Stage
from xinference.core.states import MODEL_MOVES, REPLICA_MOVES
from xinference.errors import XinferenceError
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.directory.counters import COUNTERS, HISTOGRAMS
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES
from xinference.settings import Limits, Settings

XAVIER: Final = "xinference.model.llm.vllm.xavier"
_ERROR_MODULES: Final = (
    xinference.errors,
    xinference.api.errors,
    xinference.client.errors,
    xinference.deploy.background,
    xinference.deploy.demo,
)
_TIER_FIELDS: Final = ("budget_bytes", "file_bytes", "book_bytes", "used_bytes", "blocks", "capacity_blocks")
_SOURCE_TEXT: Final = {
    "local": "the engine's own prefix cache (vLLM's)",
    "peer_gpu": "a peer's engine memory; not in this version",
    "gpu_tier": "the GPU tier; not in this version",
    "cpu_tier": "the replica's own CPU tier",
    "peer_cpu": "the CPU tier of another replica on this host",
    "remote": "another host; not in this version",
    "handed_over": "a prefill replica; not in this version",
    "computed": "nowhere: computed for this request",
}
# Bounds that are no settings: module, name, what is bounded.
_BOUNDS: Final = (
    (f"{XAVIER}.config", "FILLING_MAX_BLOCKS", "blocks on their way into a replica's CPU tier at once"),
    (f"{XAVIER}.config", "LOCK_WAIT_SECONDS", "how long a relaunched replica waits for its predecessor's lock"),
    (f"{XAVIER}.config", "CONTROL_LOCK_WAIT_SECONDS", "the same for a control page"),
    (f"{XAVIER}.config", "STALE_AGE_SECONDS", "age from which a file without an owner is reported as left behind"),
    (f"{XAVIER}.connector.engine", "DRAIN_SECONDS", "how long a shutdown waits for saves that are under way"),
    (f"{XAVIER}.connector.lookup", "MAX_RUNS", "runs of blocks, each in another slab, that one load may consist of"),
    (f"{XAVIER}.directory.control", "CONTROL_BYTES", "bytes of a control page"),
    (f"{XAVIER}.policy.leaders", "PATIENCE_FLOOR_SECONDS", "a load is not late before this"),
    (f"{XAVIER}.policy.placement", "EVICTION_SCAN_PLACES", "places that a reservation may pass over before it is refused"),
    (f"{XAVIER}.policy.recency", "PROTECTED_SHARE", "share of the places that is kept for content asked for again"),
    (f"{XAVIER}.policy.admission", "DOORKEEPER_TAGS_PER_PLACE", "keys remembered as asked for, for each place"),
    ("xinference.core.cache_service", "CONFIRM_SECONDS", "how long a clear waits for the engines before it answers ``pending``"),
    ("xinference.core.plan", "DEFAULT_CACHE_SHARE", "a launch's default CPU caches together: share of free memory"),
    ("xinference.core.spec", "MAX_REPLICAS", "replicas of one model"),
)  # fmt: skip


def counters() -> str:
    """Each counter of a segment: its name, its metric, what one unit is."""
    plain, buckets = _counter_metrics()
    in_order = [*(spec.name for spec in COUNTERS if spec.metric not in HISTOGRAMS), *_bucket_names()]
    metric_by_counter = dict(zip(in_order, [*plain, *buckets], strict=True))
    rows = ((code(spec.name), code(metric_by_counter[spec.name]), text(spec.help)) for spec in COUNTERS)
    return table(("counter", "metric", "one unit is"), rows, (22, 38, 40))


def gauges() -> str:
    """The metrics of a cache that are no counters."""
    seen: dict[str, tuple[str, str, str]] = {}
    for family in cache_families("M", _status()):
        if family.kind == "gauge":
            labels = ", ".join(code(label) for label in family.labels)
            seen.setdefault(family.name, (code(family.name), labels, text(family.help)))
    return table(("metric", "labels", "what it is"), seen.values(), (36, 28, 36))


def _bucket_names() -> list[str]:
    """The counters that are buckets of histograms, in the order of the metrics page."""
    return [spec.name for metric in HISTOGRAMS for spec in COUNTERS if spec.metric == metric]


def _counter_metrics() -> tuple[list[str], list[str]]:
    """The metrics of plain counters and of buckets, with the labels that tell each from its siblings."""
    plain: list[str] = []
    buckets: list[str] = []
    for family in cache_families("M", _status()):
        if family.kind == "counter" or family.suffix == "_bucket":
            own = ",".join(f'{name}="{value}"' for name, value in family.labels.items() if name not in ("model", "replica"))
            name = family.name + family.suffix
            (plain if family.kind == "counter" else buckets).append(f"{name}{{{own}}}" if own else name)
    return plain, buckets


def _status() -> dict[str, Any]:
    """What the supervisor says of a cache, with every field that the metrics page looks at."""
    tier = dict.fromkeys(_TIER_FIELDS, 0)
    row = {"replica_uid": "R", "counters": {spec.name: 0 for spec in COUNTERS}, "tiers": {"cpu": tier}, "peers": []}
    return {"replicas": [row]}


def sources() -> str:
    """Where a prompt token can have come from; the figures of a request sum to its prompt."""
    rows = ((code(source), text(_SOURCE_TEXT[source])) for source in SOURCES)
    return table(("source", "the token's KV came from"), rows, (20, 80))


def limits() -> str:
    """The settings of the shared cache that have a default."""
    help_by_name = dict(argument_texts(XavierConfig.__doc__ or ""))
    fields = XavierConfig.__dataclass_fields__.values()
    rows = [(code(field.name), code(field.default), text(help_by_name[field.name])) for field in fields if field.name in vars(XavierConfig)]
    return table(("limit", "default", "what it bounds"), rows, (28, 14, 58))


def argument_texts(docstring: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each argument in a docstring's ``Args``; several names may share a text."""
    lines = docstring.partition("Args:\n")[2].splitlines()
    entries: list[str] = []
    for line in lines:
        if re.match(r" {8}\S", line):
            entries.append(line.strip())
        elif line.strip() and entries:
            entries[-1] += f" {line.strip()}"
    for entry in entries:
        names, _, meaning = entry.partition(": ")
        for name in names.split(", "):
            yield name, meaning


def bounds() -> str:
    """Bounds that nobody sets, with the values that the code has."""
    rows = ((code(name), code(getattr(importlib.import_module(module), name)), what) for module, name, what in _BOUNDS)
    return table(("bound", "value", "what it bounds"), rows, (28, 14, 58))


def settings() -> str:
    """The server's settings as environment variables."""
    return _variables(Settings)


def request_limits() -> str:
    """What the API accepts, as environment variables."""
    return _variables(Limits)


def _variables(kind: type[BaseSettings]) -> str:
    prefix = kind.model_config["env_prefix"]
    rows = [
        (code(f"{prefix}{name.upper()}"), code(field.default), text(field.description or name.replace("_", " ")))
        for name, field in kind.model_fields.items()
    ]
    return table(("variable", "default", "meaning"), rows, (40, 18, 42))


def route_scopes() -> str:
    """Every route of the API and the scopes that open it."""
    app = create_app(cast(Any, None), Settings(), Limits(), KeyRing())  # starts nothing, asks nobody
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    found = {(route.path_format, method): scopes_for(method, route.path) for route in routes for method in route.methods}
    rows = [
        (
            code(f"{method} {path}"),
            "no key" if scopes is None else ", ".join(code(scope) for scope in sorted(scopes - {ADMIN})) or code(ADMIN),
        )
        for (path, method), scopes in sorted(found.items())
    ]
    return table(("route", "scope"), rows, (70, 30))


def replica_states() -> str:
    """The replica's table of moves."""
    return _moves(REPLICA_MOVES)


def model_states() -> str:
    """The model's table of moves."""
    return _moves(MODEL_MOVES)


def _moves(moves: dict[Any, dict[Any, Any]]) -> str:
    rows = [
        (code(state.value), ", ".join(f"{code(event.value)} → {code(after.value)}" for event, after in by_event.items()) or "(the end)")
        for state, by_event in moves.items()
    ]
    return table(("state", "event → next state"), rows, (16, 84))


def events() -> str:
    """Stages of a model's events; the final ones end the stream unless it is followed."""
    plain = ", ".join(code(stage.value) for stage in Stage if stage not in FINAL)
    final = ", ".join(code(stage.value) for stage in Stage if stage in FINAL)
    return f"{plain}; final: {final}\n"


def errors() -> str:
    """Every error of the platform that reaches users, by status."""
    rows = [
        (
            str(kind.status),
            code(kind.type),
            code(kind.default_code or "null"),
            code(kind.default_param or "null"),
            "-" if kind.retry_after_seconds is None else f"{kind.retry_after_seconds:g} s",
            code(kind.__name__),
        )
        for kind in sorted(error_kinds(), key=lambda kind: (kind.status, kind.default_code or "", kind.__name__))
    ]
    return table(("status", "type", "code", "param", "retry-after", "class"), rows, (8, 22, 24, 12, 12, 22))


def error_kinds() -> Iterable[type[XinferenceError]]:
    """The classes of the tree that are raised, wherever they are defined."""
    found = {kind for module in _ERROR_MODULES for kind in vars(module).values() if isinstance(kind, type)}
    return [kind for kind in found if issubclass(kind, XinferenceError) and kind is not XinferenceError]

"""/metrics: this API's own figures, those of every replica's engine, and those of the shared caches."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import generate_latest

from xinference.api.control import Json
from xinference.api.exposition import Family, Merger
from xinference.api.route_table import ModelRoutes, Replica
from xinference.api.routing import AppState
from xinference.api.upstream import ConnectionLost
from xinference.errors import XinferenceError
from xinference.model.llm.vllm.xavier.directory.counters import COUNTERS, HISTOGRAMS

logger = logging.getLogger(__name__)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = "xinference_xavier_"
# Field of a tier -> metric and what one unit is.
_TIER_GAUGES: Final = {
    "budget_bytes": ("budget_bytes", "Bytes that the tier may use, books included"),
    "file_bytes": ("file_bytes", "Bytes of the tier's shared memory file"),
    "book_bytes": ("book_bytes", "Bytes of the tier's books beside the file"),
    "used_bytes": ("bytes", "Bytes of the blocks kept now"),
    "blocks": ("blocks", "Blocks kept now"),
    "capacity_blocks": ("capacity_blocks", "Blocks that the tier has room for"),
}


async def metrics_page(api: AppState) -> str:
    """The whole text. What does not answer in time is left out of it."""
    models = list(api.gateway.table)
    engines = asyncio.gather(*(_engine_text(api, replica) for routes in models for replica in routes.ready))
    caches = asyncio.gather(*(_cache_status(api, routes) for routes in models if routes.shares_cache))
    merger = Merger()
    places = [(routes.uid, replica.replica_uid) for routes in models for replica in routes.ready]
    for (uid, replica_uid), text in zip(places, await engines, strict=True):
        merger.add(text, {"model": uid, "replica": replica_uid})
    sharing = [routes.uid for routes in models if routes.shares_cache]
    families = [family for uid, status in zip(sharing, await caches, strict=True) for family in cache_families(uid, status)]
    for family in families:
        merger.add_family(family)
    return generate_latest(api.metrics.registry).decode() + "".join(line + "\n" for line in merger.lines())


async def _engine_text(api: AppState, replica: Replica) -> str:
    try:
        return await api.gateway.upstreams.get_text(replica.endpoint, "/metrics", api.config.metrics_scrape_seconds)
    except ConnectionLost as error:
        logger.debug("no metrics from replica %s: %s", replica.replica_uid, error)
        return ""


async def _cache_status(api: AppState, routes: ModelRoutes) -> Json:
    try:
        async with asyncio.timeout(api.config.metrics_scrape_seconds):
            return await api.cluster.xavier_status(routes.uid)
    except (XinferenceError, TimeoutError) as error:
        logger.debug("no cache statistics of model %s: %s", routes.uid, error)
        return {"replicas": []}


def cache_families(uid: str, status: Json) -> Iterator[Family]:
    """The metrics of one model's shared cache."""
    for replica in status["replicas"]:
        labels = {"model": uid, "replica": replica["replica_uid"]}
        counters: dict[str, int] = replica.get("counters") or {}
        for spec in COUNTERS:
            if spec.name in counters and spec.metric not in HISTOGRAMS:
                name = _PREFIX + spec.metric.removesuffix("_total") + "_total"
                yield Family(name, "counter", spec.help, {**labels, **dict(spec.labels)}, counters[spec.name])
        yield from _histograms(labels, counters)
        for tier, figures in (replica.get("tiers") or {}).items():
            yield from _tier_families({**labels, "tier": tier}, figures)
        peers: list[dict[str, Any]] = replica.get("peers") or []
        attached = sum(1 for peer in peers if peer["attached"])
        yield Family(_PREFIX + "peers_attached", "gauge", "Peers whose segments are mapped", labels, attached)


def _histograms(labels: dict[str, str], counters: dict[str, int]) -> Iterator[Family]:
    """Latencies. A counter holds its bucket alone; Prometheus wants each bucket to hold those below it."""
    for metric, sum_ns in HISTOGRAMS.items():
        buckets = [spec for spec in COUNTERS if spec.metric == metric and spec.name in counters]
        if not buckets:
            continue
        name, text, total = _PREFIX + metric, buckets[0].help, 0
        for spec in buckets:
            total += counters[spec.name]
            yield Family(name, "histogram", text, {**labels, **dict(spec.labels)}, total, "_bucket")
        yield Family(name, "histogram", text, labels, counters.get(sum_ns, 0) / 1e9, "_sum")
        yield Family(name, "histogram", text, labels, total, "_count")


def _tier_families(labels: dict[str, str], figures: Json) -> Iterator[Family]:
    for field, (metric, text) in _TIER_GAUGES.items():
        if figures.get(field) is not None:
            yield Family(_PREFIX + metric, "gauge", text, labels, figures[field])

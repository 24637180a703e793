"""The counters that a replica keeps in its segment: names, meaning, and the words they live in.

One unit is counted once, where the thing has happened. The owner adds under the engine's lock (an addition is a load and a store, so two
threads without a lock would lose some); anybody may read. Counters survive an adoption: they count for the segment, not for a process.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from xinference.model.llm.vllm.xavier.directory.requests import SOURCES

MAX_COUNTERS = 512  # they fill one page
_MASK = (1 << 64) - 1


class CounterSpec(NamedTuple):
    """One counter: its name, the metric it belongs to, the metric's labels, and what one unit is."""

    name: str
    metric: str
    labels: tuple[tuple[str, str], ...]
    help: str


def _plain(name: str, text: str) -> CounterSpec:
    return CounterSpec(name, name, (), text)


def _drop(reason: str, text: str) -> CounterSpec:
    return CounterSpec(f"drops_{reason}", "drops", (("reason", reason),), text)


# Upper bounds in seconds; what takes longer is in the last bucket, which has none.
LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_BOUND_LABELS = (*(f"{bound:g}" for bound in LATENCY_BOUNDS), "+Inf")
_BUCKETS = {
    kind: tuple(f"{kind}_seconds_le_{label.lstrip('+').lower().replace('.', '_')}" for label in _BOUND_LABELS) for kind in ("load", "save")
}
# Metric of a histogram -> the counter that holds the sum of what it observes, in nanoseconds.
HISTOGRAMS = {"load_seconds": "load_wait_ns", "save_seconds": "save_ns"}


def latency_bucket(kind: str, seconds: float) -> str:
    """The counter of the one bucket that a ``load`` or ``save`` falls into. Buckets do not hold what is in those below them."""
    return _BUCKETS[kind][bisect_left(LATENCY_BOUNDS, seconds)]


def _latencies(kind: str, text: str) -> Iterator[CounterSpec]:
    for name, label in zip(_BUCKETS[kind], _BOUND_LABELS, strict=True):
        yield CounterSpec(name, f"{kind}_seconds", (("le", label),), text)


def _prompt(source: str) -> CounterSpec:
    text = "prompt tokens by where their KV came from, counted once when a request's prefill first completes"
    return CounterSpec(f"prompt_tokens_{source}", "prompt_tokens", (("source", source),), text)


COUNTERS: tuple[CounterSpec, ...] = (
    *(_prompt(source) for source in SOURCES),
    _plain("requests", "requests whose accounting was fixed"),
    _plain("recomputed_tokens", "tokens computed again after a preemption that followed a completed prefill"),
    _plain("pre_clear_tokens", "tokens that the engine's own prefix cache served from before a clear"),
    _plain("saves_blocks", "blocks published in the CPU tier"),
    _plain("save_bytes", "bytes copied into the CPU tier and published"),
    _plain("save_batches", "copies made by the saving thread"),
    _plain("save_ns", "nanoseconds spent copying into the CPU tier"),
    *_latencies("save", "copies made by the saving thread, by the time that one took"),
    _plain("loads_sync", "loads made within a step"),
    _plain("loads_async", "loads made beside the steps"),
    _plain("load_blocks", "blocks loaded and found valid"),
    _plain("load_bytes", "bytes of blocks loaded and found valid"),
    _plain("load_batches", "copies made by loads"),
    _plain("load_ns", "nanoseconds spent copying and validating loads"),
    _plain("load_wait_ns", "nanoseconds from the allocation for a load to the end of its copies, summed over loads"),
    *_latencies("load", "loads, by the time from the allocation for one to the end of its copies"),
    _plain("invalid_blocks", "blocks of a load that did not validate and were reported for recomputing"),
    _plain("failed_loads", "loads with at least one invalid block"),
    _plain("followers_waited", "requests that began to wait for another request's load"),
    _plain("followers_gave_up", "waiting requests whose leader failed or was late"),
    _plain("evictions", "blocks that left the CPU tier to make room"),
    _drop("capacity", "blocks not saved: every place was pinned, reserved or protected by a child"),
    _drop("admission", "blocks not saved: content never seen before would have displaced content that was reused"),
    _drop("peer_has", "blocks not saved: a peer on this host keeps them"),
    _drop("source_reused", "blocks not saved: the engine handed the block out again before the copy was complete"),
    _drop("epoch", "blocks not saved or not published: a clear came in between"),
    _drop("parent", "blocks not saved: the block before them in the chain is not kept"),
    _drop("index_full", "blocks not saved: their line of the index held eight others"),
    _drop("copy_failed", "blocks not saved: the copy raised an error"),
    _drop("tainted", "blocks not saved: their request computed on a load that failed"),
    _drop("queue_full", "blocks not saved: too many were on their way already"),
    _drop("closing", "blocks not saved: the engine was shutting down"),
    _plain("async_share_refused", "loads not made: asynchronous loads already held their share of the engine's blocks"),
    _plain("not_worth_loading", "hits not loaded: computing was expected to be faster"),
    _plain("peer_attach_ok", "peers' segments mapped"),
    _plain("peer_attach_refused", "attempts to map a peer's segment that failed"),
    _plain("peer_detached", "peers' segments let go: owner dead, replaced or no longer a peer"),
    _plain("record_rejected", "records with the wanted key that did not validate"),
    _plain("hook_errors", "errors caught in a connector hook"),
    _plain("hook_calls", "connector hooks run"),
    _plain("hook_ns_total", "nanoseconds spent in connector hooks, without hook_copy_ns"),
    _plain("hook_copy_ns", "nanoseconds spent on synchronous loads in connector hooks"),
    _plain("steps", "engine steps seen"),
    _plain("clears", "clears carried out"),
    _plain("cleared_blocks", "blocks freed by clears"),
    _plain("adopted_blocks", "blocks taken over from a predecessor's segment"),
)

INDEX_BY_NAME: dict[str, int] = {spec.name: index for index, spec in enumerate(COUNTERS)}


class Counters:
    """Named words in shared memory. Only the owner may call ``add``, under the engine's lock.

    Args:
        words: a view of u64 words, at least as many as there are counters.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def add(self, name: str, amount: int = 1) -> None:
        """Count ``amount`` units more.

        Raises:
            KeyError: there is no such counter.
        """
        index = INDEX_BY_NAME[name]
        self._words[index] = (self._words[index] + amount) & _MASK

    def value(self, name: str) -> int:
        """The present count."""
        return int(self._words[INDEX_BY_NAME[name]])

    def items(self) -> Iterator[tuple[str, int]]:
        """All counters by name."""
        return ((spec.name, int(self._words[index])) for index, spec in enumerate(COUNTERS))

"""The API's own metrics, in a registry of their own. Names and labels are part of the product's surface.

Label ``model`` takes only uids of known models, so that clients cannot make series by inventing names.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from xinference.settings import Limits

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# What a request can be refused for beside ``Limits``: its model's context, and what else its engine does not take.
ENGINE_LIMITS: Final = ("max_model_len", "engine")


class ApiMetrics:
    """One set per app. Each name below says what one unit is."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Inference requests that ended: ok, client_disconnected or an error code", "model", "endpoint", "outcome"
        )
        self.http_requests = self._counter("http_requests", "Answers to HTTP requests, by status", "method", "status")
        self.refused = self._counter("refused", "Requests refused because of a limit", "limit")
        for name in (*Limits.model_fields, *ENGINE_LIMITS):
            self.refused.labels(name)  # shown from the start, at 0
        self.retries = self._counter(
            "proxy_retries", "Requests sent to a further replica, one having failed before its first byte", "model"
        )
        self.replica_failures = self._counter("replica_failures", "Broken replica connections that were reported", "model")
        self.slow_readers = self._counter("slow_readers", "Streams aborted because the client did not read them", "model")
        self.usage_figures = self._counter("usage_figures", "Usage figures given, by where cached_tokens came from", "model", "figure")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests", "model")
        self.completion_tokens = self._counter("completion_tokens", "Generated tokens of finished requests", "model")
        self.records_dropped = self._counter("request_records_dropped", "Recent requests that made room for newer ones in /v1/requests")
        self.open_requests = Gauge("xinference_open_requests", "Inference requests open now", ["model"], registry=self.registry)
        self.event_streams = Gauge("xinference_event_streams", "Event, log and statistics streams open now", registry=self.registry)
        self.request_seconds = self._histogram("request_seconds", "From the request's arrival to the end of its answer")
        self.ttft_seconds = self._histogram("time_to_first_token_seconds", "From the request's arrival to the first event of its stream")

    def num_refused(self, limit: str) -> int:
        """How many requests a limit has refused."""
        return int(self.registry.get_sample_value("xinference_refused_total", {"limit": limit}) or 0)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"xinference_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"xinference_{name}", text, ["model", "endpoint"], buckets=_SECONDS, registry=self.registry)

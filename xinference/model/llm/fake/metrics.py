"""``/metrics`` of the fake: those of vLLM's metrics that the platform reads, under vLLM's names and labels."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from xinference.model.llm.fake.engine import FakeEngine

_TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_E2E_BOUNDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


@dataclass
class Histogram:
    """Counts by upper bound, in seconds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        self.total += seconds
        self.counts[next((i for i, bound in enumerate(self.bounds) if seconds <= bound), len(self.bounds))] += 1

    def lines(self, name: str, labels: str) -> Iterable[str]:
        seen = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {seen}'
        yield f"{name}_sum{{{labels}}} {self.total}"
        yield f"{name}_count{{{labels}}} {seen}"


class Metrics:
    """Latencies that only the server sees, and the text of all metrics."""

    def __init__(self, model_name: str) -> None:
        self._labels = f'engine="0",model_name="{model_name}"'
        self.time_to_first_token = Histogram(_TTFT_BOUNDS)
        self.inter_token_latency = Histogram(_ITL_BOUNDS)
        self.request_latency = Histogram(_E2E_BOUNDS)

    def text(self, engine: FakeEngine) -> str:
        scheduler, pool = engine.scheduler, engine.pool
        gauges = {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting) + len(scheduler.loading),
            "kv_cache_usage_perc": 1 - pool.num_free / pool.num_blocks,
        }
        counters = {
            "num_preemptions": scheduler.preemptions,
            "prompt_tokens": engine.num_prompt_tokens,
            "generation_tokens": engine.num_output_tokens,
            "prefix_cache_queries": scheduler.prefix_queries,
            "prefix_cache_hits": scheduler.prefix_hits,
        }
        histograms = {
            "time_to_first_token_seconds": self.time_to_first_token,
            "inter_token_latency_seconds": self.inter_token_latency,
            "e2e_request_latency_seconds": self.request_latency,
        }
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{self._labels}}} {float(value)}"]
        for name, value in counters.items():
            lines += [f"# TYPE vllm:{name}_total counter", f"vllm:{name}_total{{{self._labels}}} {float(value)}"]
        lines.append("# TYPE vllm:request_success_total counter")
        for reason in ("stop", "length", "abort", "error"):
            lines.append(f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {float(engine.finished[reason])}')
        for name, histogram in histograms.items():
            lines += [f"# TYPE vllm:{name} histogram", *histogram.lines(f"vllm:{name}", self._labels)]
        return "\n".join(lines) + "\n"

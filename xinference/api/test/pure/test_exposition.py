"""Metrics of several sources in one text."""

from prometheus_client.parser import text_string_to_metric_families

from xinference.api.exposition import Family, Merger

ENGINE = """# HELP vllm:requests_total Requests, by reason.
# TYPE vllm:requests_total counter
vllm:requests_total{engine="0",model_name="m",finished_reason="stop, or so"} 3.0
# HELP vllm:latency_seconds Latency.
# TYPE vllm:latency_seconds histogram
vllm:latency_seconds_bucket{le="0.1"} 1.0
vllm:latency_seconds_bucket{le="+Inf"} 2.0
vllm:latency_seconds_sum 0.5
vllm:latency_seconds_count 2.0
# HELP process_open_fds Files.
# TYPE process_open_fds gauge
process_open_fds 12.0
"""


def merged(*texts: str) -> str:
    merger = Merger()
    for index, text in enumerate(texts):
        merger.add(text, {"model": "m", "replica": f"m-{index}"})
    return "\n".join(merger.lines()) + "\n"


def test_every_sample_is_told_apart_by_its_replica() -> None:
    families = {family.name: family for family in text_string_to_metric_families(merged(ENGINE, ENGINE))}
    found = {(sample.labels["replica"], sample.value) for sample in families["process_open_fds"].samples}
    assert found == {("m-0", 12.0), ("m-1", 12.0)}


def test_a_family_is_described_once_and_stands_together() -> None:
    text = merged(ENGINE, ENGINE)
    assert text.count("# TYPE vllm:latency_seconds histogram") == 1
    lines = [line.split("{")[0] for line in text.splitlines() if line.startswith("vllm:latency")]
    assert lines == ["vllm:latency_seconds_bucket"] * 2 + ["vllm:latency_seconds_sum", "vllm:latency_seconds_count"] + [
        "vllm:latency_seconds_bucket"
    ] * 2 + ["vllm:latency_seconds_sum", "vllm:latency_seconds_count"]


def test_labels_with_commas_and_quotation_marks_stay_whole() -> None:
    text = '# TYPE a gauge\na{x="one, two",y="say \\"hi\\", {you}"} 1.0\n'
    [family] = text_string_to_metric_families(merged(text))
    assert family.samples[0].labels == {"model": "m", "replica": "m-0", "x": "one, two", "y": 'say "hi", {you}'}


def test_our_label_wins_over_a_replicas_own() -> None:
    [family] = text_string_to_metric_families(merged('# TYPE a gauge\na{replica="liar"} 1.0\n'))
    assert family.samples[0].labels["replica"] == "m-0"


def test_a_replica_without_metrics_leaves_no_trace() -> None:
    assert merged("") == "\n"


def test_our_own_families_join() -> None:
    merger = Merger()
    for tier in ("cpu", 'g"pu'):
        merger.add_family(Family("xinference_xavier_blocks", "gauge", "Blocks kept", {"tier": tier}, 3))
    [family] = text_string_to_metric_families("\n".join(merger.lines()) + "\n")
    assert [(sample.labels["tier"], sample.value) for sample in family.samples] == [("cpu", 3.0), ('g"pu', 3.0)]

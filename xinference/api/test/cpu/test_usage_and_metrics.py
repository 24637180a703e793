"""What is told of a request afterwards: usage, debug object, metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from xinference.api.config import ApiConfig
from xinference.api.test.fakes import (
    FakeCluster,
    Script,
    ScriptedReplica,
    answering,
    chunk,
    model,
    replica,
    serving,
    streaming,
    usage_chunk,
)
from xinference.errors import NotFound
from xinference.settings import Limits

MESSAGES: Any = [{"role": "user", "content": "x"}]
SOURCES = {"local": 1, "peer_gpu": 0, "gpu_tier": 0, "cpu_tier": 2, "peer_cpu": 3, "remote": 0, "handed_over": 0, "computed": 4}
RECORD = {"prompt_tokens": 10, "sources": SOURCES, "cached_tokens": 6, "recomputed_tokens": 2}
ANSWER = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [], "usage": usage_chunk()["usage"]}
STREAM = (chunk("one"), chunk(finish="stop"), usage_chunk(), "[DONE]")
DEBUG = {"x-xinference-debug": "1"}


@asynccontextmanager
async def opened(
    tmp_path: Path, script: Script, xavier: bool = True, metrics: str = "", **options: Any
) -> AsyncIterator[tuple[FakeCluster, openai.AsyncOpenAI, str]]:
    cluster = FakeCluster()
    async with ScriptedReplica(script, metrics=metrics).serving(tmp_path / "s"):
        await cluster.put(model(xavier=xavier), replica("m-0", tmp_path / "s"))
        async with (
            serving(cluster, **options) as served,
            openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="k", max_retries=0) as client,
        ):
            yield cluster, client, served.url


async def series(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All samples of /metrics; the text must parse."""
    async with aiohttp.ClientSession() as http, http.get(url + "/metrics") as response:
        text = await response.text()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


async def test_the_figure_of_a_whole_answer_is_that_of_its_record(tmp_path: Path) -> None:
    async with opened(tmp_path, answering(ANSWER)) as (cluster, client, _):
        cluster.answer_records = lambda _: RECORD
        answer = await client.chat.completions.create(model="m", messages=MESSAGES)
        [(uid, replica_uid, request)] = cluster.asked("request_record")
    assert (uid, replica_uid, len(request)) == ("m", "m-0", 32)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 6
    assert not hasattr(answer, "xinference")


async def test_the_figure_of_a_stream_is_that_of_its_record(tmp_path: Path) -> None:
    async with opened(tmp_path, streaming(*STREAM)) as (cluster, client, _):
        cluster.answer_records = lambda _: RECORD
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True})
        last = [event async for event in stream][-1]
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 6


async def test_nobody_asks_for_the_record_of_a_stream_whose_client_wants_no_usage(tmp_path: Path) -> None:
    async with opened(tmp_path, streaming(*STREAM)) as (cluster, client, _):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert all(event.usage is None for event in [event async for event in stream])
        assert cluster.asked("request_record") == []


async def test_nobody_asks_for_a_record_of_a_model_that_does_not_share(tmp_path: Path) -> None:
    async with opened(tmp_path, answering(ANSWER), xavier=False) as (cluster, client, _):
        answer = await client.chat.completions.create(model="m", messages=MESSAGES)
        assert cluster.asked("request_record") == []
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("fault", ["late", "error", "other length"])
async def test_without_a_record_in_time_the_engines_figure_is_given_and_counted(tmp_path: Path, fault: str) -> None:
    async with opened(tmp_path, answering(ANSWER), config=ApiConfig(usage_wait_seconds=0.02)) as (cluster, client, url):
        if fault == "error":
            cluster.fails["request_record"] = NotFound("no such replica")
        elif fault == "other length":
            cluster.answer_records = lambda _: {**RECORD, "prompt_tokens": 5}
        answer = await client.chat.completions.create(model="m", messages=MESSAGES)
        found = await series(url)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    figure = "mismatch" if fault == "other length" else "missing"
    assert found["xinference_usage_figures_total", labels(model="m", figure=figure)] == 1


async def test_a_record_that_was_there_in_time_is_used_although_the_way_to_it_was_slow(tmp_path: Path) -> None:
    async with opened(tmp_path, answering(ANSWER), config=ApiConfig(usage_wait_seconds=0.01, usage_answer_seconds=20.0)) as (
        cluster,
        client,
        _,
    ):

        async def slow(uid: str, replica_uid: str, request_hex: str, wait_seconds: float) -> Any:
            await asyncio.sleep(4 * wait_seconds)
            return RECORD

        cluster.request_record = slow  # type: ignore[method-assign]
        answer = await client.chat.completions.create(model="m", messages=MESSAGES)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 6


async def test_a_supervisor_that_hangs_costs_a_request_only_so_long(tmp_path: Path) -> None:
    async with opened(tmp_path, answering(ANSWER), config=ApiConfig(usage_answer_seconds=0.02)) as (cluster, client, _):

        async def hang(*_: Any) -> Any:
            await asyncio.Event().wait()

        cluster.request_record = hang  # type: ignore[method-assign, assignment]
        async with asyncio.timeout(2):
            assert await client.chat.completions.create(model="m", messages=MESSAGES)


async def test_the_debug_header_tells_where_tokens_came_from(tmp_path: Path) -> None:
    async with opened(tmp_path, answering(ANSWER)) as (cluster, client, _):
        cluster.answer_records = lambda _: {**RECORD, "times": {"queued": 10.0, "first_token": 10.25}}
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=DEBUG)
    assert answer.model_extra is not None
    assert answer.model_extra["xinference"] == {"replica": "m-0", "sources": SOURCES, "recomputed_tokens": 2, "ttft_ms": 250.0}


async def test_the_debug_header_adds_a_usage_chunk_to_any_stream(tmp_path: Path) -> None:
    async with opened(tmp_path, streaming(*STREAM)) as (cluster, client, _):
        cluster.answer_records = lambda _: RECORD
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, extra_headers=DEBUG)
        events = [event async for event in stream]
    assert [event.usage is not None for event in events] == [False, False, True]
    extra = events[-1].model_extra
    assert extra is not None
    assert extra["xinference"]["sources"] == SOURCES
    assert extra["xinference"]["ttft_ms"] > 0


async def test_the_debug_header_of_a_model_that_does_not_share_invents_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, answering(ANSWER), xavier=False) as (_, client, _):
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=DEBUG)
    assert answer.model_extra is not None
    found = answer.model_extra["xinference"]
    assert found.pop("ttft_ms") > 0  # the API's own time to the answer's first byte
    assert found == {"replica": "m-0", "sources": None, "recomputed_tokens": None}


async def test_requests_are_counted_by_outcome(tmp_path: Path) -> None:
    async with opened(tmp_path, answering(ANSWER), limits=Limits(stop_strings=1)) as (_, client, url):
        await client.chat.completions.create(model="m", messages=MESSAGES)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="invented", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=MESSAGES, stop=["a", "b"])
        found = await series(url)
    assert found["xinference_requests_total", labels(model="m", endpoint="chat.completions", outcome="ok")] == 1
    assert found["xinference_refused_total", labels(limit="stop_strings")] == 1
    assert found["xinference_prompt_tokens_total", labels(model="m")] == 10
    assert found["xinference_completion_tokens_total", labels(model="m")] == 2
    assert found["xinference_open_requests", labels(model="m")] == 0
    assert found["xinference_request_seconds_count", labels(model="m", endpoint="chat.completions")] == 1
    assert found["xinference_http_requests_total", labels(method="POST", status="404")] == 1
    assert not [key for key in found if ("model", "invented") in key[1]]


async def test_the_time_to_the_first_event_is_measured(tmp_path: Path) -> None:
    async with opened(tmp_path, streaming(*STREAM)) as (_, client, url):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert [event async for event in stream]
        found = await series(url)
    assert found["xinference_time_to_first_token_seconds_count", labels(model="m", endpoint="chat.completions")] == 1


ENGINE_METRICS = (
    '# HELP vllm:num_requests_running Running.\n# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 3.0\n'
)


async def test_engine_metrics_carry_model_and_replica(tmp_path: Path) -> None:
    async with opened(tmp_path, answering(ANSWER), metrics=ENGINE_METRICS) as (cluster, _, url):
        await cluster.put(model(), replica("m-0", tmp_path / "s"), replica("m-1", tmp_path / "s"), replica("dead", tmp_path / "nobody"))
        async with asyncio.timeout(5):
            while (
                len(found := await series(url)) and ("vllm:num_requests_running", labels(engine="0", model="m", replica="m-1")) not in found
            ):
                await asyncio.sleep(0.01)
    assert found["vllm:num_requests_running", labels(engine="0", model="m", replica="m-0")] == 3
    assert not [key for key in found if ("replica", "dead") in key[1]]


async def test_a_replica_that_hangs_is_left_out_of_the_metrics(tmp_path: Path) -> None:
    config = ApiConfig(metrics_scrape_seconds=0.05)
    async with opened(tmp_path, answering(ANSWER), config=config) as (cluster, _, url):

        async def never(_: Any, writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        server = await asyncio.start_unix_server(never, tmp_path / "hangs")
        await cluster.put(model(xavier=False), replica("m-0", tmp_path / "hangs"))
        async with asyncio.timeout(2):
            assert await series(url)
        server.close()


async def test_cache_metrics_have_their_names(tmp_path: Path) -> None:
    async with opened(tmp_path, answering(ANSWER)) as (cluster, _, url):
        tiers = {"cpu": {"budget_bytes": 100, "file_bytes": 90, "book_bytes": 5, "used_bytes": 32, "blocks": 2, "capacity_blocks": 5}}
        loads = {"load_seconds_le_0_001": 3, "load_seconds_le_0_01": 2, "load_seconds_le_inf": 1, "load_wait_ns": 5_000_000_000}
        counters = {**loads, "prompt_tokens_cpu_tier": 7, "drops_capacity": 1, "hook_ns_total": 9, "unknown": 1}
        peers = [{"replica_uid": "m-1", "attached": True, "reason": None}, {"replica_uid": "m-2", "attached": False, "reason": "dead"}]
        status = {"replica_uid": "m-0", "state": "ready", "tiers": tiers, "counters": counters, "peers": peers}
        cluster.status = {"enabled": True, "replicas": [status, {"replica_uid": "m-1", "state": "loading"}]}
        found = await series(url)
    where = {"model": "m", "replica": "m-0"}
    assert found["xinference_xavier_prompt_tokens_total", labels(**where, source="cpu_tier")] == 7
    assert found["xinference_xavier_drops_total", labels(**where, reason="capacity")] == 1
    assert found["xinference_xavier_hook_ns_total", labels(**where)] == 9
    assert found["xinference_xavier_blocks", labels(**where, tier="cpu")] == 2
    assert found["xinference_xavier_bytes", labels(**where, tier="cpu")] == 32
    assert found["xinference_xavier_budget_bytes", labels(**where, tier="cpu")] == 100
    assert found["xinference_xavier_peers_attached", labels(**where)] == 1
    assert found["xinference_xavier_load_seconds_bucket", labels(**where, le="0.001")] == 3
    assert found["xinference_xavier_load_seconds_bucket", labels(**where, le="0.01")] == 5
    assert found["xinference_xavier_load_seconds_bucket", labels(**where, le="+Inf")] == 6
    assert found["xinference_xavier_load_seconds_count", labels(**where)] == 6
    assert found["xinference_xavier_load_seconds_sum", labels(**where)] == 5

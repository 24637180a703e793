"""Recent requests as clients find them afterwards."""

from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from xinference.api.test.bench import ANSWER, MESSAGES, WHOLE, setup, until
from xinference.api.test.fakes import answering, chunk, model, replica, send_event, start_stream, streaming
from xinference.errors import ModelNotFound, NotFound
from xinference.settings import Settings

SOURCES = {"local": 0, "peer_gpu": 0, "gpu_tier": 0, "cpu_tier": 6, "peer_cpu": 0, "remote": 0, "handed_over": 0, "computed": 4}
TIMES = {"queued": 5.0, "scheduled": 6.0, "load_started": None, "loaded": None, "first_token": 7.0, "finished": 8.0}
MINE = {"x-request-id": "mine"}


def record(request_hex: str, **more: Any) -> dict[str, Any]:
    return {
        "request_id": request_hex, "model_uid": "m", "replica_uid": "m-0", "state": "finished", "prompt_tokens": 10, "output_tokens": 2,
        "sources": SOURCES, "cached_tokens": 6, "pre_clear_tokens": 0, "recomputed_tokens": 0, "times": TIMES, **more,
    }  # fmt: skip


async def get(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        return response.status, await response.json()


async def test_a_request_is_found_under_the_id_that_its_client_sent(tmp_path: Path) -> None:
    async with setup(tmp_path, streaming(*WHOLE), xavier=True) as (cluster, _, served, client):
        cluster.answer_records = record
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, extra_headers=MINE)
        assert [event async for event in stream]
        status, found = await get(served.url + "/v1/requests/mine")
    assert (status, found["request_id"], found["replica_uid"], found["state"]) == (200, "mine", "m-0", "finished")
    assert len(found["accounting_id"]) == 32
    assert (found["sources"], found["times"]["queued"]) == (SOURCES, 5.0)
    assert found["times"]["received"] < found["times"]["first_token"] <= found["times"]["finished"]


async def test_a_model_that_does_not_share_has_records_also(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER)) as (cluster, _, served, client):
        await client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=MINE)
        _, found = await get(served.url + "/v1/requests/mine")
        _, listed = await get(served.url + "/v1/requests?model=m")
        assert cluster.asked("request_record") == []
    assert (found["prompt_tokens"], found["output_tokens"], found["cached_tokens"], found["sources"]) == (10, 2, 4, None)
    assert [row["request_id"] for row in listed["data"]] == ["mine"]


async def test_a_failed_request_is_kept_with_its_error(tmp_path: Path) -> None:
    async with setup(tmp_path, answering({"detail": "boom"}, 500)) as (_, _, served, client):
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=MINE)
        _, found = await get(served.url + "/v1/requests/mine")
    assert (found["state"], found["error"]) == ("failed", "internal_error")


async def test_requests_of_one_model_are_listed_without_those_of_another(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER)) as (cluster, _, served, client):
        await cluster.put(model("other"), replica("o-0", tmp_path / "0"))
        await client.chat.completions.create(model="m", messages=MESSAGES)
        await client.chat.completions.create(model="other", messages=MESSAGES)
        _, found = await get(served.url + "/v1/requests?model=other")
    assert [row["model_uid"] for row in found["data"]] == ["other"]


async def test_only_so_many_requests_are_kept_and_those_dropped_are_counted(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER), settings=Settings(request_records=2)) as (_, _, served, client):
        for number in range(3):
            await client.chat.completions.create(model="m", messages=MESSAGES, extra_headers={"x-request-id": f"r{number}"})
        _, found = await get(served.url + "/v1/requests")
        assert (await get(served.url + "/v1/requests/r0"))[0] == 404
        async with aiohttp.ClientSession() as http, http.get(served.url + "/metrics") as response:
            assert "xinference_request_records_dropped_total 1.0" in await response.text()
    assert [row["request_id"] for row in found["data"]] == ["r2", "r1"]


async def test_what_an_engine_was_asked_by_others_is_listed_under_its_accounting_id(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER)) as (cluster, _, served, _):
        cluster.recent = [record("a" * 32), record("b" * 32)]
        status, found = await get(served.url + "/v1/requests/" + "b" * 32)
        assert (status, found["request_id"], found["sources"]) == (200, "b" * 32, SOURCES)
        assert (await get(served.url + "/v1/requests/c"))[1]["error"]["code"] == "not_found"


@pytest.mark.parametrize("error", [ModelNotFound("gone"), NotFound("no such replica")])
async def test_a_request_outlives_its_model(tmp_path: Path, error: Exception) -> None:
    async with setup(tmp_path, answering(ANSWER), xavier=True) as (cluster, _, served, client):
        await client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=MINE)
        cluster.fails |= {"request_record": error, "list_requests": ModelNotFound("gone")}  # type: ignore[dict-item]
        assert (await get(served.url + "/v1/requests/mine"))[1]["prompt_tokens"] == 10
        assert len((await get(served.url + "/v1/requests?model=m"))[1]["data"]) == 1
        assert (await get(served.url + "/v1/requests?model=never"))[0] == 404


async def test_a_client_that_left_is_seen_as_aborted(tmp_path: Path) -> None:
    async def endless(request: Any, _: Any) -> Any:
        response = await start_stream(request)
        while True:
            await send_event(response, chunk("x"))

    async with setup(tmp_path, endless) as (_, _, served, client):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, extra_headers=MINE)
        await anext(aiter(stream))
        _, during = await get(served.url + "/v1/requests/mine")
        await stream.close()
        gateway = served.app.state.api.gateway
        await until(lambda: not gateway.open)
        _, after = await get(served.url + "/v1/requests/mine")
    assert (during["state"], during["times"]["finished"]) == ("running", None)
    assert (after["state"], after["error"]) == ("aborted", "client_disconnected")


async def test_the_usage_figure_of_several_choices_counts_the_prompt_once(tmp_path: Path) -> None:
    async with setup(tmp_path, answering(ANSWER), xavier=True) as (cluster, _, served, client):
        first = {**SOURCES, "cpu_tier": 2, "computed": 8}
        legs = [record("x", sources=first, cached_tokens=2), record("x", times={**TIMES, "queued": 5.5, "scheduled": 6.5})]
        cluster.answer_records = lambda _: record("x", prompt_tokens=20, legs=legs)
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, n=2)
        async with aiohttp.ClientSession() as http, http.get(served.url + "/metrics") as response:
            assert 'xinference_usage_figures_total{figure="record",model="m"} 1.0' in await response.text()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2

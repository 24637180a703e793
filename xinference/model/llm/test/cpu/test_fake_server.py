"""The fake as a process: its routes, its faults, and what a client sees of them."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from xinference.model.llm.engine import EngineExited
from xinference.model.llm.fake import vocabulary
from xinference.model.llm.fake.config import FakeConfig, Faults
from xinference.model.llm.fake.network import continuation
from xinference.model.llm.test.replicas import MODEL, FakeReplica, eventually

HELLO = {"messages": [{"role": "user", "content": "hello the river"}], "temperature": 0}
LONG = {"prompt": "the river", "max_tokens": 500, "ignore_eos": True}
TOOLS = [
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}}
]


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[FakeReplica]:
    async with FakeReplica(tmp_path) as started:
        yield started


def chunks(events: list[str]) -> list[dict[str, Any]]:
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


async def get(replica: FakeReplica, path: str) -> tuple[int, str]:
    async with replica.session.get(path) as response:
        return response.status, await response.text()


async def test_the_small_routes_answer(replica: FakeReplica) -> None:
    assert await get(replica, "/health") == (200, "")
    assert json.loads((await get(replica, "/version"))[1]) == {"version": "0.32.0+fake"}
    (card,) = json.loads((await get(replica, "/v1/models"))[1])["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, 4096)
    assert (await get(replica, "/nothing"))[0] == 404
    status, tokenized = await replica.post("/tokenize", {"prompt": "a the river", "return_token_strs": True})
    assert (status, tokenized["count"], tokenized["token_strs"]) == (200, 3, ["a", " the", " river"])
    assert await replica.post("/detokenize", {"tokens": tokenized["tokens"]}) == (200, {"prompt": "a the river"})


async def test_tokenize_counts_what_a_chat_will_count(replica: FakeReplica) -> None:
    _, tokenized = await replica.post("/tokenize", {"messages": HELLO["messages"]})
    _, answer = await replica.post("/v1/chat/completions", HELLO)
    assert tokenized["count"] == answer["usage"]["prompt_tokens"]


async def test_streamed_and_whole_answers_have_the_same_text_and_usage(replica: FakeReplica) -> None:
    _, whole = await replica.post("/v1/chat/completions", HELLO)
    parts = chunks(await replica.events("/v1/chat/completions", {**HELLO, "stream_options": {"include_usage": True}}))
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in parts[1:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert parts[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert parts[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] % 16 == 0
    assert len({part["id"] for part in parts}) == 1


async def test_the_text_is_a_function_of_the_prompt_alone(replica: FakeReplica) -> None:
    expected = vocabulary.decode(continuation(vocabulary.encode("the river"), 10, 32), skip_specials=True)
    for _ in range(2):
        assert (await replica.complete("the river", max_tokens=10))["choices"][0]["text"] == expected


async def test_several_prompts_and_choices_are_numbered_and_counted(replica: FakeReplica) -> None:
    body = {"prompt": ["the river", "the stone"], "n": 2, "max_tokens": 4, "ignore_eos": True}
    _, answer = await replica.post("/v1/completions", body)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert len({c["text"] for c in answer["choices"]}) == 4
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": 8, "completion_tokens": 16, "total_tokens": 24}
    texts = [""] * 4
    for part in chunks(await replica.events("/v1/completions", body)):
        texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert texts == [c["text"] for c in answer["choices"]]


async def test_echo_gives_the_prompt_back_with_its_logprobs(replica: FakeReplica) -> None:
    body = {"prompt": "a the river", "max_tokens": 2, "echo": True, "logprobs": 2, "temperature": 0, "ignore_eos": True}
    _, answer = await replica.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert choice["text"].startswith("a the river")
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][3:]] == [3, 3]
    assert choice["logprobs"]["text_offset"] == [0, 1, 5, 11, 11 + len(choice["logprobs"]["tokens"][3])]
    _, silent = await replica.post("/v1/completions", {"prompt": "a the river", "max_tokens": 0, "echo": True})
    assert silent["choices"][0]["text"] == "a the river"
    assert silent["usage"]["completion_tokens"] == 0


async def test_chat_logprobs_name_each_token_and_its_rivals(replica: FakeReplica) -> None:
    _, answer = await replica.post("/v1/chat/completions", {**HELLO, "logprobs": True, "top_logprobs": 3, "max_tokens": 2})
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 2
    for entry in content:
        assert entry["bytes"] == list(entry["token"].encode())
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert sorted((top["logprob"] for top in entry["top_logprobs"]), reverse=True) == [t["logprob"] for t in entry["top_logprobs"]]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
async def test_a_tool_call_streams_its_arguments_in_pieces(replica: FakeReplica, choice: Any) -> None:
    body = {**HELLO, "tools": TOOLS, "tool_choice": choice}
    _, whole = await replica.post("/v1/chat/completions", body)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"zone": "river stone"}
    parts = [c["choices"][0] for c in chunks(await replica.events("/v1/chat/completions", body))]
    deltas = [d for p in parts for d in p["delta"].get("tool_calls", [])]
    assert deltas[0]["function"]["name"] == "get_time"
    assert all("name" not in d["function"] for d in deltas[1:])
    assert "".join(d["function"]["arguments"] for d in deltas[1:]) == call["function"]["arguments"]
    expected = "tool_calls" if choice == "required" else "stop"
    assert parts[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == expected


async def test_a_json_schema_is_obeyed(replica: FakeReplica) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    _, answer = await replica.post("/v1/chat/completions", {**HELLO, "response_format": wanted})
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"n": 1}


async def test_a_stop_string_frees_the_engine_at_once(replica: FakeReplica) -> None:
    text = (await replica.complete("the river", max_tokens=30, ignore_eos=True))["choices"][0]["text"]
    word = text.split()[5]
    stopped = (await replica.complete("the river", max_tokens=4000, ignore_eos=True, stop=word))["choices"][0]
    assert stopped["text"] == text[: text.index(word)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", word)
    assert await eventually(lambda: free(replica))


async def free(replica: FakeReplica) -> bool:
    state = await replica.state()
    return bool(state["free_blocks"] == state["num_blocks"] and not state["running"])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(replica: FakeReplica, stream: bool) -> None:
    await replica.faults(decode_ms=5)
    request = asyncio.create_task(replica.session.post("/v1/completions", json={**LONG, "stream": stream}))
    await eventually(lambda: busy(replica))
    if stream:
        (await request).close()
    else:
        request.cancel()
    await eventually(lambda: free(replica))
    assert len((await replica.state())["aborted"]) == 1


async def busy(replica: FakeReplica) -> bool:
    return bool((await replica.state())["running"])


async def test_metrics_count_under_vllm_s_names(replica: FakeReplica) -> None:
    body = await replica.complete("the river", max_tokens=7, ignore_eos=True)
    _, text = await get(replica, "/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = f'engine="0",model_name="{MODEL}"'
    assert float(values[f"vllm:generation_tokens_total{{{labels}}}"]) == 7
    assert float(values[f"vllm:prompt_tokens_total{{{labels}}}"]) == body["usage"]["prompt_tokens"]
    assert float(values[f'vllm:request_success_total{{{labels},finished_reason="length"}}']) == 1
    assert float(values[f"vllm:time_to_first_token_seconds_count{{{labels}}}"]) == 1
    assert float(values[f'vllm:inter_token_latency_seconds_bucket{{{labels},le="+Inf"}}']) == 6


async def test_a_replica_that_dies_in_a_stream_cuts_the_connection(replica: FakeReplica) -> None:
    await replica.faults(die_after_tokens=5)
    with pytest.raises(aiohttp.ClientError):
        await replica.events("/v1/completions", LONG)
    assert replica.process is not None
    assert await replica.process.wait() == -signal.SIGKILL


async def test_a_request_that_fails_in_the_engine_ends_its_stream_with_an_error(replica: FakeReplica) -> None:
    await replica.faults(error_after_tokens=3)
    events = chunks(await replica.events("/v1/completions", LONG))
    assert events[-1]["error"] == {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    assert (await replica.post("/v1/completions", LONG))[0] == 500


async def test_a_status_on_command_is_answered_and_healed(replica: FakeReplica) -> None:
    await replica.faults(status=503)
    assert (await replica.post("/v1/completions", LONG))[0] == 503
    await replica.faults()
    assert (await replica.post("/v1/completions", {**LONG, "max_tokens": 1}))[0] == 200


async def test_a_refusing_replica_closes_the_connection(replica: FakeReplica) -> None:
    await replica.faults(refuse=True)
    with pytest.raises(aiohttp.ClientError):
        await replica.post("/v1/completions", LONG)
    assert (await get(replica, "/health"))[0] == 200


async def test_a_hung_replica_answers_nothing_until_it_recovers(replica: FakeReplica) -> None:
    assert replica.process is not None
    await replica.faults(hang=True)
    assert not await replica.process.health(timeout=0.2)
    await replica.faults()
    assert await replica.process.health()


async def test_a_dead_engine_is_unhealthy_and_fails_requests(replica: FakeReplica) -> None:
    await replica.faults(dead=True)
    assert (await get(replica, "/health"))[0] == 503
    status, body = await replica.post("/v1/completions", LONG)
    assert (status, body["error"]["type"]) == (500, "InternalServerError")


async def test_an_unknown_fault_is_refused(replica: FakeReplica) -> None:
    status, body = await replica.post("/fake/faults", {"explode": True})
    assert status == 400
    assert "unknown field 'explode'" in body["error"]["message"]


async def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    replica = FakeReplica(tmp_path, config=FakeConfig(fail_start="no such weights"))
    try:
        with pytest.raises(EngineExited, match="RuntimeError: no such weights"):
            await replica.start()
    finally:
        await replica.stop()


async def test_a_slow_start_is_not_ready_before_its_time(tmp_path: Path) -> None:
    async with FakeReplica(tmp_path, config=FakeConfig(start_delay_seconds=0.4, faults=Faults(decode_ms=1))) as replica:
        assert (await replica.state())["faults"]["decode_ms"] == 1
        assert replica.process is not None
        assert await replica.process.stop(5) == 0


async def test_a_stubborn_replica_is_killed(tmp_path: Path) -> None:
    async with FakeReplica(tmp_path, config=FakeConfig(ignore_sigterm=True)) as replica:
        assert replica.process is not None
        assert await replica.process.stop(0.2) == -signal.SIGKILL
        assert not replica.process.running

"""Every row of the error table, as an openai client meets it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from xinference.api.auth import ADMIN, INFERENCE
from xinference.api.errors import ControlUnreachable
from xinference.api.keys import ApiKey, KeyRing
from xinference.api.test.fakes import FakeCluster, ScriptedReplica, answering, model, replica, serving
from xinference.errors import XinferenceError
from xinference.settings import Limits

MESSAGES: Any = [{"role": "user", "content": "x"}]
RING = KeyRing((ApiKey.of("root", ADMIN, INFERENCE), ApiKey.of("user", INFERENCE)))
TOO_LONG = {
    "error": {
        "message": "This model's maximum context length is 512 tokens. However, your prompt contains 600 input tokens.",
        "type": "BadRequestError",
        "param": "input_tokens",
        "code": 400,
    }
}
FAULT = {"error": {"message": "CUDA error at /opt/x/y.cu", "type": "InternalServerError", "param": None, "code": 500}}


@asynccontextmanager
async def client_of(cluster: FakeCluster, key: str = "root", **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(cluster, **options) as served, openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as client:
        yield client


async def failure(client: openai.AsyncOpenAI, **fields: Any) -> openai.APIStatusError:
    """The error that a chat ends with."""
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**{"model": "m", "messages": MESSAGES, **fields})
    return caught.value


def row(error: openai.APIStatusError) -> tuple[int, str | None, str | None, str | None]:
    assert error.request_id
    return error.status_code, error.type, error.code, error.param


@asynccontextmanager
async def engine(tmp_path: Path, body: Any, status: int = 200) -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster()
    async with ScriptedReplica(answering(body, status)).serving(tmp_path / "s"):
        await cluster.put(model(), replica("m-0", tmp_path / "s"))
        yield cluster


async def test_a_body_of_the_wrong_type_is_400_with_the_field() -> None:
    async with client_of(FakeCluster()) as client:
        assert row(await failure(client, messages="hello")) == (400, "invalid_request_error", None, "messages")


async def test_an_unknown_model_is_404() -> None:
    async with client_of(FakeCluster()) as client:
        assert row(await failure(client)) == (404, "invalid_request_error", "model_not_found", "model")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_beyond_the_context_is_context_length_exceeded(tmp_path: Path, stream: bool) -> None:
    async with engine(tmp_path, TOO_LONG, 400) as cluster, client_of(cluster) as client:
        assert row(await failure(client, stream=stream)) == (400, "invalid_request_error", "context_length_exceeded", "messages")


async def test_a_prompt_of_tokens_and_an_answer_beyond_the_context_are_refused_unasked(tmp_path: Path) -> None:
    async with engine(tmp_path, {}) as cluster, client_of(cluster) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="m", prompt=[1] * 4000, max_tokens=97)
    assert row(caught.value) == (400, "invalid_request_error", "context_length_exceeded", "prompt")


async def test_a_seed_that_would_kill_its_engine_is_refused_with_the_reason(tmp_path: Path) -> None:
    cluster = FakeCluster()
    await cluster.put({**model(), "seed_is_fatal": True}, replica("m-0", tmp_path / "nobody"))
    async with client_of(cluster) as client:
        error = await failure(client, seed=1)
    assert row(error) == (400, "invalid_request_error", "not_supported", "seed")
    assert "enable_chunked_prefill" in str(error)


async def test_a_value_over_a_limit_is_limit_exceeded() -> None:
    async with client_of(FakeCluster()) as client:
        assert row(await failure(client, n=9)) == (400, "invalid_request_error", "limit_exceeded", "n")


async def test_a_wrong_key_is_401() -> None:
    async with client_of(FakeCluster(), "wrong", keys=RING) as client:
        error = await failure(client)
    assert row(error) == (401, "authentication_error", "invalid_api_key", None)
    assert error.response.headers["www-authenticate"] == "Bearer"


async def test_a_key_without_the_scope_is_403() -> None:
    async with client_of(FakeCluster(), "user", keys=RING) as client:
        error = await failure(client, extra_headers={"x-xinference-replica": "m-0"})
    assert row(error)[:3] == (403, "permission_error", "insufficient_scope")


async def test_a_body_too_large_is_413() -> None:
    async with client_of(FakeCluster(), limits=Limits(body_bytes=500)) as client:
        error = await failure(client, messages=[{"role": "user", "content": "x" * 600}])
    assert row(error) == (413, "invalid_request_error", "request_too_large", None)


async def test_a_full_queue_is_429_with_retry_after(tmp_path: Path) -> None:
    waiting = asyncio.Event()

    async def script(_: Any, __: Any) -> Any:
        waiting.set()
        await asyncio.Event().wait()

    cluster = FakeCluster()
    async with ScriptedReplica(script).serving(tmp_path / "s"):
        await cluster.put(model(), replica("m-0", tmp_path / "s"))
        async with client_of(cluster, limits=Limits(queued_requests=1)) as client:
            first = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
            await waiting.wait()
            error = await failure(client)
            first.cancel()
    assert row(error) == (429, "rate_limit_error", "rate_limit_exceeded", None)
    assert error.response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    "replicas", [(), (replica("m-0", None, "loading"),), (replica("m-0", None, "creating"), replica("m-1", None, "failed"))], ids=len
)
async def test_a_model_that_is_loading_is_503_with_retry_after(replicas: Any) -> None:
    cluster = FakeCluster()
    await cluster.put(model(state="launching"), *replicas)
    async with client_of(cluster) as client:
        error = await failure(client)
    assert row(error) == (503, "server_error", "model_loading", "model")
    assert error.response.headers["retry-after"] == "5"


@pytest.mark.parametrize("state", ["failed", "unavailable"])
async def test_a_model_without_a_replica_is_503(state: str) -> None:
    cluster = FakeCluster()
    await cluster.put(model(state=state), replica("m-0", None, "failed"))
    async with client_of(cluster) as client:
        error = await failure(client)
    assert row(error) == (503, "server_error", "no_replica_available", None)
    assert error.response.headers["retry-after"] == "1"


async def test_a_fault_of_the_engine_is_500_without_details(tmp_path: Path) -> None:
    async with engine(tmp_path, FAULT, 500) as cluster, client_of(cluster) as client:
        error = await failure(client)
    assert row(error) == (500, "server_error", "internal_error", None)
    assert "CUDA" not in error.message
    assert error.response.headers["x-should-retry"] == "false"


async def test_a_fault_of_the_engine_is_logged_under_the_request_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with engine(tmp_path, FAULT, 500) as cluster, client_of(cluster) as client:
        await failure(client, extra_headers={"x-request-id": "job-7"})
    assert "request job-7: replica m-0 answered: CUDA error at /opt/x/y.cu" in caplog.text


async def test_an_engines_words_on_a_request_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="xinference")
    quoting = {"error": {"message": "cannot use 'swordfish'", "type": "Bad Request", "param": "body.x", "code": 400}}
    async with engine(tmp_path, quoting, 400) as cluster, client_of(cluster) as client:
        assert "swordfish" in (await failure(client)).message
    assert "swordfish" not in caplog.text


async def test_what_a_model_cannot_do_is_model_not_supported(tmp_path: Path) -> None:
    async with engine(tmp_path, {"detail": "Not Found"}, 404) as cluster, client_of(cluster) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="m", input="x")
    assert row(caught.value) == (400, "invalid_request_error", "model_not_supported", "model")


async def test_fields_that_only_the_server_sets_are_refused() -> None:
    async with client_of(FakeCluster()) as client:
        error = await failure(client, extra_body={"kv_transfer_params": {"do_remote_prefill": True}})
    assert row(error) == (400, "invalid_request_error", None, "kv_transfer_params")


@pytest.mark.parametrize(("uid", "code"), [("m-9", "not_found"), ("m-1", "no_replica_available")])
async def test_steering_to_a_replica_that_cannot_answer_says_so(uid: str, code: str) -> None:
    cluster = FakeCluster()
    await cluster.put(model(), replica("m-0", "/nowhere"), replica("m-1", None, "loading"))
    async with client_of(cluster) as client:
        error = await failure(client, extra_headers={"x-xinference-replica": uid})
    assert (error.code, error.param) == (code, "x-xinference-replica")


async def test_a_steered_request_goes_nowhere_else(tmp_path: Path) -> None:
    async with engine(tmp_path, {"choices": []}) as cluster, client_of(cluster) as client:
        await cluster.put(model(), replica("m-0", tmp_path / "s"), replica("m-1", tmp_path / "nobody"))
        error = await failure(client, extra_headers={"x-xinference-replica": "m-1"})
        assert error.code == "no_replica_available"
        for _ in range(3):
            await client.chat.completions.create(model="m", messages=MESSAGES, extra_headers={"x-xinference-replica": "m-0"})


async def test_without_a_supervisor_known_models_answer_and_unknown_ones_are_503(tmp_path: Path) -> None:
    async with engine(tmp_path, {"choices": []}) as cluster, client_of(cluster) as client:
        await client.chat.completions.create(model="m", messages=MESSAGES)
        away: XinferenceError = ControlUnreachable("the supervisor does not answer")
        cluster.fails = dict.fromkeys(("route_table", "route_changes", "report_replica_failure", "list_models"), away)
        await client.chat.completions.create(model="m", messages=MESSAGES)
        assert (await failure(client, model="other")).code == "supervisor_unavailable"
        with pytest.raises(openai.InternalServerError) as caught:
            await client.models.list()
        assert caught.value.status_code == 503


async def test_a_model_that_became_ready_a_moment_ago_is_found(tmp_path: Path) -> None:
    async with engine(tmp_path, {"choices": []}) as cluster, client_of(cluster) as client:
        # The poll is not told of this change.
        cluster.models["new"], cluster.tables["new"] = model("new"), [replica("new-0", tmp_path / "s")]
        await client.chat.completions.create(model="new", messages=MESSAGES)
        assert cluster.asked("route_table") == [("new",)]
        await client.chat.completions.create(model="m", messages=MESSAGES)
        assert cluster.asked("route_table") == [("new",)]

"""Both faces of the client against the fake server: the same contract, run twice."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import pytest

from xinference.client.async_client import AsyncClient
from xinference.client.calls import model_path
from xinference.client.completions import delta_text
from xinference.client.connection import Connection
from xinference.client.errors import ServerUnreachable, StreamBroken, UnexpectedAnswer, error_from_answer
from xinference.client.reading import RECONNECTS
from xinference.client.sync_client import Client
from xinference.client.test.fakes import KEY, FakeServer, mock_transport
from xinference.client.verbs import Verbs
from xinference.errors import (
    AuthenticationFailed,
    Conflict,
    EngineDied,
    InternalError,
    InvalidRequest,
    LaunchCancelled,
    LaunchFailed,
    ModelLoading,
    ModelNotFound,
)

Ask = Callable[..., Any]


def ask_sync(server: FakeServer, api_key: str | None = None) -> Ask:
    """Calls a verb of the synchronous face; an iterator is read to its end."""

    def ask(verb: str, *args: Any, **options: Any) -> Any:
        with Client("http://fake", api_key, transport=mock_transport(server)) as client:
            found = getattr(client, verb)(*args, **options)
            return list(found) if isinstance(found, Iterator) else found

    return ask


def ask_async(server: FakeServer, api_key: str | None = None) -> Ask:
    """Calls a verb of the asynchronous face; an iterator is read to its end."""

    async def run(verb: str, *args: Any, **options: Any) -> Any:
        async with AsyncClient("http://fake", api_key, transport=mock_transport(server)) as client:
            found = getattr(client, verb)(*args, **options)
            return [item async for item in found] if isinstance(found, AsyncIterator) else await found

    return lambda verb, *args, **options: asyncio.run(run(verb, *args, **options))


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture(params=[ask_sync, ask_async], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest, server: FakeServer) -> Ask:
    face: Callable[[FakeServer], Ask] = request.param
    return face(server)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xinference.client.reading.RECONNECT_SECONDS", 0.0)


def test_both_faces_have_the_same_verbs() -> None:
    public = [{name for name in dir(face) if not name.startswith("_")} for face in (Client, AsyncClient)]
    assert public[0] == public[1]
    assert {"launch", "wait", "events", "stream_chat"} | {name for name in dir(Verbs) if not name.startswith("_")} <= public[0]


def test_a_launch_that_is_waited_for_returns_once_the_model_serves(ask: Ask, server: FakeServer) -> None:
    assert ask("launch", model_uid="m", model_path="/models/m", replica=2, wait_ready=True) == "m"
    assert [target for _, target, _, _ in server.seen] == ["/v1/models", "/v1/models/m/events?after=0", "/v1/models/m"]
    assert [model["id"] for model in ask("models")] == ["m"]


def test_fields_that_were_left_out_are_not_sent(ask: Ask, server: FakeServer) -> None:
    ask("launch", model_uid="m", model_path="/models/m", n_gpu=None)
    assert "n_gpu" not in server.seen[0][2]


def test_a_failed_launch_raises_its_cause(ask: Ask, server: FakeServer) -> None:
    server.fails["m"] = "the weights are damaged"
    with pytest.raises(LaunchFailed, match="the weights are damaged"):
        ask("launch", model_uid="m", model_path="/models/m", wait_ready=True)


def test_a_cancelled_launch_raises_launch_cancelled(ask: Ask, server: FakeServer) -> None:
    server.holds.add("m")
    ask("launch", model_uid="m", model_path="/models/m")
    assert ask("cancel", "m") is True
    with pytest.raises(LaunchCancelled):
        ask("wait", "m")


def test_events_resume_behind_the_last_one_after_a_broken_stream(ask: Ask, server: FakeServer) -> None:
    ask("launch", model_uid="m", model_path="/models/m")
    server.cuts = 2
    assert [event["seq"] for event in ask("events", "m")] == [1, 2, 3]
    assert [target.rsplit("=")[-1] for _, target, _, _ in server.seen[1:]] == ["0", "1", "2"]


def test_events_are_given_up_when_the_stream_never_advances(ask: Ask, server: FakeServer) -> None:
    server.holds.add("m")
    ask("launch", model_uid="m", model_path="/models/m")
    with pytest.raises(StreamBroken):
        ask("events", "m", after=1)
    assert len(server.seen) == 1 + RECONNECTS + 1


def test_a_line_separator_inside_an_event_does_not_split_it(ask: Ask) -> None:
    ask("launch", model_uid="m", model_path="/models/m")
    assert ask("events", "m")[1]["message"] == "starting 'é\u2028'"


def test_a_dry_run_returns_the_plan_and_launches_nothing(ask: Ask, server: FakeServer) -> None:
    assert ask("plan", model_uid="m", model_path="/models/m", replica=2, enable_xavier=True)["xavier"]["blocks"] == 32
    assert server.models == {}


def test_a_model_is_scaled_and_terminated(ask: Ask, server: FakeServer) -> None:
    ask("launch", model_uid="m", model_path="/models/m")
    ask("scale", "m", 3)
    assert [replica["replica_uid"] for replica in ask("replicas", "m")] == ["m-0", "m-1", "m-2"]
    assert ask("terminate", "m", drain_seconds=2.5)["terminated"] is True
    assert server.seen[-1][1] == "/v1/models/m?drain=2.5"


def test_ids_with_a_slash_stay_one_part_of_the_path(ask: Ask) -> None:
    ask("launch", model_uid="org/name", model_path="/models/m")
    assert ask("model", "org/name")["id"] == "org/name"
    assert model_path("a/b", "replicas", "c d") == "/v1/models/a%2Fb/replicas/c%20d"


def test_logs_come_as_text_and_as_a_stream(ask: Ask) -> None:
    ask("launch", model_uid="m", model_path="/models/m")
    assert ask("logs", "m", "m-0", tail=2) == "line 0 of m-0\nline 1 of m-0\n"
    assert ask("follow_logs", "m", tail=2) == ["line 0 of all", "line 1 of all"]


def test_the_cache_is_described_and_cleared(ask: Ask) -> None:
    ask("launch", model_uid="m", model_path="/models/m", replica=2, enable_xavier=True)
    assert ask("xavier", "m")["replicas"][0]["peers"] == [{"replica_uid": "m-1", "attached": True, "reason": None}]
    assert ask("clear", "m")["status"] == "cleared"


def test_a_completion_is_steered_and_explained_by_headers_only(ask: Ask, server: FakeServer) -> None:
    ask("launch", model_uid="m", model_path="/models/m")
    answer = ask("generate", "m", "hello", max_tokens=4, replica_uid="m-1", debug=True)
    assert answer["xinference"]["replica"] == "m-1"
    assert server.seen[-1][2] == {"model": "m", "prompt": "hello", "max_tokens": 4}


@pytest.mark.parametrize("verb", ["stream_chat", "stream_generate"])
def test_a_stream_ends_with_its_usage(ask: Ask, verb: str) -> None:
    ask("launch", model_uid="m", model_path="/models/m")
    prompt: Any = "one two" if verb == "stream_generate" else [{"role": "user", "content": "one two"}]
    chunks = ask(verb, "m", prompt)
    assert [delta_text(chunk) for chunk in chunks] == ["one ", "two ", ""]
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


def test_an_error_inside_a_stream_is_raised_as_what_it_is(ask: Ask) -> None:
    ask("launch", model_uid="m", model_path="/models/m")
    with pytest.raises(EngineDied, match="the engine died"):
        ask("stream_generate", "m", "die")


def test_a_stream_that_is_cut_is_not_taken_for_a_short_answer(ask: Ask) -> None:
    ask("launch", model_uid="m", model_path="/models/m")
    with pytest.raises(StreamBroken):
        ask("stream_generate", "m", "cut")


def test_refusals_carry_param_code_and_request_id(ask: Ask) -> None:
    with pytest.raises(ModelNotFound) as caught:
        ask("stream_generate", "nobody", "hello")
    assert (caught.value.param, caught.value.code, caught.value.__notes__) == ("model", "model_not_found", ["request id: request-1"])
    ask("launch", model_uid="m", model_path="/models/m")
    with pytest.raises(Conflict):
        ask("launch", model_uid="m", model_path="/models/m")


@pytest.mark.parametrize("face", [ask_sync, ask_async])
def test_the_key_is_sent_as_a_bearer_token(face: Callable[..., Ask]) -> None:
    with pytest.raises(AuthenticationFailed):
        face(FakeServer(key=KEY))("models")
    assert face(FakeServer(key=KEY), KEY)("models") == []


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (503, b'{"error": {"message": "m", "code": "model_loading"}}', ModelLoading),
        (400, b'{"error": {"message": "m", "code": "something_new"}}', InvalidRequest),
        (400, b'{"error": {"message": "m", "code": 400}}', InvalidRequest),
        (500, b'{"error": {"message": "m", "code": null}}', InternalError),
        (502, b"<html>Bad gateway</html>", UnexpectedAnswer),
        (400, b'{"detail": "of another API"}', UnexpectedAnswer),
        (404, b'{"error": "text"}', UnexpectedAnswer),
    ],
)
def test_an_error_is_known_by_its_code_then_by_its_status(status: int, body: bytes, kind: type[Exception]) -> None:
    assert type(error_from_answer(status, body, None)) is kind


def test_an_answer_of_another_kind_of_server_is_said_to_be_one() -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, text="<html>hello</html>"))
    with Client("http://fake", transport=transport) as client, pytest.raises(UnexpectedAnswer, match="is this an Xinference server"):
        client.models()


def test_a_broken_connection_names_the_endpoint() -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused", request=request)

    with Client("http://fake:1", transport=httpx2.MockTransport(refuse)) as client, pytest.raises(ServerUnreachable, match="http://fake:1"):
        client.models()


def test_the_endpoint_comes_from_the_argument_then_the_environment_then_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XINFERENCE_ENDPOINT", raising=False)
    assert Connection.of(None, None).endpoint == "http://127.0.0.1:9997"
    monkeypatch.setenv("XINFERENCE_ENDPOINT", "http://elsewhere:1/")
    assert Connection.of(None, None).endpoint == "http://elsewhere:1"
    assert Connection.of("host:2", None).endpoint == "http://host:2"


def test_only_this_machine_is_reached_past_a_proxy() -> None:
    local = ("http://127.0.0.1:1", "localhost:1", "http://[::1]:1")
    assert all(Connection.of(address, None).is_local for address in local)
    assert not Connection.of("http://10.0.0.1", None).is_local


def test_a_launch_that_can_never_work_is_refused_before_anything_is_sent(ask: Ask, server: FakeServer) -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'enable_xavier'") as caught:
        ask("launch", model_path="/models/m", enable_xavir=True)
    assert caught.value.param == "enable_xavir"
    assert server.seen == []


def test_upstreams_spellings_are_accepted_by_a_launch(ask: Ask, server: FakeServer) -> None:
    ask(
        "launch", model_uid="m", model_path="/m", model_engine="vLLM", model_type="LLM", size_in_billions=7, n_gpu="auto", max_model_len=512
    )
    assert server.seen[0][2]["max_model_len"] == 512


def test_the_fake_engines_arguments_are_left_to_the_server_to_check(ask: Ask, server: FakeServer) -> None:
    ask("launch", model_uid="m", model_path="/m", model_engine="fake", engine_config={"start_seconds": 1})
    assert server.seen[0][2]["engine_config"] == {"start_seconds": 1}

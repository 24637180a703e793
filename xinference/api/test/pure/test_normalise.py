"""A replica's refusals in this API's error table. The bodies are those that vLLM's server really sends."""

import json
from typing import Any

import pytest

from xinference.api.body import CHAT, COMPLETIONS, EMBEDDINGS
from xinference.api.normalise import refusal, sanitise, stream_refusal
from xinference.errors import EngineDied, InternalError, NoReplicaAvailable

BAD, BUSY, OURS = "invalid_request_error", "rate_limit_error", "server_error"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def body(message: str, kind: str = "BadRequestError", param: str | None = None, code: int = 400) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


def row(status: int, content: bytes, kind: Any = CHAT) -> tuple[int, str, str | None, str | None]:
    error = refusal(status, content, kind).error
    return error.status, error.type, error.code, error.param


CONTEXT = (
    "This model's maximum context length is 512 tokens. However, your prompt contains 600 input tokens, which exceeds this limit even "
    "without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=600)"
)
CHARACTERS = (
    "This model's maximum context length is 512 tokens. However, your prompt contains 9000 characters (more than 8000 characters, which "
    "is the upper bound for 512 input tokens). Please reduce the length of the input prompt. (parameter=input_text, value=9000)"
)
OUTPUT = "max_tokens=5000 cannot be greater than max_model_len=512. Please request fewer output tokens. (parameter=max_tokens, value=5000)"
NO_ROOM = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
LOGPROBS = "Requested sample logprobs of 30, which is greater than max allowed: 20 (parameter=logprobs, value=30)"
INPUT = "Input length (9) exceeds model's maximum context length (8)."
INVALID = "1 validation error:\n  {'type': 'int_type', 'loc': 'body.seed', 'msg': 'Input should be a valid integer', 'input': 'x'}"


ROWS = [
    # status and body of the replica, kind of request, then status, type, code and param of ours
    (400, body(CONTEXT, param="input_tokens"), CHAT, (400, BAD, "context_length_exceeded", "messages")),
    (400, body(CONTEXT, param="input_tokens"), COMPLETIONS, (400, BAD, "context_length_exceeded", "prompt")),
    (400, body(CHARACTERS, param="input_text"), CHAT, (400, BAD, "context_length_exceeded", "messages")),
    (400, body(INPUT), EMBEDDINGS, (400, BAD, "context_length_exceeded", "input")),
    (
        400,
        body(NO_ROOM, param="max_tokens"),
        CHAT,
        (400, BAD, "context_length_exceeded", "messages"),
    ),
    (400, body("max_tokens must be at least 1, got -3."), COMPLETIONS, (400, BAD, "context_length_exceeded", "prompt")),
    (400, body(OUTPUT, param="max_tokens"), CHAT, (400, BAD, "limit_exceeded", "max_tokens")),
    (400, body(OUTPUT.replace("max_tokens", "max_completion_tokens")), CHAT, (400, BAD, "limit_exceeded", "max_completion_tokens")),
    (400, body(LOGPROBS, param="logprobs"), COMPLETIONS, (400, BAD, "limit_exceeded", "logprobs")),
    (400, body(INVALID, "Bad Request", "body.seed"), CHAT, (400, BAD, None, "seed")),
    (422, body("cannot fetch", "UnprocessableEntityError", None, 422), CHAT, (400, BAD, None, None)),
    (404, body("The model `x` does not exist.", "NotFoundError", "model", 404), CHAT, (404, BAD, "model_not_found", "model")),
    (404, b'{"detail":"Not Found"}', EMBEDDINGS, (400, BAD, "model_not_supported", "model")),
    (404, body("Not Found", "Not Found", None, 404), EMBEDDINGS, (400, BAD, "model_not_supported", "model")),
    (405, b'{"detail":"Method Not Allowed"}', EMBEDDINGS, (400, BAD, "model_not_supported", "model")),
    (501, body("no Chat Completions API", "NotImplementedError", None, 501), CHAT, (400, BAD, "model_not_supported", "model")),
    (413, b"Content Too Large", CHAT, (413, BAD, "request_too_large", None)),
    (429, body("slow down", "Too Many Requests", None, 429), CHAT, (429, BUSY, "rate_limit_exceeded", None)),
    (503, body("The engine is currently busy", "Service Unavailable", None, 503), CHAT, (429, BUSY, "rate_limit_exceeded", None)),
    (503, body("Please retry", "ServiceUnavailableError", None, 503), CHAT, (503, OURS, "no_replica_available", None)),
    (500, body("Internal server error", "InternalServerError", None, 500), CHAT, (500, OURS, "internal_error", None)),
    (500, b"Internal Server Error", CHAT, (500, OURS, "internal_error", None)),
    (500, body(DEAD, "InternalServerError", None, 500), CHAT, (503, OURS, "no_replica_available", None)),
    (401, b'{"error":"Unauthorized"}', CHAT, (500, OURS, "internal_error", None)),
]


@pytest.mark.parametrize(("status", "content", "kind", "expected"), ROWS)
def test_every_refusal_has_its_row(status: int, content: bytes, kind: Any, expected: tuple[int, str, str | None, str | None]) -> None:
    assert row(status, content, kind) == expected


def test_the_engines_words_reach_the_client_without_its_own_suffix() -> None:
    message = refusal(400, body(CONTEXT), CHAT).error.message
    assert message.startswith("This model's maximum context length is 512 tokens.")
    assert message.endswith("Please reduce the length of the input prompt.")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("'Input should be a valid integer'", "input should be a valid integer"), ('"It\'s too long"', "it's too long")],
)
def test_a_validation_error_gives_its_reason_and_not_the_value(reason: str, expected: str) -> None:
    message = f"2 validation errors:\n  {{'type': 'x', 'loc': 'body.seed', 'msg': {reason}, 'input': 'swordfish'}}\n  {{'msg': 'other'}}"
    assert refusal(400, body(message, "Bad Request", "body.seed"), CHAT).error.message == f"'seed': {expected}"


def test_a_fault_of_the_engine_says_nothing_of_its_inside() -> None:
    error = refusal(500, body("CUDA error in /opt/secret/kernel.cu at 0x7f00deadbeef", "InternalServerError", None, 500), CHAT).error
    assert "secret" not in error.message
    assert "CUDA" not in error.message


@pytest.mark.parametrize(
    ("status", "content", "elsewhere", "dead"),
    [
        (400, body("bad"), False, False),
        (429, body("busy"), True, False),
        (503, body("busy", code=503), True, False),
        (500, body("oops", code=500), False, False),
        (500, body(DEAD, code=500), True, True),
    ],
)
def test_only_what_another_replica_may_do_better_goes_elsewhere(status: int, content: bytes, elsewhere: bool, dead: bool) -> None:
    found = refusal(status, content, CHAT)
    assert (found.elsewhere, found.dead) == (elsewhere, dead)


@pytest.mark.parametrize("content", [b"", b"<html>", b"null", b"[1]", b'{"error":null}', b'{"error":[]}', b"\xff\xfe", b"[" * 5000])
def test_an_answer_of_no_known_shape_is_still_an_error(content: bytes) -> None:
    assert row(400, content)[0] == 400
    assert row(500, content)[2] == "internal_error"


def test_an_engine_that_dies_after_the_first_token_is_engine_dead() -> None:
    error = {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}
    found = stream_refusal(error, CHAT, started=True)
    assert isinstance(found.error, EngineDied)
    assert found.error.code == "engine_dead"
    assert found.dead


def test_an_engine_that_dies_before_the_first_token_can_be_replaced() -> None:
    error = {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}
    found = stream_refusal(error, CHAT, started=False)
    assert isinstance(found.error, NoReplicaAvailable)
    assert found.elsewhere


def test_a_request_that_fails_in_the_middle_of_its_stream_is_an_internal_error() -> None:
    found = stream_refusal(
        {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}, CHAT, started=True
    )
    assert isinstance(found.error, InternalError)
    assert not found.dead


def test_a_stream_error_with_a_client_status_is_the_clients() -> None:
    found = stream_refusal({"message": "bad grammar", "type": "BadRequestError", "param": None, "code": 400}, CHAT, started=False)
    assert found.error.status == 400


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("<function f at 0x7f1234567890>", "<function f at <address>>"),
        ("cannot read /home/user/models/x/config.json now", "cannot read <path> now"),
        ("connect to tcp://10.0.0.7:5555 failed", "connect to <endpoint> failed"),
        ("peer 10.1.2.3:8000 is down", "peer <endpoint> is down"),
        ("temperature must be in [0, 2], got 3.5", "temperature must be in [0, 2], got 3.5"),
        ("a ratio of 1/2 and/or less", "a ratio of 1/2 and/or less"),
        ('bad\nTraceback (most recent call last):\n  File "/x/y.py", line 3, in f\n    boom()\nValueError: no', "bad\n\nValueError: no"),
        ('see\n  File "/x/y.py", line 3, in f\n    boom()', "see"),
    ],
)
def test_text_for_clients_loses_what_tells_of_this_machine(message: str, expected: str) -> None:
    assert sanitise(message) == expected


def test_text_for_clients_is_not_endless() -> None:
    assert len(sanitise("x" * 100_000)) < 1100

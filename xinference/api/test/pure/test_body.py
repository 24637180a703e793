"""What becomes of a request body before a replica sees it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference.api.body import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    RESERVED_FIELDS,
    TOKENIZE,
    Kind,
    affinity_prefix,
    decode,
    deeper_than,
    prepare,
)
from xinference.errors import InvalidRequest, LimitExceeded, NotSupported
from xinference.settings import Limits

HEX = "0123456789abcdef" * 2
LIMITS = Limits()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}


def sent(kind: Kind, body: dict[str, Any], limits: Limits = LIMITS) -> dict[str, Any]:
    """The body that a replica gets."""
    found: dict[str, Any] = json.loads(prepare(kind, json.dumps(body).encode(), HEX, limits).content)
    return found


def refused(kind: Kind, body: Any, limits: Limits = LIMITS) -> InvalidRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidRequest) as caught:
        prepare(kind, raw, HEX, limits)
    return caught.value


@pytest.mark.parametrize("raw", [b"", b"{", b"{}x", b'{"a":NaN}', b'{"a":"\xff"}', b'{"a":"\\ud800"}', b'{"a":1e999}', b"\xef\xbb\xbf{}"])
def test_what_is_not_json_is_refused_as_invalid_json(raw: bytes) -> None:
    error = refused(CHAT, raw)
    assert (error.status, error.code, error.param) == (400, "invalid_json", None)


@pytest.mark.parametrize("raw", [b"[]", b'"text"', b"7", b"null", b"true"])
def test_a_body_that_is_no_object_is_refused_as_invalid_json(raw: bytes) -> None:
    error = refused(CHAT, raw)
    assert (error.code, error.message) == ("invalid_json", "the request body must be a JSON object")


def test_a_replica_gets_one_value_for_a_key_that_was_given_twice() -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"x"}],"n":1,"n":2}'
    assert prepare(CHAT, raw, HEX, LIMITS).content.count(b'"n":') == 1


def test_a_body_nested_to_the_limit_passes_and_one_level_more_does_not() -> None:
    def nested(depth: int) -> bytes:
        return b'{"model":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    assert decode(nested(8), 8)
    with pytest.raises(LimitExceeded):
        decode(nested(9), 8)


def test_a_body_nested_so_deep_that_no_parser_follows_is_refused() -> None:
    with pytest.raises(LimitExceeded):
        decode(b"[" * 100_000, 64)


def test_many_brackets_side_by_side_are_not_depth() -> None:
    assert decode(b'{"a":[' + b"[]," * 1000 + b"[]]}", 3)


JSON = st.recursive(
    st.none() | st.integers(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
)


@given(JSON, st.integers(min_value=1, max_value=8))
def test_depth_is_that_of_the_deepest_container(value: Any, limit: int) -> None:
    def depth(here: Any) -> int:
        children = here.values() if isinstance(here, dict) else here if isinstance(here, list) else None
        return 0 if children is None else 1 + max(map(depth, children), default=0)

    if isinstance(value, dict | list):
        assert deeper_than(value, limit) == (depth(value) > limit)


@pytest.mark.parametrize("field", RESERVED_FIELDS)
@pytest.mark.parametrize("kind", [CHAT, COMPLETIONS])
def test_clients_may_not_set_reserved_fields(kind: Kind, field: str) -> None:
    error = refused(kind, {**chat(), "prompt": "x", field: {"do_remote_prefill": True}})
    assert (error.status, error.param) == (400, field)


def test_the_accounting_id_is_all_that_is_put_into_the_body_of_a_plain_request() -> None:
    body = chat(temperature=0.5, top_k=3, unknown_to_us={"a": [1]})
    assert sent(CHAT, body) == {**body, "kv_transfer_params": {"xavier": {"v": 1, "request": HEX}}}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (EMBEDDINGS, {"model": "m", "input": "x"}),
        (TOKENIZE, {"model": "m", "prompt": "x"}),
        (DETOKENIZE, {"model": "m", "tokens": [1, 2]}),
    ],
)
def test_requests_that_do_not_generate_pass_unchanged(kind: Kind, body: dict[str, Any]) -> None:
    assert sent(kind, body) == body


def test_a_stream_always_asks_its_replica_for_usage() -> None:
    plain = prepare(CHAT, json.dumps(chat(stream=True)).encode(), HEX, LIMITS)
    assert json.loads(plain.content)["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
    assert (plain.stream, plain.wants_usage) == (True, False)


def test_a_client_that_asks_for_usage_gets_it() -> None:
    body = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    found = prepare(CHAT, json.dumps(body).encode(), HEX, LIMITS)
    assert json.loads(found.content)["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert found.wants_usage


def test_continuous_usage_without_usage_stays_off_as_the_engine_has_it() -> None:
    body = chat(stream=True, stream_options={"continuous_usage_stats": True})
    assert sent(CHAT, body)["stream_options"]["continuous_usage_stats"] is False


def test_stream_options_without_stream_are_refused() -> None:
    assert refused(CHAT, chat(stream_options={"include_usage": True})).param == "stream_options"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 9}, "n"),
        ({"best_of": 9}, "best_of"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    ],
)
def test_a_chat_over_a_limit_is_refused_with_the_field(body: dict[str, Any], param: str) -> None:
    error = refused(CHAT, chat(**body))
    assert (error.status, error.code, error.param) == (400, "limit_exceeded", param)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"logprobs": 21}, "logprobs"), ({"prompt": ["x"] * 129}, "prompt"), ({"prompt": [[1]] * 129}, "prompt")],
)
def test_a_completion_over_a_limit_is_refused_with_the_field(body: dict[str, Any], param: str) -> None:
    error = refused(COMPLETIONS, {"model": "m", "prompt": "x", **body})
    assert (error.code, error.param) == ("limit_exceeded", param)


def test_values_at_their_limits_pass() -> None:
    body = chat(n=8, logprobs=True, top_logprobs=20, stop=["a"] * 4, messages=[{"role": "user", "content": "x"}] * 2048)
    assert sent(CHAT, body)["n"] == 8
    assert sent(COMPLETIONS, {"model": "m", "prompt": [["1"][0]] * 128, "logprobs": 20})["logprobs"] == 20


def test_one_prompt_of_many_token_ids_is_one_prompt() -> None:
    assert sent(COMPLETIONS, {"model": "m", "prompt": list(range(5000))})["prompt"][:3] == [0, 1, 2]


def test_an_empty_prompt_list_is_refused() -> None:
    assert refused(COMPLETIONS, {"model": "m", "prompt": []}).param == "prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
        ({"model": None}, "model"),
        ({"n": "2"}, "n"),
        ({"n": 0}, "n"),
        ({"temperature": "0.5"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": "all"}, "stream_options"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": [1]}, "stop.0"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"top_logprobs": -2}, "top_logprobs"),
        ({"best_of": 9.0}, "best_of"),
        ({"prompt_logprobs": 1000.0}, "prompt_logprobs"),
        ({"prompt_logprobs": "1000"}, "prompt_logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(10**400)}, "seed"),
        ({"temperature": 10**400}, "temperature"),
        ({"a_field_of_the_engine": 2**63}, "a_field_of_the_engine"),
    ],
)
def test_a_wrong_type_is_refused_with_the_path_of_the_field(body: dict[str, Any], param: str) -> None:
    error = refused(CHAT, chat(**body))
    assert (error.status, error.type, error.code, error.param) == (400, "invalid_request_error", None, param)


@pytest.mark.parametrize("prompt", [[5, -1], [5, 2**31]])
def test_a_token_id_that_no_vocabulary_holds_is_refused_with_its_bound(prompt: list[int]) -> None:
    error = refused(COMPLETIONS, {"model": "m", "prompt": prompt})
    assert (error.status, error.param) == (400, "prompt.1")
    assert "than or equal to" in error.message


def test_a_missing_model_or_prompt_is_named() -> None:
    assert refused(CHAT, {"messages": [{"role": "user", "content": "x"}]}).param == "model"
    assert refused(COMPLETIONS, {"model": "m"}).param == "prompt"


def test_a_refusal_does_not_repeat_what_the_client_wrote() -> None:
    assert "swordfish" not in refused(CHAT, chat(messages=[{"role": "user", "content": {"swordfish": 1}}])).message


@pytest.mark.parametrize(
    "content",
    ["text", "", None, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ["plain"], [{"type": "refusal", "refusal": "no"}]],
)
def test_text_in_all_its_forms_passes(content: Any) -> None:
    body = chat(messages=[{"role": "developer", "content": content, "name": "n"}])
    assert sent(CHAT, body)["messages"] == body["messages"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "text", "text": "x", "image_url": "http://x/"},
        {"type": "prompt_embeds", "data": "gASV"},
        {"type": "text", "text": "x", "uuid": "1"},
    ],
)
def test_parts_that_make_an_engine_fetch_or_unpickle_are_refused(part: dict[str, Any]) -> None:
    body = chat(messages=[{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "y"}, part]}])
    with pytest.raises(NotSupported) as caught:
        prepare(CHAT, json.dumps(body).encode(), HEX, LIMITS)
    assert caught.value.param == "messages.1.content.1"


def test_the_number_of_choices_is_that_of_each_prompt() -> None:
    found = prepare(COMPLETIONS, json.dumps({"model": "m", "prompt": ["a", "b"], "n": 3}).encode(), HEX, LIMITS)
    assert found.num_choices == 3


def test_requests_with_a_common_beginning_share_their_prefix() -> None:
    system = {"role": "system", "content": "s" * 4000}
    first = affinity_prefix({"messages": [system, {"role": "user", "content": "one"}]})
    second = affinity_prefix({"messages": [system, {"role": "user", "content": "two"}]})
    assert first == second


def test_different_salts_do_not_share_a_prefix() -> None:
    assert affinity_prefix({"prompt": "x", "cache_salt": "a"}) != affinity_prefix({"prompt": "x", "cache_salt": "b"})


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2], [[1, 2], [3]]])
def test_every_kind_of_prompt_has_a_prefix(prompt: Any) -> None:
    assert affinity_prefix({"prompt": prompt}) not in ("", "\x00")

"""A replica's stream, rewritten."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference.api.sse import EventTooLarge, StreamRewriter, json_event, text_event

ROLE = b'data: {"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
WORD = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"word"},"finish_reason":null}]}\n\n'
STOP = b'data: {"id":"1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"


def run(*pieces: bytes, limit: int = 10_000) -> tuple[bytes, StreamRewriter]:
    rewriter = StreamRewriter(limit)
    return b"".join(rewriter.feed(piece) for piece in pieces), rewriter


def test_ordinary_events_pass_byte_by_byte() -> None:
    sent, rewriter = run(ROLE, WORD + WORD, STOP)
    assert sent == ROLE + WORD + WORD + STOP
    assert (rewriter.done, rewriter.usage, rewriter.error) == (False, None, None)


def test_the_usage_chunk_and_the_end_are_held_back() -> None:
    sent, rewriter = run(ROLE, STOP, USAGE, DONE)
    assert sent == ROLE + STOP
    assert rewriter.done
    assert rewriter.usage is not None
    assert rewriter.usage["usage"]["prompt_tokens"] == 3


def test_usage_inside_a_chunk_with_text_stays_there() -> None:
    chunk = b'data: {"choices":[{"delta":{"content":"x"}}],"usage":{"prompt_tokens":3}}\n\n'
    sent, rewriter = run(chunk)
    assert (sent, rewriter.usage) == (chunk, None)


def test_a_null_usage_is_no_usage_chunk() -> None:
    chunk = b'data: {"choices":[],"usage":null}\n\n'
    assert run(chunk)[0] == chunk


@pytest.mark.parametrize(
    "error", [{"message": "gone", "type": "InternalServerError", "param": None, "code": 500}, "Unauthorized"], ids=["object", "text"]
)
def test_an_error_event_is_held_back(error: Any) -> None:
    sent, rewriter = run(WORD, b"data: " + json.dumps({"error": error}).encode() + b"\n\n", DONE)
    assert sent == WORD
    assert rewriter.error is not None
    assert rewriter.error["message"] in ("gone", "Unauthorized")


@pytest.mark.parametrize("text", ['"usage":{"a":1}', '{"error":"x"}', "[DONE]", "data: [DONE]", "error", "usage"])
def test_text_of_the_model_is_never_taken_for_the_protocol(text: str) -> None:
    chunk = b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}, separators=(",", ":")).encode() + b"\n\n"
    sent, rewriter = run(chunk)
    assert (sent, rewriter.done, rewriter.usage, rewriter.error) == (chunk, False, None, None)


def test_comments_are_dropped() -> None:
    assert run(b": keep-alive\n\n", WORD, b": ping\n\n" + STOP)[0] == WORD + STOP


def test_other_fields_of_an_event_pass() -> None:
    event = b"event: message\nid: 7\n" + WORD
    assert run(event)[0] == event


@pytest.mark.parametrize("line_end", [b"\r\n", b"\r"])
def test_other_line_ends_are_understood(line_end: bytes) -> None:
    stream = (WORD + STOP + USAGE + DONE).replace(b"\n", line_end)
    rewriter = StreamRewriter(10_000)
    sent = b"".join(rewriter.feed(stream[index : index + 1]) for index in range(len(stream))) + rewriter.feed(
        b"\n" if line_end == b"\r" else b""
    )
    assert sent == WORD + STOP
    assert rewriter.done


def test_an_event_without_end_is_refused_at_the_limit() -> None:
    with pytest.raises(EventTooLarge):
        run(b"data: " + b"x" * 200, limit=100)


def test_data_that_is_no_json_passes() -> None:
    event = b'data: "error" is not json\n\n'
    assert run(event)[0] == event


@given(st.lists(st.sampled_from([ROLE, WORD, STOP, USAGE, b": ping\n\n"]), max_size=6), st.data())
def test_where_the_network_cuts_a_stream_changes_nothing(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(events) + DONE
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    sent, rewriter = run(*pieces)
    assert sent == b"".join(event for event in events if event in (ROLE, WORD, STOP))
    assert rewriter.done
    assert (rewriter.usage is not None) == (USAGE in events)


@given(st.lists(st.sampled_from([ROLE, WORD, STOP]), max_size=4), st.integers(0, 60))
def test_what_goes_out_always_ends_with_a_whole_event(events: list[bytes], cut: int) -> None:
    sent = StreamRewriter(10_000).feed(b"".join(events) + WORD[:cut])
    assert sent == b"" or sent.endswith(b"\n\n")


def test_a_json_event_carries_its_id() -> None:
    assert json_event({"a": 1}, 7) == b'id: 7\ndata: {"a":1}\n\n'
    assert json_event({"a": "x\ny"}) == b'data: {"a":"x\\ny"}\n\n'


def test_lines_of_a_text_become_lines_of_one_event() -> None:
    assert text_event("one\ntwo\r\nthree\n") == b"data: one\ndata: two\ndata: three\n\n"

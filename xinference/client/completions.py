"""Bodies of inference requests. Pure."""

from typing import Any, Final

from xinference.client.calls import Call, Json, completion

CHAT_PATH: Final = "/v1/chat/completions"
GENERATE_PATH: Final = "/v1/completions"
# A completion that is not streamed answers once, at its end.
COMPLETION_PATIENCE_SECONDS: Final = 540.0


def chat_call(model_uid: str, messages: list[Json], options: Json) -> Call:
    """A chat completion; see ``_call`` for the options."""
    return _call(CHAT_PATH, {"model": model_uid, "messages": messages}, options)


def generate_call(model_uid: str, prompt: str | list[int], options: Json) -> Call:
    """A text completion; see ``_call`` for the options."""
    return _call(GENERATE_PATH, {"model": model_uid, "prompt": prompt}, options)


def _call(path: str, body: Json, options: Json) -> Call:
    """Options are fields of the OpenAI request, None left out; ``replica_uid`` and ``debug`` become headers.

    A stream always asks for its usage: the token counts and sources of a streamed request are in its last chunk only.
    """
    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    replica_uid = fields.pop("replica_uid", None)
    debug = bool(fields.pop("debug", False))
    if fields.get("stream"):
        fields.setdefault("stream_options", {"include_usage": True})
    return completion(path, body | fields, replica_uid, debug, COMPLETION_PATIENCE_SECONDS)


def delta_text(chunk: Json) -> str:
    """The text that one chunk of a stream, chat or completion, adds."""
    choices = chunk.get("choices") or [{}]
    choice = choices[0]
    if "delta" in choice:
        return choice["delta"].get("content") or ""
    return choice.get("text") or ""

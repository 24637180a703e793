"""From the bytes of an inference request to the body a replica gets: pure, and all refusals happen here.

The body is decoded once, checked, changed and encoded anew, so that a replica can never read something else out of it than was
checked (duplicate keys, odd encodings). No other field than those named here is touched.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from xinference.api.errors import OverLimit
from xinference.api.keys import tenant_salt
from xinference.api.schemas import (
    Body,
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
    validate,
)
from xinference.errors import InvalidRequest, NotSupported
from xinference.settings import Limits

Json = dict[str, Any]

# What only this server or the engine's own plugins may set: where cache comes from, and tensors that an engine would unpickle.
RESERVED_FIELDS: Final = ("kv_transfer_params", "ec_transfer_params", "prompt_embeds", "vllm_xargs")
# Media parts make an engine fetch addresses that a client chose; they stay out until there is an allow-list for that.
TEXT_PARTS: Final = frozenset({"text", "refusal", "thinking", "input_text", "output_text"})
MEDIA_KEYS: Final = frozenset(
    {
        "image_url",
        "audio_url",
        "video_url",
        "input_audio",
        "input_image",
        "image_pil",
        "image_embeds",
        "audio_embeds",
        "video_embeds",
        "prompt_embeds",
        "uuid",
    }
)


@dataclass(frozen=True)
class Kind:
    """One proxied endpoint.

    Args:
        name: label in metrics.
        summary: for people.
        path: where a replica serves it.
        schema: its body.
        generates: whether it runs the engine and answers with usage, maybe streamed.
        prompt_field: the field that a prompt which is too long is blamed on.
    """

    name: str
    path: str
    schema: type[Body]
    summary: str
    generates: bool = False
    prompt_field: str = "prompt"


CHAT: Final = Kind(
    "chat.completions", "/v1/chat/completions", ChatCompletionBody, "Answer a conversation", generates=True, prompt_field="messages"
)
COMPLETIONS: Final = Kind("completions", "/v1/completions", CompletionBody, "Continue a text", generates=True)
EMBEDDINGS: Final = Kind("embeddings", "/v1/embeddings", EmbeddingBody, "Embed texts", prompt_field="input")
TOKENIZE: Final = Kind("tokenize", "/tokenize", TokenizeBody, "Token ids of a text or a conversation")
DETOKENIZE: Final = Kind("detokenize", "/detokenize", DetokenizeBody, "Text of token ids", prompt_field="tokens")
KINDS: Final = (CHAT, COMPLETIONS, EMBEDDINGS, TOKENIZE, DETOKENIZE)
SALTED: Final = (CHAT, COMPLETIONS, EMBEDDINGS)  # those that use the engine's prefix cache


@dataclass(frozen=True)
class Prepared:
    """A checked request.

    Args:
        model: the model uid asked for.
        content: the body for the replica.
        prefix: what routes similar prompts to one replica; see ``affinity_prefix``.
        stream: whether the client wants a stream.
        wants_usage: whether the client sees the usage figure.
        num_choices: answers asked for to each prompt; each is an engine request of its own, with an accounting record.
        request_id: the client's own id from the body, if any.
        seeded: whether it samples with a seed of its own.
        prompt_tokens: length of the longest prompt if it is given as token ids, all of which the engine takes.
        max_tokens: how long the answer may become, if the client says so.
    """

    model: str
    content: bytes
    prefix: str
    stream: bool = False
    wants_usage: bool = False
    num_choices: int = 1
    request_id: str | None = None
    seeded: bool = False
    prompt_tokens: int | None = None
    max_tokens: int | None = None


def prepare(kind: Kind, raw: bytes, request_hex: str, limits: Limits, tenant: str | None = None) -> Prepared:
    """Check a request and make the replica's body.

    Args:
        request_hex: 32 hex digits under which the engine accounts for this request.
        tenant: whose cache alone it may use and fill; None shares with all.

    Raises:
        InvalidRequest: or one of its kinds; ``param`` is the field at fault.
    """
    body = decode(raw, limits.json_depth)
    refuse_reserved(body)
    check_limits(kind, body, limits)
    validate(kind.schema, body)
    refuse_media(body)
    refuse_no_answer(body)
    if tenant is not None and kind in SALTED:
        body["cache_salt"] = tenant_salt(tenant, body.get("cache_salt"))
    prefix = affinity_prefix(body)
    if not kind.generates:
        return Prepared(body["model"], msgspec.json.encode(body), prefix)
    stream = bool(body.get("stream"))
    wants_usage = ask_for_usage(body, stream)
    body["kv_transfer_params"] = {"xavier": {"v": 1, "request": request_hex}}
    return Prepared(
        model=body["model"],
        content=msgspec.json.encode(body),
        prefix=prefix,
        stream=stream,
        wants_usage=wants_usage,
        num_choices=body.get("n") or 1,
        request_id=body.get("request_id"),
        seeded=body.get("seed") is not None and body.get("temperature") != 0,
        prompt_tokens=None if body.get("truncate_prompt_tokens") is not None else num_prompt_tokens(body.get("prompt")),
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
    )


def decode(raw: bytes, max_depth: int) -> Json:
    """Parse a JSON object.

    Raises:
        InvalidRequest: not JSON, not UTF-8, or not an object (code invalid_json).
        OverLimit: nested deeper than ``max_depth``.
    """
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the request body must be a JSON object", code="invalid_json")
    # Depth cannot exceed the number of opening brackets, which is counted at memory speed; only bodies with many are walked.
    if raw.count(b"[") + raw.count(b"{") > max_depth and deeper_than(body, max_depth):
        raise _too_deep(max_depth)
    return body


def _too_deep(max_depth: int) -> OverLimit:
    return OverLimit(f"the request body is nested deeper than {max_depth} levels", limit="json_depth")


def deeper_than(value: Any, max_depth: int) -> bool:
    """Whether containers are nested deeper than this. The outermost counts as 1."""
    level = [value]
    for _ in range(max_depth):
        level = [child for container in level for child in _children(container) if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(container: Json | list[Any]) -> Iterator[Any]:
    return iter(container.values()) if isinstance(container, dict) else iter(container)


def refuse_reserved(body: Json) -> None:
    """Raises InvalidRequest for fields that clients may not send."""
    for name in RESERVED_FIELDS:
        if body.get(name) is not None:
            raise InvalidRequest(f"'{name}' cannot be set by clients", param=name)


def check_limits(kind: Kind, body: Json, limits: Limits) -> None:
    """Raises OverLimit for values above a limit. Wrong types are left to ``validate``."""
    for field, value in body.items():
        if isinstance(value, int) and not _SMALLEST <= value <= _LARGEST:
            raise InvalidRequest(f"'{field}' is no number of 64 bits", param=field)
    for field, limit in _BOUNDED_NUMBERS.items():
        if field != "logprobs" or kind is COMPLETIONS:
            _at_most(body, field, limit, getattr(limits, limit))
    for field, limit in _BOUNDED_LISTS.items():
        _at_most_items(body, field, limit, getattr(limits, limit))
    for field in ("prompt", "input"):
        prompts = num_prompts(body.get(field))
        if prompts > limits.prompts:
            raise OverLimit(f"'{field}' holds {prompts} prompts, the limit is {limits.prompts}", param=field, limit="prompts")
        if prompts == 0:
            raise InvalidRequest(f"'{field}' is empty", param=field)


# Of the engine's own fields, which pass unread, too: a larger number fails on the way between its processes.
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
# Field and the limit that it is under, by its name in ``Limits``.
_BOUNDED_NUMBERS: Final = {
    "n": "choices",
    "best_of": "choices",
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
    "prompt_logprobs": "logprobs",
}
_BOUNDED_LISTS: Final = {"messages": "messages", "stop": "stop_strings", "tools": "tools"}


def _at_most(body: Json, field: str, limit: str, most: int) -> None:
    value = body.get(field)
    if isinstance(value, int) and not isinstance(value, bool) and (value > most or value == -1):
        shown = "the whole vocabulary" if value == -1 else str(value)
        raise OverLimit(f"'{field}' is {shown}, the limit is {most}", param=field, limit=limit)


def _at_most_items(body: Json, field: str, limit: str, most: int) -> None:
    value = body.get(field)
    if isinstance(value, list) and len(value) > most:
        raise OverLimit(f"'{field}' has {len(value)} entries, the limit is {most}", param=field, limit=limit)


def num_prompts(prompt: Any) -> int:
    """How many prompts a ``prompt`` or ``input`` value holds: a text or one list of token ids is one."""
    if not isinstance(prompt, list):
        return 1
    if prompt and isinstance(prompt[0], int):
        return 1
    return len(prompt)


def num_prompt_tokens(prompt: Any) -> int | None:
    """Tokens of the longest of the prompts that are given as token ids; None if there is none."""
    if not isinstance(prompt, list) or not prompt:
        return None
    if isinstance(prompt[0], int):
        return len(prompt)
    return max((len(each) for each in prompt if isinstance(each, list)), default=None)


def refuse_no_answer(body: Json) -> None:
    """Raises InvalidRequest for an answer of no tokens, which only an echoed prompt may have.

    What the engine says of an answer without room for a token is then always about the context.
    """
    if body.get("max_tokens") == 0 and body.get("max_completion_tokens") is None and not body.get("echo"):
        raise InvalidRequest("'max_tokens' is 0; it must be at least 1 unless 'echo' is set", param="max_tokens")


def refuse_media(body: Json) -> None:
    """Raises NotSupported for message parts that are not text."""
    for index, message in enumerate(body.get("messages") or ()):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for place, part in enumerate(content):
            if isinstance(part, dict) and (part["type"] not in TEXT_PARTS or not MEDIA_KEYS.isdisjoint(part)):
                param = f"messages.{index}.content.{place}"
                raise NotSupported("message parts other than text are not accepted by this server", param=param)


def ask_for_usage(body: Json, stream: bool) -> bool:
    """Make the replica report usage in a stream; returns whether the client asked for it too.

    Raises:
        InvalidRequest: ``stream_options`` without ``stream``.
    """
    options = body.get("stream_options")
    if not stream:
        if options is not None:
            raise InvalidRequest("'stream_options' needs 'stream': true", param="stream_options")
        return True
    wanted = bool(options and options.get("include_usage"))
    # The engine honours continuous_usage_stats only together with include_usage, which is always on towards it.
    continuous = wanted and bool(options and options.get("continuous_usage_stats"))
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": continuous}
    return wanted


PREFIX_CHARACTERS: Final = 2048


def affinity_prefix(body: Json) -> str:
    """The first characters of the prompt, by which requests with a common beginning are sent to one replica.

    Only equality matters to the caller; the text must not be logged.
    """
    parts: list[str] = [str(body.get("cache_salt") or "")]
    room = PREFIX_CHARACTERS
    for piece in _texts(body):
        parts.append(piece[:room])
        room -= len(piece)
        if room <= 0:
            break
    return "\x00".join(parts)


def _texts(body: Json) -> Iterator[str]:
    for message in body.get("messages") or ():
        content = message.get("content")
        yield str(message.get("role"))
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    prompt = body.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else prompt
    if isinstance(first, str):
        yield first
    elif isinstance(first, list):
        yield ",".join(map(str, first[: PREFIX_CHARACTERS // 4]))

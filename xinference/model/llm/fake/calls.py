"""Bodies of OpenAI requests, checked and turned into sequences to generate. Raises ``Refused`` as vLLM's server refuses."""

import json
from dataclasses import dataclass
from typing import Any

from xinference.model.llm.fake import guided, refusal, vocabulary
from xinference.model.llm.fake.guided import ToolCall
from xinference.model.llm.fake.refusal import Refused, invalid
from xinference.model.llm.fake.request import Sampling

DEFAULT_COMPLETION_TOKENS = 16
MAX_CHOICES = 16384
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 4


@dataclass(frozen=True)
class Call:
    """One request of a client.

    Every prompt is generated ``n`` times; the choice with index ``i`` belongs to prompt ``i // n``.
    """

    chat: bool
    model: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: Sampling
    stop: tuple[str, ...]
    keep_stop: bool
    stream: bool
    include_usage: bool
    usage_in_every_chunk: bool
    logprobs: int | None  # alternatives to report per token; None = none at all
    echo: bool
    suppress_output: bool  # echo with max_tokens=0
    tools: tuple[ToolCall, ...]
    named_tool: bool
    salt: str
    request_id: str
    xavier_request: bytes | None
    return_token_ids: bool


class Fields:
    """Typed access to a body's fields; a wrong type is a 400 that names the field."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise refusal.invalid_field("body", "Input should be a valid dictionary or object to extract fields from", body)
        self.body: dict[str, Any] = body

    def integer(self, name: str, default: int) -> int:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise refusal.invalid_field(f"body.{name}", "Input should be a valid integer", value)
        return value

    def number(self, name: str, default: float) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refusal.invalid_field(f"body.{name}", "Input should be a valid number", value)
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise refusal.invalid_field(f"body.{name}", "Input should be a valid boolean", value)
        return bool(value)

    def string(self, name: str, default: str = "") -> str:
        value = self.body.get(name)
        if value is not None and not isinstance(value, str):
            raise refusal.invalid_field(f"body.{name}", "Input should be a valid string", value)
        return value or default

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.body.get(name)
        if value is not None and not isinstance(value, dict):
            raise refusal.invalid_field(f"body.{name}", "Input should be a valid dictionary", value)
        return value or {}

    def strings(self, name: str) -> tuple[str, ...]:
        value = self.body.get(name)
        values = [value] if isinstance(value, str) else (value or [])
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise refusal.invalid_field(f"body.{name}", "Input should be a valid string", value)
        if len(values) > MAX_STOP_STRINGS:
            raise refusal.invalid_field(f"body.{name}", f"List should have at most {MAX_STOP_STRINGS} items", value)
        return tuple(v for v in values if v)


def completion_call(body: Any, served: str, max_model_len: int) -> Call:
    """Raises Refused."""
    fields = Fields(body)
    if fields.string("suffix"):
        raise Refused("suffix is only supported for models with FIM completion rendering", param="suffix")
    prompts = tuple(_prompts(fields.body.get("prompt"), max_model_len))
    count = fields.body.get("logprobs")
    logprobs = None if count is None else _bounded_logprobs(fields.integer("logprobs", 0), "logprobs")
    echo = fields.boolean("echo")
    asked = fields.integer("max_tokens", DEFAULT_COMPLETION_TOKENS)
    suppress = echo and asked == 0
    return _call(fields, served, max_model_len, prompts, chat=False, asked=1 if suppress else asked, asked_name="max_tokens",
                 logprobs=logprobs, echo=echo, suppress=suppress, calls=(), named=False)  # fmt: skip


def chat_call(body: Any, served: str, max_model_len: int) -> Call:
    """Raises Refused."""
    fields = Fields(body)
    messages = checked_messages(fields.body.get("messages"))
    tools, choice = _tools(fields)
    logprobs = None
    if fields.boolean("logprobs"):
        logprobs = _bounded_logprobs(fields.integer("top_logprobs", 0), "top_logprobs")
    elif fields.integer("top_logprobs", 0):
        raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    calls = tuple(guided.tool_calls(tools, choice, text_of(messages[-1]))) if tools else ()
    prompt = tuple(render(messages, tools if choice != "none" else []))
    name = "max_completion_tokens" if fields.body.get("max_completion_tokens") is not None else "max_tokens"
    asked = fields.integer(name, max(1, max_model_len - len(prompt)))
    return _call(fields, served, max_model_len, (prompt,), chat=True, asked=asked, asked_name=name, logprobs=logprobs, echo=False,
                 suppress=False, calls=calls, named=isinstance(choice, dict))  # fmt: skip


def _call(
    fields: Fields, served: str, max_model_len: int, prompts: tuple[tuple[int, ...], ...], *, chat: bool, asked: int, asked_name: str,
    logprobs: int | None, echo: bool, suppress: bool, calls: tuple[ToolCall, ...], named: bool,
) -> Call:  # fmt: skip
    model = fields.string("model", served)
    if model != served:
        raise refusal.no_such_model(model, served)
    n = fields.integer("n", 1)
    if not 1 <= n <= MAX_CHOICES:
        raise Refused(f"n must be at least 1, got {n}." if n < 1 else f"n must be at most {MAX_CHOICES}, got {n}.")
    if n > 1 and fields.body.get("temperature") == 0:
        raise Refused(f"n must be 1 when using greedy sampling, got {n}.")
    if asked > max_model_len:
        raise refusal.too_many_output_tokens(asked_name, asked, max_model_len)
    longest = max(len(prompt) for prompt in prompts)
    if longest > max_model_len:
        raise refusal.prompt_too_long(max_model_len, longest)
    max_tokens = min(asked, max_model_len - longest)
    if max_tokens < 1:
        raise invalid(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    _check_sampling(fields)
    options = fields.mapping("stream_options")
    stream = fields.boolean("stream")
    if options and not stream:
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    return Call(
        chat=chat, model=model, prompts=prompts, n=n, stop=fields.strings("stop"), keep_stop=fields.boolean("include_stop_str_in_output"),
        stream=stream, include_usage=bool(options.get("include_usage")), usage_in_every_chunk=bool(options.get("continuous_usage_stats")),
        logprobs=logprobs, echo=echo, suppress_output=suppress, tools=calls, named_tool=named, salt=fields.string("cache_salt"),
        request_id=fields.string("request_id"), xavier_request=_xavier_request(fields.mapping("kv_transfer_params")),
        return_token_ids=fields.boolean("return_token_ids"), sampling=_sampling(fields, max_tokens, calls, logprobs),
    )  # fmt: skip


def _sampling(fields: Fields, max_tokens: int, calls: tuple[ToolCall, ...], logprobs: int | None) -> Sampling:
    forced: list[int] = []
    if calls:
        forced = vocabulary.encode("".join(call.arguments for call in calls), specials=False)
    elif (text := _structured(fields)) is not None:
        forced = vocabulary.encode(text, specials=False)
    greedy = fields.body.get("temperature") == 0
    return Sampling(
        max_tokens=max_tokens, ignore_eos=fields.boolean("ignore_eos"), choice=0 if greedy else fields.integer("seed", 0) % 2**32,
        num_candidates=1 + (logprobs or 0), forced=tuple(forced), stop_token_ids=frozenset(fields.body.get("stop_token_ids") or ()),
        prompt_logprobs=fields.body.get("prompt_logprobs") is not None or (fields.boolean("echo") and logprobs is not None),
    )  # fmt: skip


def _structured(fields: Fields) -> str | None:
    wanted = fields.mapping("response_format")
    kind = wanted.get("type", "text")
    if kind == "json_object":
        return json.dumps({"answer": "river stone"})
    if kind == "json_schema":
        if not isinstance(wanted.get("json_schema"), dict):
            raise invalid("When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format")
        return json.dumps(guided.instance_of(wanted["json_schema"].get("schema") or {}))
    if kind != "text":
        raise refusal.invalid_field("body.response_format.type", "Input should be 'text', 'json_object' or 'json_schema'", kind)
    return None


def _check_sampling(fields: Fields) -> None:
    temperature = fields.number("temperature", 1.0)
    if not 0 <= temperature <= 2:
        text = "must be non-negative" if temperature < 0 else "must be in [0, 2]"
        raise invalid(f"temperature {text}, got {temperature}.", "temperature", temperature)
    top_p = fields.number("top_p", 1.0)
    if not 0 < top_p <= 1:
        raise invalid(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= fields.number(name, 0.0) <= 2:
            raise Refused(f"{name} must be in [-2, 2], got {fields.number(name, 0.0)}.")


def _bounded_logprobs(count: int, name: str) -> int:
    if count < 0:
        raise invalid(f"`{name}` must be a positive value or -1.", name, count)
    if count > MAX_LOGPROBS:
        raise invalid(f"Requested sample logprobs of {count}, which is greater than max allowed: {MAX_LOGPROBS}", "logprobs", count)
    return count


def _prompts(prompt: Any, max_model_len: int) -> list[tuple[int, ...]]:
    """All forms of a prompt as token ids: a text, texts, token ids, lists of token ids."""
    if prompt in (None, ""):
        raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if prompt == []:
        raise Refused("You must pass at least one prompt")
    items = [prompt] if isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(prompt[0], int)) else prompt
    if not isinstance(items, list) or len({type(item) for item in items}) > 1:
        raise refusal.invalid_field(_prompt_at_fault(prompt), "Input should be a valid string", prompt)
    found = []
    for item in items:
        if isinstance(item, str):
            found.append(tuple(vocabulary.encode(item)))
        elif isinstance(item, list) and item and all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in item):
            if max(item) >= vocabulary.VOCAB_SIZE:
                raise Refused(f"Token id {max(item)} is out of vocabulary")
            found.append(tuple(item))
        else:
            raise refusal.invalid_field(_prompt_at_fault(prompt), "Input should be a valid string", item)
        if not found[-1]:
            raise Refused("The decoder prompt cannot be empty")
    return found


def _prompt_at_fault(prompt: Any) -> str:
    """vLLM names the first complaint of the first form it tries, a list of token ids: the first item that is none."""
    if not isinstance(prompt, list):
        return "body.prompt"
    return f"body.prompt.{next((index for index, item in enumerate(prompt) if not isinstance(item, int)), 0)}"


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Raises Refused."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise refusal.invalid_field("body.messages", "Input should be a valid list", messages)
    if not messages:
        raise Refused("Cannot apply chat template to an empty conversation. Provide at least one message.")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise refusal.invalid_field(f"body.messages.{index}.role", "Field required", message)
    return messages


def text_of(message: dict[str, Any]) -> str:
    """The text of a message; parts of other kinds are refused."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refusal.invalid_field("body.messages.content", "Input should be a valid string", content)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise Refused("this is not a multimodal model")
        texts.append(str(part.get("text", "")))
    return "\n".join(texts)


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation: bool = True) -> list[int]:
    """The chat template: one marked-up piece per message, tools first. Message text cannot smuggle in special tokens."""
    tokens: list[int] = []

    def say(role: str, text: str) -> None:
        tokens.append(vocabulary.MESSAGE_START)
        tokens.extend(vocabulary.encode(f"{role}\n{text}", specials=False))
        tokens.append(vocabulary.MESSAGE_END)

    if tools:
        say("tools", json.dumps([tool["function"] for tool in tools]))
    for message in messages:
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        say(message["role"], text_of(message) + calls)
    if generation:
        tokens.append(vocabulary.MESSAGE_START)
        tokens.extend(vocabulary.encode("assistant\n"))
    return tokens


def _tools(fields: Fields) -> tuple[list[dict[str, Any]], Any]:
    """Tools and the choice among them ("none" when there are none)."""
    tools = fields.body.get("tools")
    choice = fields.body.get("tool_choice")
    if tools == []:
        raise invalid("`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools")
    if tools is None:
        if choice not in (None, "none"):
            raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
        return [], "none"
    valid = isinstance(tools, list) and all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str) for t in tools
    )
    if not valid:
        raise refusal.invalid_field("body.tools", "Input should be a list of functions with a name", tools)
    choice = "auto" if choice is None else choice
    if isinstance(choice, dict):
        function = choice.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid("Expected field `function` in `tool_choice`!", "tool_choice.function")
        if function["name"] not in [t["function"]["name"] for t in tools]:
            raise invalid("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")
    elif choice not in ("none", "auto", "required"):
        text = f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.'
        raise invalid(text, "tool_choice")
    return tools, choice


def _xavier_request(params: dict[str, Any]) -> bytes | None:
    """The accounting identity that the route put into the body."""
    value = params.get("xavier")
    request = value.get("request") if isinstance(value, dict) else None
    if not isinstance(request, str):
        return None
    try:
        return bytes.fromhex(request)
    except ValueError:
        return None

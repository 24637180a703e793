"""The request bodies as types: what /openapi.json shows, and what is checked before a replica is asked.

Only fields that this server understands or bounds are listed; the engine's further sampling parameters pass as they are. Types are
checked strictly: an engine that coerces "0.5" to 0.5 for one field and not for another would make the accepted language unclear.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xinference.errors import InvalidRequest

Json = dict[str, Any]
# What engines, and the formats between their processes, can hold; a larger number fails somewhere inside.
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Number = Integer | Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """Base: strict types, further fields allowed."""

    model_config = ConfigDict(strict=True, extra="allow")


class ContentPart(Body):
    type: str
    text: str | None = None


class Message(Body):
    role: str = Field(description="system, developer, user, assistant or tool")
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class ResponseFormat(Body):
    type: str = Field(description="text, json_object, json_schema or structural_tag")
    json_schema: Json | None = None


class Sampling(Body):
    """Fields that chat and text completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Integer | None = Field(default=None, ge=1)
    max_tokens: Integer | None = Field(default=None, ge=0)
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    stop: str | list[str] | None = None
    seed: Integer | None = None
    logit_bias: dict[str, Number] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = None
    cache_salt: str | None = None
    priority: Integer | None = None
    best_of: Integer | None = Field(default=None, ge=1)
    prompt_logprobs: Integer | None = Field(default=None, ge=0)
    truncate_prompt_tokens: Integer | None = Field(default=None, ge=-1)
    request_id: str | None = Field(default=None, description="taken as the request id when there is no x-request-id header")


class ChatCompletionBody(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Integer | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(default=None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None


class CompletionBody(Sampling):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Integer | None = Field(default=None, ge=0)
    echo: bool | None = None
    suffix: str | None = None


class EmbeddingBody(Body):
    model: str
    input: str | list[str] | list[TokenId] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = Field(default=None, ge=1)
    user: str | None = None


class TokenizeBody(Body):
    """Either ``prompt`` or ``messages``."""

    model: str
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str
    tokens: list[TokenId]


class ReplicaCount(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    count: int = Field(default=1, ge=1)


class Scale(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    replica: int = Field(ge=1)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every error is answered with."""

    error: ErrorDetail


def validate(schema: type[Body], body: Json) -> None:
    """Check the types of a body.

    Raises:
        InvalidRequest: with the dotted path of the first field at fault. The offending value is not repeated: it may be a prompt.
    """
    try:
        schema.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        places = [
            (field_path(body, each["loc"], each["type"] == "missing") or "", each["msg"], not each["type"].endswith("_type"))
            for each in found
        ]
        # A union has an error for each of its types; the one that got furthest is of the type that was meant.
        here = (place for place in places if place[0].startswith(places[0][0]))
        param, message, _ = max(here, key=lambda place: (place[0].count("."), place[2]))
        raise InvalidRequest(f"'{param}': {message[:1].lower()}{message[1:]}", param=param or None) from None


def field_path(body: Any, location: tuple[int | str, ...], missing: bool = False) -> str | None:
    """The dotted path of a location, without the names of types that a union adds to it.

    A step belongs to the path when the body really has it; the last one also when it is the field that is missing.
    """
    parts: list[str] = []
    here = body
    for index, step in enumerate(location):
        if _has(here, step):
            here = here[step]
        elif not (missing and index == len(location) - 1):
            continue
        parts.append(str(step))
    return ".".join(parts) or None


def _has(value: Any, step: int | str) -> bool:
    if isinstance(value, dict):
        return step in value
    return isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value)

"""What a replica answers when it refuses or fails, turned into this API's error table. Pure.

Seen from vLLM 0.21 to 0.33: {"error": {"message", "type", "param", "code": <int>}} from its handlers, {"error": "text"} from its
middleware, {"detail": "text"} from the web framework, plain text from the HTTP server. Its ``code`` repeats the status, its messages
may end in " (parameter=..., value=...)", and quote paths of the machine it runs on.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from xinference.api.body import Kind
from xinference.errors import (
    ContextLengthExceeded,
    EngineDied,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    ModelNotFound,
    NoReplicaAvailable,
    NotSupported,
    RateLimited,
    RequestTooLarge,
    XinferenceError,
)

MAX_MESSAGE_CHARACTERS: Final = 1000
ENGINE_FAILED: Final = "the engine failed on this request; the server's log has the details under the request id"
REPLICA_DIED: Final = "the replica that was answering died; the answer is incomplete"

_PARAMETER_SUFFIX: Final = re.compile(r"\s*\(parameter=[\w.]+(?:, value=.*)?\)\s*$", re.DOTALL)
_VALIDATION: Final = re.compile(r"""\d+ validation errors?:.*?'msg': (?:'([^']*)'|"([^"]*)")""", re.DOTALL)
_TRACEBACK: Final = re.compile(r"Traceback \(most recent call last\):.*?(?=\n\S+(?:Error|Exception)\b|\Z)", re.DOTALL)
_FRAME: Final = re.compile(r'\n?[ \t]*File "[^"\n]*", line \d+(?:, in [^\n]*)?(?:\n[ \t]+[^\n]*)?')
_ADDRESS: Final = re.compile(r"\b0x[0-9a-fA-F]{4,}\b")
_ENDPOINT: Final = re.compile(r"\b(?:tcp|ipc|http|https|unix)://[^\s'\")]+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_PATH: Final = re.compile(r"(?<![\w.:/<])/(?:[\w.@+~-]+/)+[\w.@+~-]*")
_CONTEXT: Final = re.compile(r"maximum (?:context|model) length|longer than the maximum", re.I)
# The engine cuts an answer down to what the prompt leaves of the context; requests for no answer at all do not reach it.
_NO_ROOM: Final = re.compile(r"max_tokens must be at least 1, got (?:0|-\d+)\b")
_LIMIT: Final = re.compile(r"greater than max allowed|maximum allowed|must be at most|cannot be greater than max_model_len", re.I)
_ENGINE_DEAD: Final = re.compile(r"EngineCore encountered an issue|engine (?:core )?(?:is )?dead|EngineDeadError", re.I)
_BUSY: Final = re.compile(r"currently busy|backlog|queue|overloaded|too many requests", re.I)
_MAX_TOKEN_FIELDS: Final = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True)
class Refusal:
    """A replica's answer other than success.

    Args:
        error: what the client gets.
        elsewhere: whether another replica may do better.
        dead: whether the replica's engine is gone for good.
        detail: the replica's own words, for the log only.
    """

    error: XinferenceError
    elsewhere: bool = False
    dead: bool = False
    detail: str = ""


def refusal(status: int, body: bytes, kind: Kind) -> Refusal:
    """Translate an answer with a status of 400 or more."""
    message, param = _read(body)
    return _classify(status, message, param, kind)


def stream_refusal(error: dict[str, Any], kind: Kind, started: bool) -> Refusal:
    """Translate an error event.

    Args:
        started: whether the client has got a part of the answer; then a dead engine is engine_dead, and nobody can take over.
    """
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    param = error.get("param")
    found = _classify(status, str(error.get("message") or ""), str(param) if param else None, kind)
    if not started:
        return found
    if found.dead or isinstance(found.error, NoReplicaAvailable):
        return Refusal(EngineDied(REPLICA_DIED), dead=found.dead, detail=found.detail)
    return Refusal(found.error, dead=found.dead, detail=found.detail)


def _read(body: bytes) -> tuple[str, str | None]:
    """The message and the field at fault of an error body of any of the shapes."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body[: 4 * MAX_MESSAGE_CHARACTERS].decode(errors="replace"), None
    error = decoded.get("error", decoded.get("detail", decoded.get("message"))) if isinstance(decoded, dict) else decoded
    if isinstance(error, dict):
        param = error.get("param")
        return str(error.get("message") or ""), str(param) if param else None
    return str(error or ""), None


def _classify(status: int, message: str, param: str | None, kind: Kind) -> Refusal:
    if status < 500:
        return Refusal(_client_error(status, message, param, kind), elsewhere=status == 429, detail=message)
    if status == 501:
        return Refusal(NotSupported(_not_served(kind), code="model_not_supported", param="model"), detail=message)
    if status == 503:
        busy = _BUSY.search(message) is not None
        error = RateLimited("the model is at its limit; try again later") if busy else NoReplicaAvailable("the replica cannot answer now")
        return Refusal(error, elsewhere=True, detail=message)
    if _ENGINE_DEAD.search(message):
        return Refusal(NoReplicaAvailable("the replica died and no other is ready"), elsewhere=True, dead=True, detail=message)
    return Refusal(InternalError(ENGINE_FAILED), detail=message)


def _client_error(status: int, message: str, param: str | None, kind: Kind) -> XinferenceError:
    field = _field(param)
    text = sanitise(_words(_PARAMETER_SUFFIX.sub("", message), field)) or "the engine refused the request"
    if status in (401, 403, 407):
        # The client's key was accepted here; that the replica refuses ours is a fault of this server.
        return InternalError(ENGINE_FAILED)
    if status == 404:
        return ModelNotFound(text) if field == "model" else NotSupported(_not_served(kind), code="model_not_supported", param="model")
    if status == 405:
        return NotSupported(_not_served(kind), code="model_not_supported", param="model")
    if status == 413:
        return RequestTooLarge(text)
    if status == 429:
        return RateLimited("the model is at its limit; try again later")
    if _LIMIT.search(message):
        named = next((name for name in _MAX_TOKEN_FIELDS if f"{name}=" in message), field)
        return LimitExceeded(text, param=named)
    if _NO_ROOM.search(message):
        return ContextLengthExceeded("the prompt fills the model's context and leaves no room for an answer", param=kind.prompt_field)
    if _CONTEXT.search(message):
        return ContextLengthExceeded(text, param=kind.prompt_field)
    return InvalidRequest(text, param=field)


def _words(message: str, field: str | None) -> str:
    """The reason of a validation error, which comes as a printed dictionary together with the value that was refused."""
    found = _VALIDATION.match(message)
    if found is None:
        return message
    reason = found[1] or found[2] or ""
    return f"'{field}': {reason[:1].lower()}{reason[1:]}" if field else reason


def _not_served(kind: Kind) -> str:
    return f"this model does not serve {kind.path}"


def _field(param: str | None) -> str | None:
    """The client's name of a field: the web framework puts "body." before it."""
    if param is None:
        return None
    return param.removeprefix("body.").removeprefix("body") or None


def sanitise(message: str) -> str:
    """Text for a client: without stack frames, memory addresses, paths and endpoints of this machine, and not endless."""
    text = _TRACEBACK.sub("", message)
    text = _FRAME.sub("", text)
    text = _ENDPOINT.sub("<endpoint>", text)
    text = _PATH.sub("<path>", text)
    text = _ADDRESS.sub("<address>", text).strip()
    if len(text) > MAX_MESSAGE_CHARACTERS:
        text = text[:MAX_MESSAGE_CHARACTERS] + " …"
    return text

"""What can go wrong between a client and a server, beside what the server itself reports.

    XinferenceError (xinference/errors.py: what a server answers, rebuilt here from its ``error`` object)
    ├── ServerUnreachable     nobody answers at the endpoint, or the connection broke before the answer
    ├── AnswerTimeout         connected, but no answer within the timeout
    ├── StreamBroken          a stream ended before its last event: what arrived is incomplete
    └── UnexpectedAnswer      an answer that is not of this API: wrong endpoint, or a proxy in between

They share the server's base so that ``except XinferenceError`` catches whatever a call can raise.
"""

import json
from typing import Any, Final

from xinference import errors
from xinference.errors import XinferenceError

SHOWN_BODY_CHARACTERS: Final = 200


class ServerUnreachable(XinferenceError):
    default_code = "server_unreachable"


class AnswerTimeout(XinferenceError):
    default_code = "answer_timeout"


class StreamBroken(XinferenceError):
    default_code = "stream_broken"


class UnexpectedAnswer(XinferenceError):
    default_code = "unexpected_answer"


def _platform_errors() -> list[type[XinferenceError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, XinferenceError)]


_KIND_BY_CODE: Final = {kind.default_code: kind for kind in _platform_errors() if kind.default_code is not None}
# Where the code is one we do not know (a newer server), the status still says which branch of the tree it belongs to.
_KIND_BY_STATUS: Final[dict[int, type[XinferenceError]]] = {
    400: errors.InvalidRequest,
    401: errors.AuthenticationFailed,
    403: errors.InsufficientScope,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.RequestTooLarge,
    422: errors.InvalidRequest,
    429: errors.RateLimited,
    499: errors.LaunchCancelled,
    500: errors.InternalError,
}


def error_from_wire(error: dict[str, Any], status: int) -> XinferenceError:
    """Rebuild a platform error from the ``error`` object of an answer or of a stream's error event."""
    message = str(error.get("message") or f"the server answered {status} without a message")
    code = None if error.get("code") is None else str(error["code"])
    param = None if error.get("param") is None else str(error["param"])
    kind = _KIND_BY_CODE.get(code or "") or _KIND_BY_STATUS.get(status, XinferenceError)
    return kind(message, param, code)


def error_from_answer(status: int, body: bytes, request_id: str | None) -> XinferenceError:
    """The error that an answer of status >= 400 stands for.

    The request id is added as a note: it is what an operator needs to find the cause in the server's log.
    """
    error = _error_object(body)
    if error is not None:
        found = error_from_wire(error, status)
    else:
        text = body.decode(errors="replace").strip()[:SHOWN_BODY_CHARACTERS]
        found = UnexpectedAnswer(f"HTTP {status}, and the body is not an error of this API: {text or '(empty)'}")
    if request_id:
        found.add_note(f"request id: {request_id}")
    return found


def _error_object(body: bytes) -> dict[str, Any] | None:
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError):
        return None
    error = decoded.get("error") if isinstance(decoded, dict) else None
    return error if isinstance(error, dict) else None

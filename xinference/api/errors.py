"""Errors that only HTTP knows, and the headers that go with any error.

XinferenceError (xinference/errors.py)
├── ControlUnreachable          503  supervisor_unavailable  (retry-after)
├── NotReady                    503  not_ready               (retry-after)
├── RequestTimedOut             504  request_timeout         it ran longer than a request may
└── InvalidRequest
    ├── RequestAborted          499  request_aborted         an administrator ended it
    ├── ForeignHost             400  foreign_host            the Host header names another site: DNS rebinding
    ├── MethodNotAllowed        405  method_not_allowed
    ├── ForeignOrigin           403  foreign_origin          a web page of another site sends this write
    └── UnsupportedMediaType    415  unsupported_media_type
"""

import math

from xinference.errors import AuthenticationFailed, InternalError, InvalidRequest, LaunchFailed, XinferenceError

Header = tuple[bytes, bytes]


class ForeignHost(InvalidRequest):
    default_code = "foreign_host"


class MethodNotAllowed(InvalidRequest):
    """``allowed`` are the methods that the path takes."""

    status = 405
    default_code = "method_not_allowed"

    def __init__(self, message: str = "", param: str | None = None, code: str | None = None, allowed: frozenset[str] = frozenset()) -> None:
        super().__init__(message, param, code)
        self.allowed = allowed


class ForeignOrigin(InvalidRequest):
    status = 403
    default_code = "foreign_origin"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    default_code = "unsupported_media_type"


class RequestAborted(InvalidRequest):
    status = 499
    default_code = "request_aborted"


class RequestTimedOut(XinferenceError):
    status = 504
    default_code = "request_timeout"


class NotReady(XinferenceError):
    """The process lives but does not take work yet."""

    status = 503
    default_code = "not_ready"
    retry_after_seconds = 1.0


class ControlUnreachable(XinferenceError):
    """The supervisor does not answer. Inference goes on with the last known routes; administration has to wait."""

    status = 503
    default_code = "supervisor_unavailable"
    retry_after_seconds = 2.0


# Trying these again gives the same result, and the openai client tries any status >= 500 twice more unless it is told not to.
_NOT_RETRYABLE = (InternalError, LaunchFailed, RequestTimedOut)


def error_headers(error: XinferenceError) -> list[Header]:
    """The headers that tell a client whether and when to try again, or how to authenticate."""
    if isinstance(error, AuthenticationFailed):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", ", ".join(sorted(error.allowed)).encode())]
    if isinstance(error, _NOT_RETRYABLE):
        return [(b"x-should-retry", b"false")]
    if error.retry_after_seconds is not None:
        return [(b"retry-after", str(math.ceil(error.retry_after_seconds)).encode())]
    return []

"""Errors that only HTTP knows, and the headers that go with any error.

XinferenceError (xinference/errors.py)
├── ControlUnreachable          503  supervisor_unavailable  (retry-after)
├── NotReady                    503  not_ready               (retry-after)
├── RequestTimedOut             504  request_timeout         it ran longer than a request may
├── KeyStoreFailed              500  key_store_failed        the file of keys could not be written
├── RateLimited
│   └── KeyLimited              429  rate_limit_exceeded     (retry-after) the API key has used what it may
└── InvalidRequest
    ├── LimitExceeded
    │   └── OverLimit           400  limit_exceeded          a value in the body is over a limit of this server
    ├── RequestAborted          499  request_aborted         an administrator ended it
    ├── HeadTooLarge            431  request_head_too_large  the request line and header fields are over a limit
    ├── ForeignHost             400  foreign_host            the Host header names another site: DNS rebinding
    ├── KeyFileUnusable         400  key_file_unusable       the file of keys cannot be relied on: no server starts
    ├── MethodNotAllowed        405  method_not_allowed
    ├── ForeignOrigin           403  foreign_origin          a web page of another site sends this write
    └── UnsupportedMediaType    415  unsupported_media_type
"""

import math

from xinference.errors import (
    AuthenticationFailed,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    LaunchFailed,
    LimitExceeded,
    RateLimited,
    XinferenceError,
)

Header = tuple[bytes, bytes]


class OverLimit(LimitExceeded):
    """``limit`` is the name of the limit in ``Limits``."""

    def __init__(self, message: str = "", param: str | None = None, code: str | None = None, limit: str = "") -> None:
        super().__init__(message, param, code)
        self.limit = limit


class HeadTooLarge(InvalidRequest):
    status = 431
    default_code = "request_head_too_large"


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


class KeyFileUnusable(InvalidRequest):
    """The file of keys is damaged, or others could have changed it. Who holds which key is then not known."""

    default_code = "key_file_unusable"


class KeyStoreFailed(XinferenceError):
    default_code = "key_store_failed"


class KeyLimited(RateLimited):
    """``limit`` names the limit, ``wait_seconds`` is when the next request may come."""

    def __init__(
        self, message: str = "", param: str | None = None, code: str | None = None, limit: str = "", wait_seconds: float = 1.0
    ) -> None:
        super().__init__(message, param, code)
        self.limit = limit
        self.wait_seconds = wait_seconds


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


def limit_of(error: XinferenceError) -> str | None:
    """The limit that an error tells of, by its name in the count of refusals; None for errors that are about none or counted elsewhere."""
    if isinstance(error, OverLimit | KeyLimited):
        return error.limit
    if isinstance(error, ContextLengthExceeded):
        return "max_model_len"
    return "engine" if isinstance(error, LimitExceeded) else None


# Trying these again gives the same result, and the openai client tries any status >= 500 twice more unless it is told not to.
_NOT_RETRYABLE = (InternalError, LaunchFailed, RequestTimedOut, KeyStoreFailed)


def error_headers(error: XinferenceError) -> list[Header]:
    """The headers that tell a client whether and when to try again, or how to authenticate."""
    if isinstance(error, AuthenticationFailed):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", ", ".join(sorted(error.allowed)).encode())]
    if isinstance(error, _NOT_RETRYABLE):
        return [(b"x-should-retry", b"false")]
    if isinstance(error, KeyLimited):
        return [(b"retry-after", str(math.ceil(error.wait_seconds)).encode())]
    if error.retry_after_seconds is not None:
        return [(b"retry-after", str(math.ceil(error.retry_after_seconds)).encode())]
    return []

"""Every error that a user of the platform can meet, as one tree.

    XinferenceError
    ├── InvalidRequest              400  what was asked cannot be done as asked; nothing was changed
    │   ├── ContextLengthExceeded   400  context_length_exceeded
    │   ├── LimitExceeded           400  limit_exceeded
    │   ├── NotSupported            400  not_supported
    │   ├── ModelNotFound           404  model_not_found
    │   ├── NotFound                404  not_found
    │   ├── Conflict                409  conflict
    │   └── RequestTooLarge         413  request_too_large
    ├── AuthenticationFailed        401  invalid_api_key
    ├── InsufficientScope           403  insufficient_scope
    ├── RateLimited                 429  rate_limit_exceeded       (retry-after)
    ├── LaunchCancelled             499  launch_cancelled
    ├── LaunchFailed                500  launch_failed             the cause is in the message
    ├── InternalError               500  internal_error            generic text; details only in the log
    ├── ModelLoading                503  model_loading             (retry-after)
    ├── NoReplicaAvailable          503  no_replica_available      (retry-after)
    ├── ShuttingDown                503  server_shutting_down      (retry-after)
    └── EngineDied                  200  engine_dead               only as an event inside a stream

The tree knows nothing of HTTP frameworks or actors. An error travels between actors by pickle, which rebuilds it from ``args``: so every
constructor takes ``(message, param, code)`` and nothing else.
"""

from typing import Any, ClassVar


class XinferenceError(Exception):
    """Base of all errors with a place in the API's error table.

    Args:
        message: what was wrong and what to do about it, in words for the user.
        param: the request field at fault, as a dotted path, or None.
        code: overrides the class's machine-readable code.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    default_param: ClassVar[str | None] = None
    retry_after_seconds: ClassVar[float | None] = None

    def __init__(self, message: str = "", param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code)
        self.message = message
        self.param = param if param is not None else self.default_param
        self.code = code if code is not None else self.default_code

    def __str__(self) -> str:
        return self.message

    def to_wire(self) -> dict[str, Any]:
        """The OpenAI-shaped body that every path answers with."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(XinferenceError):
    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    default_code = "context_length_exceeded"
    default_param = "messages"


class LimitExceeded(InvalidRequest):
    default_code = "limit_exceeded"


class NotSupported(InvalidRequest):
    default_code = "not_supported"


class ModelNotFound(InvalidRequest):
    status = 404
    default_code = "model_not_found"
    default_param = "model"


class NotFound(InvalidRequest):
    status = 404
    default_code = "not_found"


class Conflict(InvalidRequest):
    status = 409
    default_code = "conflict"


class RequestTooLarge(InvalidRequest):
    status = 413
    default_code = "request_too_large"


class AuthenticationFailed(XinferenceError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class InsufficientScope(XinferenceError):
    status = 403
    type = "permission_error"
    default_code = "insufficient_scope"


class RateLimited(XinferenceError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    retry_after_seconds = 1.0


class LaunchCancelled(XinferenceError):
    status = 499
    default_code = "launch_cancelled"


class LaunchFailed(XinferenceError):
    default_code = "launch_failed"


class InternalError(XinferenceError):
    default_code = "internal_error"


class ModelLoading(XinferenceError):
    status = 503
    default_code = "model_loading"
    default_param = "model"
    retry_after_seconds = 5.0


class NoReplicaAvailable(XinferenceError):
    status = 503
    default_code = "no_replica_available"
    retry_after_seconds = 1.0


class ShuttingDown(XinferenceError):
    status = 503
    default_code = "server_shutting_down"
    retry_after_seconds = 5.0


class EngineDied(XinferenceError):
    status = 200
    default_code = "engine_dead"

"""Errors as vLLM's server answers them: same fields, same types of values, same wording where clients look at it."""

from typing import Any


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        message: text for the client.
        status: HTTP status, which is also the body's integer ``code``.
        kind: the body's ``type``.
        param: the body's ``param``.
    """

    def __init__(self, message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def invalid(message: str, param: str, *value: Any) -> Refused:
    """A request that vLLM's own checks refuse: they append which parameter it was, and its value where it is short."""
    detail = f"parameter={param}" + "".join(f", value={v}" for v in value)
    return Refused(f"{message} ({detail})", param=param)


def no_such_model(name: str, served: str) -> Refused:
    return Refused(f"The model `{name}` does not exist. Valid aliases: {served}.", 404, "NotFoundError", "model")


def invalid_field(path: str, reason: str, value: Any) -> Refused:
    """A body of the wrong shape: what vLLM makes of a pydantic validation error."""
    shown = f"<{type(value).__name__} of {len(value)} items>" if isinstance(value, dict | list) else f"{value!s:.200}"
    return Refused(f"1 validation error:\n  {{'loc': '{path}', 'msg': '{reason}', 'input': {shown!r}}}", 400, "Bad Request", path)


def prompt_too_long(limit: int, num_tokens: int) -> Refused:
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {num_tokens} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
    )
    return invalid(message, "input_tokens", num_tokens)


def too_many_output_tokens(field: str, asked: int, limit: int) -> Refused:
    return invalid(f"{field}={asked} cannot be greater than max_model_len={limit}. Please request fewer output tokens.", field, asked)

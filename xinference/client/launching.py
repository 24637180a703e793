"""What a launch asks for, checked before it is sent. Pure."""

from typing import Any

from xinference.client.calls import Json
from xinference.core.spec import Engine, parse_spec


def launch_body(fields: Json) -> Json:
    """The body of a launch: the given fields without those that were left out.

    The server checks again, with the same validator. The fake engine's arguments are known to the server only.

    Raises:
        InvalidRequest: the combination can never be launched.
    """
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if str(given.get("model_engine", "")).lower() != Engine.FAKE:
        parse_spec(given)
    return given

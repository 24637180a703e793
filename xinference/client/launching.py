"""What a launch asks for, checked before it is sent. Pure."""

from typing import Any

from xinference.client.calls import Json


def launch_body(fields: Json) -> Json:
    """The body of a launch: the given fields without those that were left out.

    Raises:
        InvalidRequest: the combination can never be launched.
    """
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    return given

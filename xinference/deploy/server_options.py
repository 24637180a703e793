"""Options that the server commands share. Each overrules the environment variable of its setting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from xinference.settings import Settings, read_settings

Command = TypeVar("Command", bound=Callable[..., Any])
LEVELS: Final = ("debug", "info", "warning", "error")


def process_options(command: Command) -> Command:
    """What every server process takes."""
    command = click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="What is logged.")(command)
    return click.option(
        "--home",
        type=click.Path(file_okay=False, path_type=Path),
        help="Keys, models and logs.  [default: $XINFERENCE_HOME, then ~/.xinference]",
    )(command)


def api_options(command: Command) -> Command:
    """What a process with an API takes."""
    command = click.option(
        "--isolate-tenants", is_flag=True, default=None, help="Serve no API key from another's cached prompts; asks for keys."
    )(command)
    command = click.option("--require-key", is_flag=True, default=None, help="Ask for an API key on loopback too.")(command)
    command = click.option(
        "--supervisor-port", type=click.IntRange(0, 65535), help="Port that workers join at; 0 takes a free one.  [default: 9998]"
    )(command)
    command = click.option("-p", "--port", type=click.IntRange(0, 65535), help="Port of the API; 0 takes a free one.  [default: 9997]")(
        command
    )
    return click.option("-H", "--host", help="Address to listen at; others than loopback ask for an API key.  [default: 127.0.0.1]")(
        command
    )


def settings_of(**options: Any) -> Settings:
    """Settings from the environment, overruled by the options that were given. Raises InvalidRequest."""
    return read_settings(Settings, **{name: value for name, value in options.items() if value is not None})

"""What every command shares: where the server is, whose key is used, how results are printed."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

R = TypeVar("R")


@dataclass
class Invocation:
    """One run of the tool. Filled by the options, read by whoever reports errors."""

    endpoint: str | None = None
    api_key: str | None = None
    as_json: bool = False


def _remember(name: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def callback(ctx: click.Context, _: click.Parameter, value: Any) -> Any:
        setattr(ctx.ensure_object(Invocation), name, value == "json" if name == "as_json" else value)
        return value

    return callback


def output_option(command: Callable[..., R]) -> Callable[..., R]:
    """Adds -o/--output and hands the invocation to the command as its first argument."""

    @click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        is_eager=True,
        expose_value=False,
        callback=_remember("as_json"),
        help="How results are printed.",
    )
    @click.pass_context
    @functools.wraps(command)
    def wrapped(ctx: click.Context, /, *args: Any, **kwargs: Any) -> R:
        return command(ctx.ensure_object(Invocation), *args, **kwargs)

    return wrapped


def server_options(command: Callable[..., R]) -> Callable[..., R]:
    """Adds -e/--endpoint, --api-key and -o/--output and hands the invocation to the command as its first argument."""
    with_endpoint = click.option(
        "-e",
        "--endpoint",
        envvar="XINFERENCE_ENDPOINT",
        expose_value=False,
        callback=_remember("endpoint"),
        help="Address of the server.  [default: $XINFERENCE_ENDPOINT, then http://127.0.0.1:9997]",
    )
    with_key = click.option(
        "-ak",
        "--api-key",
        envvar="XINFERENCE_API_KEY",
        expose_value=False,
        callback=_remember("api_key"),
        help="API key; XINFERENCE_API_KEY keeps it out of the process list.",
    )
    return with_endpoint(with_key(output_option(command)))

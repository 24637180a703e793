"""``keys create``, ``list`` and ``revoke``: who may use the server, and for what."""

import re
from typing import Any, Final

import click
from rich.markup import escape

from xinference.client.sync_client import Client
from xinference.deploy.output import clock_text, new_table, print_json, progress_console, result_console
from xinference.deploy.session import Invocation, server_options

Json = dict[str, Any]
SCOPES: Final = ("inference", "monitor", "admin")
SECONDS_BY_UNIT: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION: Final = re.compile(r"([1-9]\d{0,8})([smhdw])")


class Words(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5 alone
    """Names with commas between them.

    Args:
        allowed: the only ones; None for any.
    """

    name = "words"

    def __init__(self, allowed: tuple[str, ...] | None = None) -> None:
        self._allowed = allowed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        if isinstance(value, list):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(words):
            self.fail(f"{value!r} holds an empty name; write them as A,B", param, ctx)
        unknown = [word for word in words if self._allowed is not None and word not in self._allowed]
        if unknown:
            self.fail(f"{unknown[0]!r} is not one of {', '.join(self._allowed or ())}", param, ctx)
        return words


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A length of time such as 90m, 12h, 30d, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _DURATION.fullmatch(str(value))
        if found is None:
            self.fail(f"{value!r} is not a length of time; write a number and one of s, m, h, d, w, such as 30d", param, ctx)
        return int(found[1]) * SECONDS_BY_UNIT[found[2]]


@click.group("keys", short_help="Make, list and revoke API keys.")
def keys() -> None:
    """Make, list and revoke API keys. Needs the administrator's key, which is in admin.key of the server's home, in XINFERENCE_API_KEY."""


@keys.command("create")
@click.argument("name")
@click.option(
    "--scopes",
    type=Words(SCOPES),
    metavar="A,B",
    default="inference",
    show_default=True,
    help="inference asks models; monitor sees metrics, events, caches and requests; admin may do everything.",
)
@click.option("--models", type=Words(), metavar="UID,..", help="The only models it may ask.  [default: all]")
@click.option("--expires", "expires_in_seconds", type=Duration(), metavar="TIME", help="After 90m, 12h, 30d or 4w.  [default: never]")
@click.option(
    "--requests-per-minute",
    type=click.IntRange(min=0),
    metavar="N",
    help="More are refused with 429; 0: no limit.  [default: the server's]",
)
@click.option(
    "--concurrent-requests", type=click.IntRange(min=0), metavar="N", help="More at once are refused; 0: no limit.  [default: the server's]"
)
@server_options
def create(invocation: Invocation, name: str, **fields: Any) -> None:
    """Make a key named NAME and print its secret, which is shown this once: the server keeps a digest only."""
    with Client(invocation.endpoint, invocation.api_key) as client:
        made = client.create_key(name, **fields)
    if invocation.as_json:
        print_json(made)
        return
    click.echo(made["key"])  # alone on stdout: KEY=$(xinference keys create NAME)
    notes = progress_console()
    notes.print(f"{escape(made['id'])} is made; its secret is shown this once. `xinference keys revoke {escape(made['id'])}` ends it.")
    if not made["enforced"]:
        notes.print(
            "[yellow]this server asks for no key, so anybody on its machine may do everything: start it with --require-key[/yellow]"
        )


@keys.command("list")
@server_options
def list_keys(invocation: Invocation) -> None:
    """List all keys, without their secrets."""
    with Client(invocation.endpoint, invocation.api_key) as client:
        found = client.keys()
    if invocation.as_json:
        print_json(found)
        return
    table = new_table("id", "name", "state", "scopes", "models", "created", "last used", "expires", "per minute>", "at once>")
    for key in found:
        times = [_time(key[field], "-" if field == "created" else "never") for field in ("created", "last_used", "expires")]
        limits = [_limit(key[field]) for field in ("requests_per_minute", "concurrent_requests")]
        state = key["state"] if key["state"] == "active" else f"[red]{key['state']}[/red]"
        models = escape(", ".join(key["models"])) if key["models"] is not None else "all"
        table.add_row(key["id"], escape(key["name"]), state, ", ".join(key["scopes"]), models, *times, *limits)
    result_console().print(table)


@keys.command("revoke")
@click.argument("key_id", metavar="ID")
@server_options
def revoke(invocation: Invocation, key_id: str) -> None:
    """Refuse the key with this ID at once and for good, and end the requests that it has running."""
    with Client(invocation.endpoint, invocation.api_key) as client:
        answer = client.revoke_key(key_id)
    if invocation.as_json:
        print_json(answer)
    else:
        result_console().print(f"{escape(key_id)} is revoked")


def _time(unix_seconds: float | None, otherwise: str) -> str:
    return otherwise if unix_seconds is None else clock_text(unix_seconds)


def _limit(limit: int | None) -> str:
    return "server's" if limit is None else "none" if limit == 0 else f"{limit:,}"

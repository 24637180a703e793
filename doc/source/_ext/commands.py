"""The command line, walked: every program, command and option with the words that ``--help`` prints."""

from collections.abc import Iterator
from typing import Final

import click
from rst import block, code, section, table, text

from xinference.deploy.cli import ALIASES
from xinference.deploy.cli import cli as tool
from xinference.deploy.local import local
from xinference.deploy.supervisor import supervisor
from xinference.deploy.worker import worker

PROGRAMS: Final[dict[str, click.Command]] = {
    "xinference": tool,
    "xinference-local": local,
    "xinference-supervisor": supervisor,
    "xinference-worker": worker,
}


def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """A command and all below it, by the words that call them."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None:
                yield from walk(f"{name} {child}", found)


def all_commands() -> dict[str, click.Command]:
    """Every command of every program."""
    return {name: command for program, root in PROGRAMS.items() for name, command in walk(program, root)}


def _reference(name: str, command: click.Command) -> str:
    """One command: usage, what it does, its options."""
    context = click.Context(command, info_name=name)
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts = [section(name), block(" ".join(usage.split())), *(text(part) + "\n" for part in (command.help or "").split("\n\n"))]
    records = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    rows = [(code(left), text(right)) for left, right in records if left != "-h, --help"]
    return "\n".join([*parts, table(("option", "meaning"), rows, (42, 58)) if rows else ""])


def cli() -> str:
    """The whole reference."""
    also = ", ".join(f"{code(alias)} is {code(name)}" for alias, name in ALIASES.items())
    return "\n".join([f"{also}.\n", *(_reference(name, command) for name, command in all_commands().items())])

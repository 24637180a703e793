"""The ``xinference`` command: names its subcommands, loads the one that is used, and turns errors into exit codes.

    0    done
    1    the operation failed
    2    it was asked for wrongly: bad options, or the server refused the request as malformed
    130  interrupted with Ctrl-C

Nothing heavier than click is imported here, so that ``xinference --help`` answers at once.
"""

import difflib
import importlib
import io
import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import click

from xinference.deploy.session import Invocation
from xinference.errors import InvalidRequest, XinferenceError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
TRACEBACK_VARIABLE: Final = "XINFERENCE_TRACEBACK"  # shows where an unforeseen error came from
INTERRUPTED: Final = "interrupted"  # code of the error that -o json tells of Ctrl-C with


@dataclass(frozen=True)
class Entry:
    """Where a command lives, and its line in the overview."""

    module: str
    attribute: str
    help: str


def _entry(module: str, attribute: str, text: str) -> Entry:
    return Entry(f"xinference.deploy.command.{module}", attribute, text)


COMMANDS: Final[dict[str, Entry]] = {
    "quickstart": _entry("quickstart", "quickstart", "Start a server and the demo model, and watch two replicas share a prompt."),
    "doctor": _entry("doctor", "doctor", "Check this machine and say how to mend what is wrong."),
    "launch": _entry("launch", "launch", "Launch a model."),
    "list": _entry("models", "list_models", "List models."),
    "show": _entry("models", "show", "Show one model: its replicas, budgets and cause of failure."),
    "logs": _entry("models", "logs", "Print the engine log of a model."),
    "scale": _entry("scale", "scale", "Change the number of a model's replicas."),
    "terminate": _entry("models", "terminate", "Stop a model."),
    "chat": _entry("inference", "chat", "Chat with a model."),
    "generate": _entry("inference", "generate", "Continue a text."),
    "keys": _entry("keys", "keys", "Make, list and revoke API keys."),
    "limits": _entry("limits", "limits", "Show what a server accepts, and how much it has refused."),
    "cache": _entry("cache", "cache", "Describe or clear the cache that replicas share."),
}
ALIASES: Final[dict[str, str]] = {"ps": "list", "stop": "terminate"}


class LazyGroup(click.Group):
    """Imports a command's module when the command is asked for, which is this tool's one door to everything heavy."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(ALIASES.get(cmd_name, cmd_name))
        if entry is None:
            return None
        command = vars(importlib.import_module(entry.module))[entry.attribute]
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.module}.{entry.attribute} is not a command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(name, [*COMMANDS, *ALIASES])
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise click.UsageError(f"No such command '{name}'.{hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        aliases = {name: alias for alias, name in ALIASES.items()}
        rows = [(f"{name}, {aliases[name]}" if name in aliases else name, entry.help) for name, entry in COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Callback of --version; reading package metadata costs 20 ms, so only on demand."""
    if wanted:
        click.echo(f"xinference {importlib.import_module('importlib.metadata').version('xinference')}")
        ctx.exit()


SETTINGS: Final[dict[str, Any]] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    # Upstream spells options with underscores; both work everywhere.
    "token_normalize_func": lambda token: token.replace("_", "-"),
}


@click.group(cls=LazyGroup, context_settings=SETTINGS)
@click.option("-v", "--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version, help="Print the version.")
def cli() -> None:
    """Serve language models with vLLM replicas that share their KV cache.

    Servers are started by xinference-local, or by xinference-supervisor and xinference-worker. All commands take -o json for scripts,
    and -e/--endpoint or XINFERENCE_ENDPOINT to name a server other than http://127.0.0.1:9997.
    """


def exit_code(error: XinferenceError) -> int:
    """2 where the request itself was wrong, 1 where it was right but did not work out."""
    return EXIT_USAGE if isinstance(error, InvalidRequest) and error.status == 400 else EXIT_FAILED


def report(error: XinferenceError, as_json: bool) -> None:
    """Tell the user on stderr, so that stdout holds results only."""
    if as_json:
        click.echo(json.dumps(error.to_wire()), err=True)
        return
    where = f" [{error.param}]" if error.param else ""
    click.secho(f"Error: {error.message}{where}", fg="red", err=True)
    if error.status == 401:
        click.echo("Set XINFERENCE_API_KEY; the administrator's key is in admin.key in the server's home directory.", err=True)
    for note in getattr(error, "__notes__", ()):
        click.echo(note, err=True)


def report_interrupt(message: str, as_json: bool, code: str = INTERRUPTED) -> None:
    """Tell of Ctrl-C: no error of anybody's, but a script that reads JSON must get some."""
    if as_json:
        report(XinferenceError(message, code=code), as_json)
    else:
        click.echo(message, err=True)


def check_encoding(arguments: list[str]) -> None:
    """Raises click.UsageError for an argument that is no text: neither a request nor a terminal can carry it."""
    for place, argument in enumerate(arguments, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="backslashreplace").decode()
            raise click.UsageError(f"argument {place} is not valid UTF-8: {shown}") from None


def fault(error: Exception) -> XinferenceError:
    """What a user is told of an error that nobody foresaw."""
    what = f"{type(error).__name__}: {error}"
    return XinferenceError(
        f"unexpected {what}. This is a fault of this program, or the server is of another version (`xinference --version` here, /version "
        f"there); with {TRACEBACK_VARIABLE}=1 it shows where",
        code="unexpected",
    )


def run(command: click.Command, arguments: list[str] | None, name: str) -> int:
    """Run a command line to its exit code."""
    invocation = Invocation()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a letter that the locale does not have is no reason to fail
    try:
        check_encoding(sys.argv[1:] if arguments is None else arguments)
        found: Any = command.main(arguments, prog_name=name, standalone_mode=False, obj=invocation)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        if invocation.as_json:
            report_interrupt(INTERRUPTED, as_json=True)
        return EXIT_INTERRUPTED
    except XinferenceError as error:
        report(error, invocation.as_json)
        return exit_code(error)
    except BrokenPipeError:
        # Whoever read our output has seen enough. Point stdout elsewhere, or the interpreter complains when it flushes at exit.
        sys.stdout = None
        return EXIT_FAILED
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        report(fault(error), invocation.as_json)
        return EXIT_FAILED
    return found if isinstance(found, int) else 0


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    sys.exit(run(cli, arguments, "xinference"))

"""How results look: rich tables for people, JSON for programs, units for both."""

import json
import sys
import time
from collections.abc import Iterable
from typing import Any, Final

import click
from rich import box
from rich.console import Console
from rich.table import Table

UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
STATE_STYLES: Final = {"ready": "green", "failed": "red", "lost": "red", "stopped": "dim", "draining": "yellow"}


def result_console() -> Console:
    """Where results go."""
    return Console(highlight=False)


def progress_console() -> Console:
    """Where everything goes that is not a result: stdout stays clean for pipes."""
    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """A result for programs, whole in any locale: letters that it may not have are escaped, as JSON allows."""
    has_all = (sys.stdout.encoding or "").replace("-", "").lower() == "utf8"
    click.echo(json.dumps(value, indent=2, ensure_ascii=not has_all))


def new_table(*columns: str, title: str | None = None) -> Table:
    """An empty table in this tool's one style; columns whose name ends in '>' are right aligned."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table


def facts_table(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Names and values, one a line."""
    table = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def state_text(state: str) -> str:
    """A state in its colour, as rich markup."""
    style = STATE_STYLES.get(state)
    return f"[{style}]{state}[/{style}]" if style else state


def bytes_text(count: int | None) -> str:
    """``64.0 MiB``; a dash for None."""
    if count is None:
        return "-"
    size, unit = float(count), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{count} B" if unit == 0 else f"{size:.1f} {UNITS[unit]}"


def seconds_text(seconds: float) -> str:
    """``118 ms``, ``1.24 s``, ``2 min 05 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def clock_text(unix_seconds: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))


def printable(text: str) -> str:
    """Text of a model or an engine without control characters: they could rewrite the user's terminal."""
    return "".join(character for character in text if character in "\n\t" or (character >= " " and not "\x7f" <= character <= "\x9f"))

"""``quickstart``: the steps with their times, the table, and the line that says it all."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from xinference.client.connection import API_KEY_VARIABLE, DEFAULT_ENDPOINT
from xinference.deploy.cli import EXIT_INTERRUPTED, INTERRUPTED, report_interrupt
from xinference.deploy.demo import Demonstration
from xinference.deploy.output import new_table, print_json, progress_console, result_console, seconds_text
from xinference.deploy.quickstart import MODEL_UID, Outcome, QuickStart
from xinference.deploy.session import Invocation, output_option
from xinference.settings import Settings, read_settings


class StepDisplay:
    """A bar for the step that goes on, and a line with its time for each that is done."""

    def __init__(self, console: Console) -> None:
        self.seconds_by_step: dict[str, float] = {}
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One step, timed from entering to leaving."""
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[message]}", markup=False), TimeElapsedColumn())
        started = time.monotonic()
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as self._progress:
            self._task = self._progress.add_task(escape(name), total=None, message="")
            yield
        self.seconds_by_step[name] = time.monotonic() - started
        self._console.print(f"[green]done[/green] {escape(name)} [dim]{seconds_text(self.seconds_by_step[name])}[/dim]")

    def advance(self, message: str, share: float | None) -> None:
        """What the step is doing now; ``share`` from 0 to 1 where it is known how much is left."""
        if self._progress is not None:
            total = None if share is None else 1.0
            self._progress.update(self._task, total=total, completed=share or 0.0, message=message)


@click.command("quickstart", short_help="Start a server and the demo model, and watch two replicas share a prompt.")
@click.option("--exit", "stops_afterwards", is_flag=True, help="Stop everything afterwards and prove that nothing is left.")
@click.option("--model-path", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Your own model instead of the demo's.")
@click.option("-H", "--host", help="Address of the server.  [default: $XINFERENCE_HOST, then 127.0.0.1]")
@click.option("-p", "--port", type=click.IntRange(1, 65535), help="Port of the server.  [default: $XINFERENCE_PORT, then 9997]")
@click.option("-ak", "--api-key", envvar=API_KEY_VARIABLE, help="API key, if the server asks for one.")
@output_option
def quickstart(
    invocation: Invocation, stops_afterwards: bool, model_path: Path | None, host: str | None, port: int | None, api_key: str | None
) -> int:
    """Start a server in the background and the demo model on it, two replicas that share their cache. One long prompt goes to the first
    replica, then to the second: a table shows how long each took and where each prompt token came from.

    Exits with 1 unless the second replica took tokens from the first one's cache and vLLM's own counter says the same number.
    """
    given: dict[str, Any] = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    settings = read_settings(Settings, **given)
    console = progress_console() if invocation.as_json else result_console()
    steps = StepDisplay(console)
    path = model_path.absolute() if model_path is not None else None
    try:
        outcome = QuickStart(settings, api_key, path, steps).run(stops_afterwards)
    except KeyboardInterrupt:
        stops = "" if stops_afterwards else "; `xinference quickstart --exit` stops what was started"
        report_interrupt(f"{INTERRUPTED}{stops}", invocation.as_json)
        return EXIT_INTERRUPTED
    if invocation.as_json:
        print_json(_to_wire(outcome, steps))
    else:
        _print(console, outcome, stops_afterwards)
    return 1 if outcome.problems or outcome.remains else 0


def _print(console: Console, outcome: Outcome, stopped: bool) -> None:
    console.print(_table(outcome.demonstration))
    for problem in outcome.problems:
        console.print(f"[red]not proven:[/red] {escape(problem)}")
    if not stopped:
        where = "" if outcome.endpoint == DEFAULT_ENDPOINT else f" -e {outcome.endpoint}"
        console.print(f"The server stays: {outcome.endpoint}, model '{MODEL_UID}'. Try: xinference chat {MODEL_UID}{where}", soft_wrap=True)
    elif outcome.remains:
        console.print(f"[red]left behind:[/red] {escape(', '.join(outcome.remains))}")
    else:
        console.print("Everything that was started is stopped; no process and no shared memory is left.")
    console.print(outcome.demonstration.verdict(), soft_wrap=True)


def _table(shown: Demonstration) -> Table:
    """Both legs side by side; sources that gave nothing to either are left out."""
    legs = (shown.cold, shown.shared)
    table = new_table("", *(f"{escape(leg.replica_uid)}>" for leg in legs), title="One prompt, two replicas")
    table.add_row("time to first token", *(seconds_text(leg.ttft_seconds) for leg in legs))
    table.add_row("prompt tokens", *(f"{leg.prompt_tokens:,}" for leg in legs))
    for source in dict.fromkeys(source for leg in legs for source in leg.sources):
        counts = [leg.sources.get(source, 0) for leg in legs]
        if any(counts):
            table.add_row(f"  from {source}" if source != "computed" else "  computed", *(f"{count:,}" for count in counts))
    table.add_row("vLLM: external hits", *(f"{leg.vllm_hits:,}" for leg in legs))
    return table


def _to_wire(outcome: Outcome, steps: StepDisplay) -> dict[str, Any]:
    return dataclasses.asdict(outcome) | {"seconds": steps.seconds_by_step, "verdict": outcome.demonstration.verdict()}

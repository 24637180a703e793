"""``scale``: change the number of replicas and watch them come and go."""

import time
from typing import Any, Final

import click
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from xinference.client.sync_client import Client
from xinference.deploy.finite import Finite
from xinference.deploy.output import print_json, progress_console
from xinference.deploy.session import Invocation, server_options
from xinference.deploy.uid import uid_argument
from xinference.errors import LaunchFailed

Json = dict[str, Any]
POLL_SECONDS: Final = 0.5
GONE_STATES: Final = frozenset({"stopped", "failed", "lost"})


@click.command("scale", short_help="Change the number of a model's replicas.")
@uid_argument
@click.option("-r", "--replica", required=True, type=click.IntRange(min=1), help="How many replicas there shall be.")
@click.option("--wait/--detach", default=True, help="Wait until they serve.  [default: --wait]")
@click.option("--timeout", metavar="SECONDS", default=900.0, show_default=True, type=Finite(min=0), help="How long to wait.")
@server_options
def scale(invocation: Invocation, model_uid: str, replica: int, wait: bool, timeout: float) -> None:
    """Change the number of a model's replicas. Replicas that go may finish their open requests first."""
    with Client(invocation.endpoint, invocation.api_key) as client:
        before = {found["replica_uid"] for found in client.replicas(model_uid)}
        client.scale(model_uid, replica)
        replicas = _wait(client, model_uid, replica, before, timeout) if wait else client.replicas(model_uid)
    if invocation.as_json:
        print_json(replicas)
    else:
        ready = sum(found["state"] == "ready" for found in replicas)
        click.echo(f"{model_uid}: {ready} of {replica} replicas ready")


def _wait(client: Client, model_uid: str, wanted: int, before: set[str], timeout: float) -> list[Json]:
    """Poll until exactly the wanted number serves and nothing is on its way out.

    Raises:
        LaunchFailed: a new replica failed, or the time was up.
    """
    deadline = time.monotonic() + timeout
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console()) as progress:
        task = progress.add_task(f"scaling {escape(model_uid)}", total=wanted)
        while True:
            replicas = client.replicas(model_uid)
            failed = [found for found in replicas if found["state"] == "failed" and found["replica_uid"] not in before]
            if failed:
                raise LaunchFailed(f"replica {failed[0]['replica_uid']} failed: {failed[0]['cause'] or 'no cause given'}")
            ready = sum(found["state"] == "ready" for found in replicas)
            moving = any(found["state"] not in GONE_STATES and found["state"] != "ready" for found in replicas)
            progress.update(task, completed=min(ready, wanted))
            if ready == wanted and not moving:
                return list(replicas)
            if time.monotonic() > deadline:
                raise LaunchFailed(f"{ready} of {wanted} replicas are ready after {timeout:.0f} s; `xinference show {model_uid}` says more")
            time.sleep(POLL_SECONDS)

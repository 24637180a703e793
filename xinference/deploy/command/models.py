"""``list``, ``show``, ``logs``, ``terminate``: looking at models and stopping them."""

from typing import Any

import click
from rich.console import Group
from rich.markup import escape

from xinference.client.sync_client import Client
from xinference.deploy.finite import Finite
from xinference.deploy.output import (
    clock_text,
    facts_table,
    new_table,
    print_json,
    printable,
    progress_console,
    result_console,
    state_text,
)
from xinference.deploy.plan_view import plan_rows
from xinference.deploy.session import Invocation, server_options
from xinference.deploy.uid import uid_argument

Json = dict[str, Any]


@click.command("list", short_help="List models.")
@server_options
def list_models(invocation: Invocation) -> None:
    """List models, those that failed to launch included."""
    with Client(invocation.endpoint, invocation.api_key) as client:
        models = client.models()
    if invocation.as_json:
        print_json(models)
        return
    table = new_table("uid", "state", "replicas>", "xavier", "context>", "model")
    for model in models:
        name = escape(str(model.get("model_name") or "-"))
        sharing = "on" if model["xavier"] else "off"
        table.add_row(
            escape(model["id"]), state_text(model["state"]), str(model["replica"]), sharing, str(model["max_model_len"] or "-"), name
        )
    result_console().print(table if models else "no models; `xinference launch --help` says how to launch one")


@click.command("show", short_help="Show one model: its replicas, budgets and cause of failure.")
@uid_argument
@server_options
def show(invocation: Invocation, model_uid: str) -> None:
    """Show one model: its replicas, budgets and cause of failure."""
    with Client(invocation.endpoint, invocation.api_key) as client:
        model = client.model(model_uid)
    if invocation.as_json:
        print_json(model)
        return
    result_console().print(Group(facts_table(_facts(model)), "", _replica_table(model["replicas"])))


def _facts(model: Json) -> list[tuple[str, str]]:
    spec, plan = model.get("spec") or {}, model.get("plan")
    rows = [("uid", escape(model["id"])), ("state", state_text(model["state"]))]
    if model.get("cause"):
        rows.append(("cause", f"[red]{escape(model['cause'])}[/red]"))
    rows.append(("model", escape(str(spec.get("model_path") or model.get("model_name") or "-"))))
    rows.append(("engine", escape(str(spec.get("model_engine") or "-"))))
    rows.append(("launched", clock_text(model["created"])))
    rows.append(("context", f"{model['max_model_len']} tokens" if model.get("max_model_len") else "-"))
    return rows + (plan_rows(plan) if plan else [])


def _replica_table(replicas: list[Json]) -> Any:
    table = new_table("replica", "state", "worker", "pid>", "restarts>", "running>", "waiting>", "cause")
    for found in replicas:
        counts = [str(found["pid"] or "-"), str(found["restarts"]), str(found["running"]), str(found["waiting"])]
        names = [escape(found["replica_uid"]), state_text(found["state"]), escape(str(found["worker_id"] or "-"))]
        table.add_row(*names, *counts, escape(found.get("cause") or ""))
    return table


@click.command("logs", short_help="Print the engine log of a model.")
@uid_argument
@click.option("--replica", "replica_uid", metavar="UID", help="Only this replica.")
@click.option("--tail", default=200, show_default=True, type=click.IntRange(min=0), help="How many of the last lines.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing until Ctrl-C.")
@server_options
def logs(invocation: Invocation, model_uid: str, replica_uid: str | None, tail: int, follow: bool) -> None:
    """Print the engine log of a model; of a model that failed to launch, too."""
    with Client(invocation.endpoint, invocation.api_key) as client:
        pieces = client.follow_logs(model_uid, replica_uid, tail) if follow else [client.logs(model_uid, replica_uid, tail)]
        for text in pieces:
            if invocation.as_json:
                print_json({"text": text})
            else:
                click.echo(printable(text), nl=not text.endswith("\n"))


@click.command("terminate", short_help="Stop a model.")
@uid_argument
@click.option("--drain", metavar="SECONDS", type=Finite(min=0), help="How long open requests may go on.  [default: the server's]")
@server_options
def terminate(invocation: Invocation, model_uid: str, drain: float | None) -> None:
    """Stop a model. No new requests are taken; open ones may finish within the drain time."""
    with Client(invocation.endpoint, invocation.api_key) as client, progress_console().status(f"stopping {escape(model_uid)}"):
        answer = client.terminate(model_uid, drain)
    if invocation.as_json:
        print_json(answer)
    else:
        result_console().print(f"{escape(model_uid)} is stopped")

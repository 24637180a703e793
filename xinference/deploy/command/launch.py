"""``launch``: options to a specification, progress to the end, Ctrl-C to cancel."""

import os
from typing import Any

import click

from xinference.client.sync_client import Client
from xinference.deploy.cli import EXIT_INTERRUPTED, report_interrupt
from xinference.deploy.launch_fields import (
    engine_arguments,
    environment_variables,
    model_path_from_here,
    read_replica_config,
    unknown_options,
)
from xinference.deploy.launch_follow import Interrupted, follow_launch, interrupts_held
from xinference.deploy.output import facts_table, print_json, result_console
from xinference.deploy.plan_view import placement_rows, plan_rows
from xinference.deploy.session import Invocation, server_options

Json = dict[str, Any]
# Fields whose option gives the value as it is: (option spellings, metavar or type, help).
PLAIN_OPTIONS: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (("--model-path",), "DIR", "Directory with config.json and weights."),
    (("-n", "--model-name"), "NAME", "Name that the model is shown under."),
    (("-u", "--model-uid"), "UID", "Name that requests use.  [default: made from the model's name]"),
    (("-t", "--model-type"), "TYPE", "Only LLM."),
    (("-en", "--model-engine"), "ENGINE", "Only vllm."),
    (("-s", "--model-size-in-billions", "--size-in-billions"), "SIZE", "Shown only: the size is read from the weights."),
    (("-f", "--model-format"), "FORMAT", "Shown only: the format is read from config.json."),
    (("-q", "--quantization"), "NAME", "As in config.json."),
    (("-r", "--replica"), click.IntRange(min=1), "How many replicas.  [default: 1]"),
    (("--n-gpu",), "N|auto", "Devices of each replica."),
    (("--gpu-idx",), "I,J,..", "One device for each replica."),
    (("--worker-ip",), "ADDRESS", "The worker to run on."),
    (("--xavier-gpu-cache-bytes",), "SIZE", "GPU cache of each replica, such as 256MiB."),
    (("--xavier-cpu-cache-bytes",), "SIZE", "CPU cache of each replica, such as 4GiB.  [default: a share of free memory]"),
    (("--vllm-transfer-backend-type", "--transfer-backend-type"), "NAME", "xavier or nixl."),
)


def plain_options(command: Any) -> Any:
    """Adds PLAIN_OPTIONS; a repeated spelling of one field is the same parameter."""
    for spellings, kind, text in reversed(PLAIN_OPTIONS):
        field = next(spelling for spelling in spellings if spelling.startswith("--"))[2:].replace("-", "_")
        how = {"type": kind} if isinstance(kind, click.ParamType) else {"metavar": kind}
        command = click.option(*spellings, field, help=text, **how)(command)
    return command


@click.command(
    "launch",
    short_help="Launch a model.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@plain_options
@click.option(
    "--enable-xavier",
    is_flag=False,
    flag_value="true",
    type=click.BOOL,
    metavar="[true|false]",
    help="Let the replicas share their KV cache; needs two or more.",
)
@click.option(
    "--replica-config", metavar="JSON|@FILE", help="A list with one object per replica: replica_uid, role, devices, engine_config."
)
@click.option("--engine-arg", multiple=True, metavar="NAME=VALUE", help="An argument of the engine; --max-model-len 4096 works as well.")
@click.option(
    "--env", multiple=True, metavar="NAME[=VALUE]", help="An environment variable of the engine; NAME alone takes its value here."
)
@click.option("--dry-run", is_flag=True, help="Show the plan and its arithmetic; launch nothing.")
@click.option("--wait/--detach", default=True, help="Wait until the model serves.  [default: --wait]")
@click.pass_context
@server_options
def launch(invocation: Invocation, ctx: click.Context, dry_run: bool, wait: bool, **options: Any) -> int:
    """Launch a model and wait until it serves.

    The first Ctrl-C cancels the launch and waits until everything it took is given back; the second leaves that to the server.
    """
    with Client(invocation.endpoint, invocation.api_key) as client:
        fields = _fields(ctx, client.is_local, options)
        if dry_run:
            _show_plan(invocation, client.plan(**fields))
            return 0
        try:
            with interrupts_held() as held:
                model_uid = client.launch(**fields)
            followed = wait or held.pressed
            model = follow_launch(client, model_uid, held) if followed else client.model(model_uid)
        except Interrupted as interrupted:
            report_interrupt(str(interrupted), invocation.as_json, interrupted.code)
            return EXIT_INTERRUPTED
    if invocation.as_json:
        print_json(model)
    elif wait:
        click.echo(f"{model_uid} serves at {client.endpoint}/v1")
    else:
        click.echo(f"{model_uid} is being launched; see `xinference show {model_uid}`")
    return 0


def _fields(ctx: click.Context, server_is_here: bool, options: Json) -> Json:
    known = [spelling for option in ctx.command.params for spelling in option.opts if spelling.startswith("--")]
    fields = dict(options)
    beside = unknown_options(ctx.args, fields["model_engine"], known)
    fields["engine_config"] = engine_arguments(fields.pop("engine_arg")) or None
    fields["envs"] = environment_variables(fields.pop("env"), os.environ) or None
    fields["replica_config"] = read_replica_config(fields["replica_config"])
    fields["model_path"] = model_path_from_here(fields["model_path"], server_is_here)
    if fields["n_gpu"] is not None and fields["n_gpu"].lstrip("-").isdigit():
        fields["n_gpu"] = int(fields["n_gpu"])
    return fields | beside


def _show_plan(invocation: Invocation, plan: Json) -> None:
    if invocation.as_json:
        print_json(plan)
        return
    console = result_console()
    console.print(facts_table([("uid", plan["model_uid"]), *plan_rows(plan)], title="Plan"))
    console.print()
    console.print(facts_table(placement_rows(plan), title="Replicas"))

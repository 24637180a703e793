"""``cache stats`` and ``cache clear``: the cache that replicas share, explained and emptied."""

from typing import Any

import click
from rich.console import Group
from rich.markup import escape

from xinference.client.sync_client import Client
from xinference.deploy.output import bytes_text, new_table, print_json, progress_console, result_console, state_text
from xinference.deploy.session import Invocation, server_options
from xinference.deploy.uid import uid_argument

Json = dict[str, Any]


@click.group("cache", short_help="Describe or clear the cache that replicas share.")
def cache() -> None:
    """Describe or clear the cache that the replicas of a model share."""


@cache.command("stats")
@uid_argument
@server_options
def stats(invocation: Invocation, model_uid: str) -> None:
    """Budgets, contents, and where prompt tokens came from, replica by replica."""
    with Client(invocation.endpoint, invocation.api_key) as client:
        status = client.xavier(model_uid)
    if invocation.as_json:
        print_json(status)
    elif not status["enabled"]:
        result_console().print(f"{escape(model_uid)} was launched without Xavier: its replicas share nothing")
    else:
        result_console().print(Group(_tier_table(status), _source_table(status), _counter_table(status), *_peer_lines(status)))


@cache.command("clear")
@uid_argument
@server_options
def clear(invocation: Invocation, model_uid: str) -> None:
    """Empty the shared cache on all replicas; nothing stored before is served afterwards."""
    with Client(invocation.endpoint, invocation.api_key) as client, progress_console().status("clearing"):
        answer = client.clear(model_uid)
    if invocation.as_json:
        print_json(answer)
    elif answer["status"] == "cleared":
        result_console().print(f"cleared, {bytes_text(answer['bytes_freed'])} freed")
    else:
        result_console().print(f"pending: waiting for {escape(', '.join(answer['pending']))}; nothing stored before is served any more")


def _tier_table(status: Json) -> Any:
    table = new_table("replica", "state", "tier", "budget>", "used>", "blocks>", "tokens>", title="Contents")
    for found in status["replicas"]:
        for name, tier in found["tiers"].items():
            blocks = f"{tier['blocks']:,} / {tier['capacity_blocks']:,}"
            tokens = f"{tier['blocks'] * tier['tokens_per_block']:,}"
            sizes = [bytes_text(tier["budget_bytes"]), bytes_text(tier["used_bytes"])]
            table.add_row(escape(found["replica_uid"]), state_text(found["state"]), name, *sizes, blocks, tokens)
    return table


def _source_table(status: Json) -> Any:
    replicas = status["replicas"]
    table = new_table("source", *(f"{escape(found['replica_uid'])}>" for found in replicas), title="Prompt tokens by source")
    for source in dict.fromkeys(source for found in replicas for source in found["sources"]):
        counts = [found["sources"].get(source, 0) for found in replicas]
        if any(counts):
            table.add_row(source, *(f"{count:,}" for count in counts))
    return table


def _counter_table(status: Json) -> Any:
    replicas = status["replicas"]
    table = new_table("counter", *(f"{escape(found['replica_uid'])}>" for found in replicas), title="Counters that are not zero")
    for name in dict.fromkeys(name for found in replicas for name in found["counters"]):
        counts = [found["counters"].get(name, 0) for found in replicas]
        if any(counts):
            table.add_row(name, *(f"{count:,}" for count in counts))
    return table


def _peer_lines(status: Json) -> list[str]:
    """One line per peer that is not attached, with the reason."""
    lines = []
    for found in status["replicas"]:
        for peer in found["peers"]:
            if not peer["attached"]:
                reader, owner, reason = (escape(text) for text in (found["replica_uid"], peer["replica_uid"], peer["reason"] or "not yet"))
                lines.append(f"[yellow]{reader} does not read from {owner}: {reason}[/yellow]")
    return lines

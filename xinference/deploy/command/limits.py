"""``limits``: what a server accepts, and how much it has refused."""

import click
from rich.markup import escape

from xinference.client.sync_client import Client
from xinference.deploy.output import new_table, print_json, result_console
from xinference.deploy.session import Invocation, server_options


@click.command("limits", short_help="Show what a server accepts, and how much it has refused.")
@server_options
def limits(invocation: Invocation) -> None:
    """Show what a server accepts, and how much it has refused.

    Each is set where the server starts, by XINFERENCE_LIMIT_<NAME>; what it refuses is counted in xinference_refused_total.
    """
    with Client(invocation.endpoint, invocation.api_key) as client:
        rows = client.limits()
    if invocation.as_json:
        print_json(rows)
        return
    table = new_table("limit", "value>", "default>", "refused>", "what it bounds")
    for row in rows:
        table.add_row(*(escape(str(row.get(name, "-"))) for name in ("name", "value", "default", "refused", "description")))
    result_console().print(table)

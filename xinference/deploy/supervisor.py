"""``xinference-supervisor``: the API and the supervisor of a cluster whose workers run elsewhere."""

import sys
from typing import Any, NoReturn

import click

from xinference.core.cluster import start_supervisor
from xinference.deploy.cli import SETTINGS, run
from xinference.deploy.server_options import api_options, process_options, settings_of
from xinference.deploy.serving import open_door, run_server, running, serve_api, set_up_logging


@click.command("xinference-supervisor", context_settings=SETTINGS)
@api_options
@process_options
def supervisor(log_level: str, **options: Any) -> int:
    """Run the supervisor and the API of a cluster; workers join with xinference-worker.

    Workers need the key in cluster.key of this process's home directory, there or in XOSCAR_AUTH_KEY. Its holders can run code in the
    cluster, and what it sends is not encrypted: use a private network.
    """
    set_up_logging(log_level)
    settings = settings_of(**options)
    door = open_door(settings)

    async def serve() -> None:
        async with running(start_supervisor(settings, settings.host)) as cluster:
            await serve_api(door, cluster)

    return run_server(serve)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    sys.exit(run(supervisor, arguments, "xinference-supervisor"))


if __name__ == "__main__":
    main()

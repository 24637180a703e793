"""``xinference-local``: supervisor, worker and API in one process, for one machine."""

import sys
from typing import Any, NoReturn

import click

from xinference.core.cluster import start_local
from xinference.deploy.cli import SETTINGS, run
from xinference.deploy.server_options import api_options, process_options, settings_of
from xinference.deploy.serving import open_door, run_server, running, serve_api, set_up_logging


@click.command("xinference-local", context_settings=SETTINGS)
@api_options
@process_options
def local(log_level: str, **options: Any) -> int:
    """Serve models on this machine: supervisor, worker and API in one process.

    Listens on 127.0.0.1:9997. Ctrl-C lets open requests finish, then stops all models; a second one ends the waiting.
    """
    set_up_logging(log_level)
    settings = settings_of(**options)
    door = open_door(settings)

    async def serve() -> None:
        async with running(start_local(settings)) as cluster:
            await serve_api(door, cluster)

    return run_server(serve)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    sys.exit(run(local, arguments, "xinference-local"))


if __name__ == "__main__":
    main()

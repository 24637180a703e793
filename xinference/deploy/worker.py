"""``xinference-worker``: runs the replicas of one machine for a supervisor elsewhere."""

import sys
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

import click

from xinference.api.auth import is_loopback
from xinference.core.cluster import start_worker
from xinference.core.cluster_key import has_cluster_key, missing_key
from xinference.deploy.cli import SETTINGS, run
from xinference.deploy.server_options import process_options, settings_of
from xinference.deploy.serving import run_server, running, set_up_logging, signalled
from xinference.errors import InvalidRequest
from xinference.settings import Settings

LOOPBACK: Final = "127.0.0.1"


def supervisor_address(given: str, settings: Settings) -> str:
    """``host:port`` of the supervisor, from that or from the address of its API, as upstream's users give it.

    Raises:
        click.BadParameter: neither.
    """
    if "://" in given:
        host = urlsplit(given).hostname
        if host is None:
            raise click.BadParameter(f"'{given}' names no host", param_hint="--supervisor")
        return f"{host}:{settings.supervisor_port}"
    host, colon, port = given.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise click.BadParameter(f"'{given}' is not of the form HOST:PORT", param_hint="--supervisor")
    return given


def check_reach(supervisor: str, host: str, home: Path) -> None:
    """Refuse what cannot work or must not be: a worker that its supervisor cannot reach, or one without the cluster's key.

    Raises:
        InvalidRequest: with what to do.
    """
    if not is_loopback(supervisor.rpartition(":")[0]) and is_loopback(host):
        raise InvalidRequest(
            "the supervisor is on another machine: give an address of this one that it can reach with --host", param="host"
        )
    if not has_cluster_key(home):
        raise InvalidRequest(missing_key(home), param="home")


@click.command("xinference-worker", context_settings=SETTINGS)
@click.option("-s", "--supervisor", metavar="HOST:PORT", help="Where the supervisor waits for workers, as it says when it starts.")
@click.option("-e", "--endpoint", metavar="URL", help="The supervisor's API, instead of --supervisor.")
@click.option("-H", "--host", default=LOOPBACK, show_default=True, help="Address of this machine that the supervisor reaches.")
@process_options
def worker(supervisor: str | None, endpoint: str | None, host: str, log_level: str, **options: Any) -> int:
    """Run the replicas of this machine for a supervisor."""
    given = supervisor or endpoint
    if given is None or (supervisor is not None and endpoint is not None):
        raise click.UsageError("name the supervisor, with --supervisor HOST:PORT")
    set_up_logging(log_level)
    settings = settings_of(**options)
    address = supervisor_address(given, settings)
    check_reach(address, host, settings.home_dir)

    async def serve() -> None:
        async with running(start_worker(settings, address, host)) as cluster:
            click.echo(
                f"worker {cluster.identity.worker_id if cluster.identity else ''} at {cluster.address} joins {address}. Ctrl-C stops it."
            )
            await signalled()

    return run_server(serve)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    sys.exit(run(worker, arguments, "xinference-worker"))


if __name__ == "__main__":
    main()

"""Running a server process from its options to its end.

    start ──> serving ── first signal ──> draining (api/server.py) ──> stopping ──> nothing left
                         a further signal ends the draining; while stopping, signals are answered with a line of log

Importing this imports FastAPI, but not xoscar: that is imported where it is used, after its environment is set.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Final

import click
import uvloop

from xinference.api.app import create_app
from xinference.api.auth import ADMIN_KEY_FILE, load_admin_key
from xinference.api.key_store import KeyStore
from xinference.api.keys import KeyRing, key_ring
from xinference.api.server import listen, serve
from xinference.core.cluster import LocalCluster
from xinference.errors import Conflict, InvalidRequest
from xinference.model.llm.engine_log import Redactor
from xinference.settings import Limits, Settings, read_settings

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# All requests have ended or were told that they have: engines only need to tidy up.
ENGINE_GRACE_SECONDS: Final = 5.0
QUIET_LOGGERS: Final = ("xoscar", "uvicorn")
LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


@dataclass(frozen=True)
class Door:
    """Where the API is reached: a listening socket, and the keys that it asks for."""

    listener: socket.socket
    keys: KeyRing
    store: KeyStore

    @property
    def address(self) -> str:
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class RedactingFormatter(logging.Formatter):
    """Hides what looks like a key, token or password, and the secret values of this process's environment; in tracebacks, too."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)
        self._redact = Redactor.for_environment(os.environ)

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


def set_up_logging(level: str) -> None:
    """Log to stderr; one line per event. The libraries below report at debug level only what goes well."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":
        for name in QUIET_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)


def open_door(settings: Settings) -> Door:
    """Bind before anything is started, so that a taken port costs nothing.

    Raises:
        InvalidRequest: the administrator's key or the file of keys cannot be relied on, so that nobody may be let in.
        Conflict: the port is taken.
    """
    try:
        admin_key = load_admin_key(settings.home_dir)
        store = KeyStore(settings.home_dir)
        stored = store.load()
    except OSError as error:
        raise InvalidRequest(f"no API key can be kept in {settings.home_dir}: {error}", param="home") from error
    keys = key_ring(settings, admin_key, [row.key() for row in stored.values()])
    try:
        return Door(listen(settings.host, settings.port), keys, store)
    except OSError as error:
        raise Conflict(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; choose another with --port") from error


def greeting(door: Door, cluster: LocalCluster) -> list[str]:
    """What the user needs to know now: address, keys, how to go on."""
    settings = cluster.settings
    lines = [f"Xinference serves at {door.address}, for OpenAI clients at {door.address}/v1"]
    if door.keys.required:
        lines.append(f"API keys are asked for; the administrator's is in {settings.home_dir / ADMIN_KEY_FILE}")
    else:
        lines.append("No API key is asked for: only this machine can connect. --require-key changes that")
        if len(door.keys.keys) > 1:
            lines.append(f"The API keys in {door.store.path} bind nobody until then")
    if cluster.worker is None:
        lines.append(f"Workers join with: xinference-worker --supervisor {cluster.address}")
    return [*lines, "Ctrl-C stops it."]


def say(lines: list[str]) -> None:
    """Print; a full disk behind the standard output is no reason not to serve, nor for an exit status of its own at the end."""
    try:
        for line in lines:
            click.echo(line)
    except OSError as error:
        logger.warning("cannot print where the server is: %s", error)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


async def serve_api(door: Door, cluster: LocalCluster) -> None:
    """Serve the API of a cluster until a signal asks to stop and all requests have ended."""
    # Imports xoscar, which reads XOSCAR_DIR when it is imported: see actor_directory.
    from xinference.api.cluster import SupervisorClient

    app = create_app(SupervisorClient(cluster.supervisor), cluster.settings, read_settings(Limits), door.keys, store=door.store)
    say(greeting(door, cluster))
    await serve(app, door.listener)


@contextlib.contextmanager
def actor_directory() -> Iterator[None]:
    """A directory for the sockets between this server's own processes, gone afterwards.

    Below the temporary directory, because the path of a Unix socket holds 107 bytes and a home directory may be deep.

    Raises:
        RuntimeError: xoscar was imported before, so that it uses another directory than the processes it starts.
    """
    if "xoscar" in sys.modules:
        raise RuntimeError("xoscar was imported before its directory was made")
    with tempfile.TemporaryDirectory(prefix="xinference-", ignore_cleanup_errors=True) as path:
        os.environ["XOSCAR_DIR"] = path
        yield


@contextlib.asynccontextmanager
async def running(starting: Coroutine[Any, Any, LocalCluster]) -> AsyncIterator[LocalCluster]:
    """A cluster that is stopped on every way out. A signal while it starts takes it back.

    Raises:
        Conflict: it cannot start here: a port is taken, a key file is open to others.
    """
    loop, starter = asyncio.get_running_loop(), asyncio.ensure_future(starting)
    for number in SIGNALS:
        loop.add_signal_handler(number, starter.cancel)
    try:
        cluster = await starter
    except OSError as error:
        raise Conflict(f"the server cannot start: {error}") from error
    finally:
        _tell_that_stopping()
    try:
        yield cluster
    finally:
        _tell_that_stopping()
        await cluster.stop(ENGINE_GRACE_SECONDS)
        logger.info("stopped")


def _tell_that_stopping() -> None:
    """From here on signals change nothing: stopping is under way and has deadlines of its own."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, logger.warning, "stopping already")


async def signalled() -> None:
    """Wait for SIGTERM or SIGINT."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, asked.set)
    await asked.wait()


def run_server(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a server process to its end; returns its exit code. A terminal that closes stops it like any other signal."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with actor_directory():
        try:
            # A fifth to a quarter less CPU time for each token that passes (benchmarks/api_overhead.py).
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except asyncio.CancelledError:
            logger.info("stopped while starting")
    return 0

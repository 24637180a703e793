"""A local server in the background: started detached, found again by its record in the home directory, stopped with proof."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from xinference.client.presence import is_running
from xinference.deploy.footprint import Footprint, ProcessId
from xinference.errors import XinferenceError
from xinference.settings import Settings

RECORD_NAME: Final = "local.pid"
LOG_NAME: Final = "local.log"
START_SECONDS: Final = 60.0
# Beside the drain time: engines get a few seconds to end before they are killed.
STOP_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.1
SHOWN_LOG_LINES: Final = 15


class BackgroundError(XinferenceError):
    """The server in the background did not start, or did not stop as it should."""

    default_code = "background_server"


@dataclass(frozen=True)
class Server:
    """A server that was started in the background."""

    process: ProcessId
    endpoint: str
    record: Path

    def footprint(self, shm_dir: Path) -> Footprint:
        return Footprint.of(self.process, shm_dir)


def endpoint_of(settings: Settings) -> str:
    """Where a server with these settings answers."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


def find(home: Path) -> Server | None:
    """The server that was started in the background from this home directory, if it lives."""
    record = home / RECORD_NAME
    try:
        fields = json.loads(record.read_text())
        server = Server(ProcessId(int(fields["pid"]), float(fields["created"])), str(fields["endpoint"]), record)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return server if server.process.process() is not None else None


def start(settings: Settings, while_waiting: Callable[[], None]) -> Server:
    """Start a local server, detached from this terminal, and wait until it answers.

    The API key, if there is one, reaches it through the environment: command lines can be read by everybody.

    Raises:
        BackgroundError: it ended, or did not answer in time; the end of its log is in the message.
    """
    home, endpoint = settings.home_dir, endpoint_of(settings)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = home / LOG_NAME
    command = [sys.executable, "-m", "xinference.deploy.local", "--host", settings.host, "--port", str(settings.port)]
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    server = Server(ProcessId.of(psutil.Process(child.pid)), endpoint, home / RECORD_NAME)
    _write_record(server)
    deadline = time.monotonic() + START_SECONDS
    while not is_running(endpoint):
        while_waiting()
        if child.poll() is not None:
            raise BackgroundError(f"the server ended with status {child.returncode}; the end of {log}:\n{_tail(log)}")
        if time.monotonic() > deadline:
            child.terminate()
            raise BackgroundError(f"the server does not answer after {START_SECONDS:.0f} s; the end of {log}:\n{_tail(log)}")
        time.sleep(POLL_SECONDS)
    if child.poll() is not None:
        raise BackgroundError(f"another server answers at {endpoint}; the end of {log}:\n{_tail(log)}")
    return server


def stop(server: Server, settings: Settings) -> list[str]:
    """Stop a server and everything it started; returns what is left of it, in words.

    The first signal lets it drain; what does not go by itself in time is reported, not killed: it is a defect that must be seen.
    """
    footprint = server.footprint(settings.shm_dir)
    process = server.process.process()
    if process is not None:
        process.terminate()
    remains = footprint.wait_until_gone(settings.drain_seconds + STOP_SECONDS)
    if not remains:
        server.record.unlink(missing_ok=True)
    return remains


def _write_record(server: Server) -> None:
    fields = {"pid": server.process.pid, "created": server.process.created, "endpoint": server.endpoint}
    temporary = server.record.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(fields))
    temporary.replace(server.record)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:])

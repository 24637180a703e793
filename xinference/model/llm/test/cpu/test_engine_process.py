"""Engine processes and their keeper: nothing outlives a stop, a crash of the worker, or a crash of the keeper."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from xinference.model.llm import keeper
from xinference.model.llm.engine import EngineError, EngineExited, EngineNotReady, EngineNotStarted, EngineProcess
from xinference.model.llm.orphans import MARK, kill_orphans, marked_processes
from xinference.model.llm.sockets import SocketPathRefused
from xinference.model.llm.test.replicas import eventually

# Serves /health on a Unix socket; starts a child that hides in a session of its own, ignores SIGTERM, and leaves its pid.
SERVER = """
import os, signal, socketserver, subprocess, sys
from http.server import BaseHTTPRequestHandler
uds, pids = sys.argv[1:3]
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
                         start_new_session="hide" in sys.argv)
if "stubborn" in sys.argv:
    signal.signal(15, signal.SIG_IGN)
open(pids, "w").write(f"{os.getpid()} {child.pid}")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "sick" in sys.argv else 200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *args): pass
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    def get_request(self):
        return super().get_request()[0], ("", 0)
print("serving with api_key=super-secret-value and", os.environ.get("MY_TOKEN"), flush=True)
Server(uds, Handler).serve_forever()
"""

Make = Callable[..., EngineProcess]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[EngineProcess] = []

    def build(*arguments: str, code: str = SERVER, env: dict[str, str] | None = None, lines: list[str] | None = None) -> EngineProcess:
        uds = tmp_path / "run" / "engine.sock"
        command = [sys.executable, "-c", code, str(uds), str(tmp_path / "pids"), *arguments]
        log = lines.append if lines is not None else lambda line: None
        made.append(EngineProcess(command, {**os.environ, **(env or {})}, uds, log))
        return made[-1]

    yield build
    for engine in made:
        await engine.stop(0.1)


def pids(directory: Path) -> list[psutil.Process]:
    return [psutil.Process(int(pid)) for pid in (directory / "pids").read_text().split()]


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


async def test_a_started_engine_becomes_ready_and_healthy(make: Make, tmp_path: Path) -> None:
    engine = make()
    assert not await engine.health()
    await engine.start()
    await engine.wait_ready(20)
    assert await engine.health()
    assert engine.running
    assert engine.pid == pids(tmp_path)[0].pid
    assert engine.uds.stat().st_mode & 0o777 == 0o600
    assert engine.uds.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("arguments", [(), ("hide",), ("stubborn",), ("hide", "stubborn")])
async def test_a_stop_ends_the_whole_tree_and_removes_the_socket(make: Make, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    engine = make(*arguments)
    await engine.start()
    await engine.wait_ready(20)
    tree = pids(tmp_path)
    status = await engine.stop(0.3)
    assert gone(tree)
    assert not engine.uds.exists()
    assert not engine.running
    assert status == (-signal.SIGKILL if "stubborn" in arguments else -signal.SIGTERM)
    assert await engine.stop(0.3) == status


async def test_a_stop_before_the_start_is_nothing(make: Make) -> None:
    engine = make()
    assert await engine.stop(1) is None
    with pytest.raises(EngineError):
        await engine.wait()


async def test_a_stop_during_the_start_ends_it(make: Make) -> None:
    engine = make(code="import time; time.sleep(600)")
    await engine.start()
    waiting = asyncio.create_task(engine.wait_ready(60))
    await asyncio.sleep(0)
    await engine.stop(5)
    with pytest.raises(EngineExited):
        await waiting


async def test_a_cancelled_stop_still_ends_the_tree(make: Make, tmp_path: Path) -> None:
    engine = make("hide", "stubborn")
    await engine.start()
    await engine.wait_ready(20)
    tree = pids(tmp_path)
    stopping = asyncio.create_task(engine.stop(600))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await eventually(lambda: gone(tree))


async def test_an_engine_that_ends_early_names_its_cause(make: Make) -> None:
    lines: list[str] = []
    engine = make(code="raise ValueError('no such layer: 7')", lines=lines)
    await engine.start()
    with pytest.raises(EngineExited, match="exit status 1: ValueError: no such layer: 7"):
        await engine.wait_ready(20)
    assert lines[-1] == "ValueError: no such layer: 7"
    assert await engine.wait() == 1


async def test_a_killed_engine_is_reported_as_killed_and_its_children_die(make: Make, tmp_path: Path) -> None:
    engine = make("hide")
    await engine.start()
    await engine.wait_ready(20)
    tree = pids(tmp_path)
    tree[0].kill()
    assert await engine.wait() == -signal.SIGKILL
    assert gone(tree)
    assert "SIGKILL" in engine.explain(-signal.SIGKILL)


async def test_a_command_that_cannot_run_says_so_at_once(tmp_path: Path) -> None:
    engine = EngineProcess(["/no/such/program"], {}, tmp_path / "run" / "x.sock", lambda line: None)
    with pytest.raises(EngineNotStarted, match="/no/such/program: No such file"):
        await engine.start()
    await engine.stop(1)


async def test_an_engine_that_never_serves_is_not_ready_in_time_and_keeps_running(make: Make) -> None:
    engine = make("sick")
    await engine.start()
    with pytest.raises(EngineNotReady, match=r"within 0\.5 s"):
        await engine.wait_ready(0.5)
    assert engine.running


async def test_secrets_do_not_reach_the_log(make: Make) -> None:
    lines: list[str] = []
    engine = make(env={"MY_TOKEN": "hunter2hunter2"}, lines=lines)
    await engine.start()
    await engine.wait_ready(20)
    assert lines == ["serving with api_key=[redacted] and [redacted]"]


async def test_an_engine_can_be_interrupted_though_its_starter_blocks_interrupts(make: Make, tmp_path: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        engine = make()
        await engine.start()
        await engine.wait_ready(20)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGINT)
    assert await engine.wait() in (1, -signal.SIGINT)  # Python turns it into KeyboardInterrupt


async def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    engine = EngineProcess(["true"], {}, tmp_path / ("x" * 100) / "engine.sock", lambda line: None)
    with pytest.raises(SocketPathRefused, match="bytes"):
        await engine.start()


async def test_a_stale_socket_is_replaced(make: Make) -> None:
    engine = make()
    engine.uds.parent.mkdir()
    engine.uds.write_text("left behind")
    await engine.start()
    await engine.wait_ready(20)


WORKER = """
import asyncio, json, os, sys
from pathlib import Path
from xinference.model.llm.engine import EngineProcess
async def main():
    spec = json.loads(sys.argv[1])
    engine = EngineProcess(spec["command"], dict(os.environ), Path(spec["uds"]), lambda line: None)
    await engine.start()
    await engine.wait_ready(30)
    print(engine.keeper_pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def worker(tmp_path: Path) -> tuple[subprocess.Popen[str], int]:
    """A process of its own that starts an engine; its handle and the keeper's pid."""
    uds = tmp_path / "run" / "w.sock"
    spec = {"command": [sys.executable, "-c", SERVER, str(uds), str(tmp_path / "pids"), "hide", "stubborn"], "uds": str(uds)}
    process = subprocess.Popen([sys.executable, "-c", WORKER, json.dumps(spec)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    keeper_pid = int(process.stdout.readline())
    process.stdout.close()
    return process, keeper_pid


def wait_gone(processes: list[psutil.Process], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not gone(processes):
        assert time.monotonic() < deadline, [p.cmdline() for p in processes if p.is_running()]
        time.sleep(0.01)


def test_no_part_of_an_engine_outlives_a_killed_worker(tmp_path: Path) -> None:
    process, keeper_pid = worker(tmp_path)
    tree = [psutil.Process(keeper_pid), *pids(tmp_path)]
    process.kill()
    process.wait()
    wait_gone(tree)


def test_a_killed_keeper_takes_the_engine_with_it(tmp_path: Path) -> None:
    process, keeper_pid = worker(tmp_path)
    tree = pids(tmp_path)
    try:
        os.kill(keeper_pid, signal.SIGKILL)
        wait_gone(tree)
    finally:
        process.kill()
        process.wait()


def test_what_a_dead_worker_and_a_dead_keeper_leave_is_found_by_the_next_worker(tmp_path: Path) -> None:
    process, keeper_pid = worker(tmp_path)
    tree = pids(tmp_path)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(keeper_pid, signal.SIGKILL)
    process.kill()
    process.wait()
    wait_gone(tree[:1])
    assert tree[1].pid in kill_orphans()
    wait_gone(tree)


async def test_engines_of_living_keepers_are_no_orphans(make: Make, tmp_path: Path) -> None:
    engine = make("hide")
    await engine.start()
    await engine.wait_ready(20)
    assert {p.pid for p in pids(tmp_path)} <= set(marked_processes())
    assert not {p.pid for p in pids(tmp_path)} & set(kill_orphans())
    assert await engine.health()


def test_the_mark_has_one_name() -> None:
    assert keeper.MARK == MARK

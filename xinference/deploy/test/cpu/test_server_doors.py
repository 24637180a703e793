"""Who may reach a server: taken ports, other machines, keys; and a worker that joins from another process."""

import contextlib
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from xinference.client.sync_client import Client
from xinference.deploy.test.servers import STOP_SECONDS, ServerProcess, make_model
from xinference.errors import AuthenticationFailed

REFUSED = "refused: is the cluster key the supervisor's?"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess("local", tmp_path)
    yield server
    server.kill()


def end(server: ServerProcess) -> int:
    assert server.process is not None
    return server.process.wait(timeout=STOP_SECONDS)


def test_a_taken_port_is_said_in_words_before_anything_starts(server: ServerProcess) -> None:
    with socket.create_server(("127.0.0.1", server.port)):
        server.start("--port", str(server.port), "--supervisor-port", "0")
        assert end(server) == 1
    assert f"cannot listen on 127.0.0.1 port {server.port}" in server.log
    assert "Traceback" not in server.log


def test_a_taken_supervisor_port_is_said_in_words(server: ServerProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.start("--port", str(server.port), "--supervisor-port", str(listener.getsockname()[1]))
        assert end(server) == 1
    assert "the server cannot start" in server.log
    assert "Traceback" not in server.log


def test_other_machines_are_served_only_with_a_key(server: ServerProcess) -> None:
    server.start("--host", "0.0.0.0", "--port", str(server.port), "--supervisor-port", "0")
    server.wait_until_serving()
    key_file = server.home / "admin.key"
    assert str(key_file) in server.log
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    with Client(server.endpoint) as client, pytest.raises(AuthenticationFailed):
        client.models()
    key = key_file.read_text().strip()
    with Client(server.endpoint, key) as client:
        assert client.models() == []
    assert key not in server.log


def test_other_machines_are_not_served_when_the_key_is_not_secret(server: ServerProcess) -> None:
    server.home.mkdir()
    (server.home / "admin.key").write_text("xin-everybody-knows")
    (server.home / "admin.key").chmod(0o644)
    server.start("--host", "0.0.0.0", "--port", str(server.port), "--supervisor-port", "0")
    assert end(server) == 2
    assert "chmod 600" in server.log


def test_a_key_can_be_asked_for_on_loopback_too(server: ServerProcess) -> None:
    server.start("--require-key", "--port", str(server.port), "--supervisor-port", "0")
    server.wait_until_serving()
    with Client(server.endpoint) as client, pytest.raises(AuthenticationFailed):
        client.models()


def test_a_worker_in_another_process_joins_and_leaves(server: ServerProcess, tmp_path: Path) -> None:
    supervisor = ServerProcess("supervisor", tmp_path)
    worker = ServerProcess("worker", tmp_path)
    try:
        supervisor.start("--port", str(supervisor.port), "--supervisor-port", "0")
        supervisor.wait_until_serving()
        supervisor.wait_for(lambda: "Workers join with" in supervisor.log, "it does not say where")
        address = supervisor.log.partition("--supervisor ")[2].split()[0]
        worker.start("--supervisor", address)
        with Client(supervisor.endpoint) as client:
            worker.wait_for(lambda: client.read("/v1/workers")["data"], "it does not join")
            uid = client.launch(model_path=str(make_model(tmp_path / "model")), model_engine="fake", wait_ready=True)
            assert client.generate(uid, "hello", max_tokens=2)["usage"]["completion_tokens"] > 0
            footprint = worker.footprint()
            assert worker.stop(signal.SIGTERM) == 0, worker.log
            assert footprint.wait_until_gone(10) == []
        assert supervisor.stop(signal.SIGTERM) == 0, supervisor.log
        assert list(supervisor.shm.iterdir()) == []
    finally:
        worker.kill()
        supervisor.kill()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ((), "--supervisor HOST:PORT"),
        (("--supervisor", "nowhere"), "not of the form HOST:PORT"),
        (("--supervisor", "10.1.2.3:9998"), "--host"),
        (("--supervisor", "10.1.2.3:9998", "--host", "10.1.2.4"), "copy cluster.key from the supervisor's home"),
        (("--supervisor", "127.0.0.1:9998"), "copy cluster.key from the supervisor's home"),
    ],
)
def test_a_worker_that_cannot_work_is_refused_at_once(tmp_path: Path, words: tuple[str, ...], hint: str) -> None:
    worker = ServerProcess("worker", tmp_path)
    worker.start(*words)
    assert end(worker) == 2
    assert hint in worker.log
    assert not (worker.home / "cluster.key").exists()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[ServerProcess]:
    """A worker with a home and a key of its own."""
    root = tmp_path / "elsewhere"
    root.mkdir()
    worker = ServerProcess("worker", root)
    worker.home.mkdir(mode=0o700)
    (worker.home / "cluster.key").touch(0o600)
    (worker.home / "cluster.key").write_text("another")
    yield worker
    worker.kill()


def test_a_worker_with_another_key_is_told_what_may_be_wrong(tmp_path: Path, elsewhere: ServerProcess) -> None:
    supervisor = ServerProcess("supervisor", tmp_path)
    try:
        supervisor.start("--port", str(supervisor.port), "--supervisor-port", "0")
        supervisor.wait_for(lambda: "Workers join with" in supervisor.log, "it does not say where")
        elsewhere.start("--supervisor", supervisor.log.partition("--supervisor ")[2].split()[0])
        elsewhere.wait_for(lambda: REFUSED in elsewhere.log, "it does not say")
    finally:
        supervisor.kill()


def test_a_worker_that_is_refused_again_and_again_says_so_once(elsewhere: ServerProcess) -> None:
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()
                    connections.append(1)

        threading.Thread(target=refuse, daemon=True).start()
        elsewhere.start("--supervisor", f"127.0.0.1:{listener.getsockname()[1]}")
        elsewhere.wait_for(lambda: len(connections) >= 8, "it does not try again")  # two for each attempt
        listener.shutdown(socket.SHUT_RDWR)
    elsewhere.wait_for(lambda: "does not answer" in elsewhere.log, "it does not say what has changed")
    assert elsewhere.log.count(REFUSED) == 1

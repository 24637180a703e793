"""The command line as a process: interrupted, its reader gone, no terminal, a locale that cannot say everything, a server that hangs."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from xinference.client.test.fakes import FakeServer, serving

SECONDS = 60


def start(*words: str, **environment: str) -> "subprocess.Popen[bytes]":
    """One command line in a session of its own, without a terminal."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XINFERENCE_", "LC_", "LANG", "PYTHON"))}
    return subprocess.Popen(
        [sys.executable, "-m", "xinference.deploy", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=inherited | environment,
        start_new_session=True,
    )


def interrupt(process: "subprocess.Popen[bytes]") -> None:
    """Ctrl-C, once it waits for the answer.

    Python runs its handlers between bytecodes, so a signal in the few microseconds before a blocking call is seen when that call ends. No
    user meets that instant, but a test that acts on the first byte of a request does.
    """
    deadline = time.monotonic() + SECONDS
    while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)


def ended(process: "subprocess.Popen[bytes]") -> tuple[int, str, str]:
    """Exit code, stdout and stderr; no traceback in either."""
    out, err = process.communicate(timeout=SECONDS)
    assert b"Traceback" not in out + err, err.decode()
    assert b"Exception ignored" not in err
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


@contextmanager
def hanging() -> Iterator[tuple[str, threading.Event]]:
    """A server that takes connections and says nothing; the event tells that something was asked."""
    asked, over = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            kept = []
            while not over.is_set():
                connection, _ = listener.accept()
                kept.append(connection)
                if not over.is_set() and connection.recv(1):
                    asked.set()
            for connection in kept:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        finally:
            over.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join()


@pytest.mark.parametrize(
    "words", [("list",), ("show", "m"), ("logs", "m", "--follow"), ("generate", "m", "--prompt", "x"), ("keys", "list")]
)
def test_ctrl_c_while_a_server_hangs_is_130_at_once(words: tuple[str, ...]) -> None:
    with hanging() as (address, asked):
        process = start(*words, XINFERENCE_ENDPOINT=address)
        assert asked.wait(SECONDS)
        interrupt(process)
        code, out, _ = ended(process)
    assert (code, out) == (130, "")


def test_ctrl_c_is_told_of_in_json_to_who_asked_for_json() -> None:
    with hanging() as (address, asked):
        process = start("list", "-o", "json", XINFERENCE_ENDPOINT=address)
        assert asked.wait(SECONDS)
        interrupt(process)
        code, out, err = ended(process)
    assert (code, out) == (130, "")
    assert '"code": "interrupted"' in err


@pytest.mark.parametrize("words", [("list",), ("list", "-o", "json"), ("--help",), ("logs", "m")])
def test_a_reader_that_has_seen_enough_is_no_fault(words: tuple[str, ...]) -> None:
    """As with ``| head -1``: here the reader is gone before the first line."""
    with serving(FakeServer()) as address:
        launched = start("launch", "--model-uid", "m", "--model-path", "/x", XINFERENCE_ENDPOINT=address)
        assert ended(launched)[0] == 0
        process = start(*words, XINFERENCE_ENDPOINT=address)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        code = process.wait(timeout=SECONDS)
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
    assert code in (0, 1)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_that_cannot_say_everything_garbles_letters_and_nothing_else(encoding: str) -> None:
    server = FakeServer()
    with serving(server) as address:
        environment = {"XINFERENCE_ENDPOINT": address, "PYTHONIOENCODING": encoding, "LC_ALL": "C", "PYTHONUTF8": "0"}
        launched = start("launch", "--model-uid", "m", "--model-path", "/modèles/快", XINFERENCE_ENDPOINT=address)
        assert ended(launched)[0] == 0
        for words in (("list",), ("show", "m"), ("list", "-o", "json"), ("--help",)):
            code, out, _ = ended(start(*words, **environment))
            assert (code, bool(out.strip())) == (0, True), words
        _, out, _ = ended(start("show", "m", "-o", "json", **environment))
        assert json.loads(out)["spec"]["model_path"] == "/modèles/快"
        code, _, err = ended(start("show", "快", **environment))
        assert code in (1, 2)
        assert "Error" in err


@pytest.mark.parametrize(("module", "variable"), [("local", "XINFERENCE_PORT"), ("supervisor", "XINFERENCE_SUPERVISOR_PORT")])
def test_a_server_that_is_set_up_wrongly_says_which_variable(module: str, variable: str) -> None:
    command = [sys.executable, "-m", f"xinference.deploy.{module}"]
    done = subprocess.run(command, env=os.environ | {variable: "soon"}, capture_output=True, timeout=SECONDS, check=False)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert variable.encode() in done.stderr

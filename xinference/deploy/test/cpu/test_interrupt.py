"""Ctrl-C during a launch: the first cancels and waits, the second detaches, and none is lost."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from xinference.client.test.fakes import FakeServer, serving

SECONDS = 30


class Launch:
    """A launch of model ``m`` in a process of its own."""

    def __init__(self, address: str, *options: str) -> None:
        words = ["launch", "--model-uid", "m", "--model-path", "/models/m", "-e", address, *options]
        command = [sys.executable, "-m", "xinference.deploy", *words]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def read_until(self, text: str) -> None:
        """Read stderr up to a line with this text."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if text in line:
                return
        pytest.fail(f"'{text}' was never printed")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Exit code, and what stderr still had."""
        _, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, err


@pytest.fixture
def server() -> FakeServer:
    return FakeServer(holds={"m"}, hold_seconds=0.5)


@pytest.fixture
def address(server: FakeServer) -> Iterator[str]:
    with serving(server) as address:
        yield address


@pytest.fixture
def launch(address: str) -> Iterator[Launch]:
    launch = Launch(address)
    yield launch
    launch.process.kill()
    launch.process.communicate(timeout=SECONDS)


def test_the_first_ctrl_c_cancels_and_waits_for_the_end(server: FakeServer, launch: Launch) -> None:
    launch.read_until("plan made")
    launch.interrupt()
    code, err = launch.end()
    assert code == 130
    assert "the launch of m was cancelled" in err
    assert server.events["m"][-1]["stage"] == "cancelled"


def test_the_second_ctrl_c_detaches_from_a_launch_that_will_not_end(server: FakeServer, launch: Launch) -> None:
    server.stubborn.add("m")
    launch.read_until("plan made")
    launch.interrupt()
    launch.read_until("press Ctrl-C again")
    launch.interrupt()
    code, err = launch.end()
    assert code == 130
    assert "detached" in err


def test_a_script_is_told_of_a_cancelled_launch_in_json(server: FakeServer, address: str) -> None:
    launch = Launch(address, "-o", "json")
    launch.read_until("plan made")
    launch.interrupt()
    code, err = launch.end()
    assert code == 130
    error = json.loads(err.splitlines()[-1])["error"]
    assert (error["message"], error["code"]) == ("the launch of m was cancelled", "launch_cancelled")
    assert server.events["m"][-1]["stage"] == "cancelled"


def test_a_ctrl_c_before_the_uid_is_known_still_cancels_the_launch(server: FakeServer, address: str) -> None:
    server.gate.clear()
    launch = Launch(address)
    asked = threading.Event()
    while not server.seen and launch.process.poll() is None:
        asked.wait(0.01)
    launch.interrupt()
    server.gate.set()
    code, err = launch.end()
    assert code == 130
    assert "the launch of m was cancelled" in err
    assert [target for method, target, _, _ in server.seen if method == "POST"] == ["/v1/models", "/v1/models/m/cancel"]

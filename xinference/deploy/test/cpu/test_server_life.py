"""A server with the fake engine through the command line, from start to a clean end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from xinference.deploy.cli import cli, run
from xinference.deploy.test.servers import ServerProcess, make_model


class Tool(Protocol):
    def __call__(self, *words: str, code: int = 0) -> str: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess("local", tmp_path)
    server.start("--port", str(server.port), "--supervisor-port", "0")
    yield server
    server.kill()


@pytest.fixture
def tool(server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    """Runs one command line against the server; checks the exit code and returns stdout."""
    server.wait_until_serving()
    monkeypatch.setenv("XINFERENCE_ENDPOINT", server.endpoint)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str, code: int = 0) -> str:
        found = run(cli, list(words), "xinference")
        out, err = capsys.readouterr()
        assert found == code, err + server.log
        return out

    return call


@pytest.fixture
def launch(tmp_path: Path) -> list[str]:
    """The words that launch a model of the fake engine."""
    return ["launch", "-u", "m", "--model-path", str(make_model(tmp_path / "model")), "--model-engine", "fake"]


def states(tool: Tool) -> dict[str, str]:
    return {replica["replica_uid"]: replica["state"] for replica in json.loads(tool("show", "m", "-o", "json"))["replicas"]}


def test_a_model_goes_through_its_life_by_command_line(server: ServerProcess, tool: Tool, launch: list[str]) -> None:
    sharing = ("--replica", "2", "--enable-xavier", "--xavier-cpu-cache-bytes", "1MiB")
    assert "blocks" in tool(*launch, *sharing, "--dry-run")
    assert json.loads(tool("list", "-o", "json")) == []
    assert f"m serves at {server.endpoint}/v1" in tool(*launch, *sharing)
    assert states(tool) == {"m-0": "ready", "m-1": "ready"}
    assert tool("chat", "m", "--prompt", "hello", "--max-tokens", "8").strip()
    answer: dict[str, Any] = json.loads(tool("generate", "m", "--prompt", "hello", "--replica", "m-1", "-o", "json"))
    assert answer["usage"]["completion_tokens"] > 0
    assert "3 of 3 replicas ready" in tool("scale", "m", "--replica", "3")
    assert "2 of 2 replicas ready" in tool("scale", "m", "--replica", "2")
    tool("cache", "stats", "m")
    assert json.loads(tool("cache", "clear", "m", "-o", "json"))["status"] in ("cleared", "pending")
    assert "serving" in tool("logs", "m", "--replica", "m-0")
    tool("terminate", "m")
    tool("show", "m", code=1)
    assert list(server.shm.iterdir()) == []


def test_ctrl_c_during_a_launch_leaves_no_engine_and_no_model(server: ServerProcess, tool: Tool, launch: list[str]) -> None:
    before = server.footprint().processes
    command = [sys.executable, "-m", "xinference.deploy", *launch, "--engine-arg", "start_delay_seconds=60.0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stderr is not None
    for line in process.stderr:
        if "loads the model" in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the launch of m was cancelled" in err
    server.wait_for(lambda: server.footprint().processes <= before, "an engine is left")
    assert all(model["state"] not in ("ready", "launching") for model in json.loads(tool("list", "-o", "json")))


ENDS = {"service": (signal.SIGTERM, False), "ctrl-c": (signal.SIGINT, True), "closed terminal": (signal.SIGHUP, False)}


@pytest.mark.parametrize(("number", "whole_group"), ENDS.values(), ids=ENDS)
def test_a_stopped_server_leaves_no_process_and_no_shared_memory(
    server: ServerProcess, tool: Tool, launch: list[str], number: signal.Signals, whole_group: bool
) -> None:
    tool(*launch, "--replica", "2", "--enable-xavier", "--xavier-cpu-cache-bytes", "1MiB")
    footprint = server.footprint()
    assert len(footprint.processes) >= 3
    assert list(server.shm.iterdir()) != []
    assert server.stop(number, whole_group) == 0, server.log
    assert footprint.wait_until_gone(10) == []
    assert list(server.shm.iterdir()) == []
    assert "Traceback" not in server.log


def test_a_server_says_where_it_is_and_that_no_key_is_asked_for(server: ServerProcess) -> None:
    server.wait_until_serving()
    assert f"serves at {server.endpoint}" in server.log
    assert "No API key is asked for" in server.log


def test_a_server_that_is_stopped_while_it_starts_ends_by_itself(server: ServerProcess) -> None:
    server.wait_for(lambda: (server.home / "admin.key").exists(), "it does not start")
    footprint = server.footprint()
    server.stop()
    assert footprint.wait_until_gone(10) == []

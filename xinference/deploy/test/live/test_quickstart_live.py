"""The quick start with real engines: shared, kept, shared again, and gone."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from xinference.deploy.test.servers import free_port
from xinference.model.llm.demo_model import ensure_demo_model
from xinference.settings import Settings

LAST_LINE = "demo: 1472 of 1500 prompt tokens came from the other replica's cache"
COMMAND_SECONDS = 400


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A home and a shared-memory directory of their own; the demo model is the user's, it takes a minute to make."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "models").symlink_to(ensure_demo_model(Settings().home_dir).parent)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="quickstart-") as shm:
        own = {
            "XINFERENCE_HOME": str(home),
            "XINFERENCE_SHM_DIR": shm,
            "XINFERENCE_PORT": str(free_port()),
            "XINFERENCE_SUPERVISOR_PORT": "0",
        }
        own["XINFERENCE_ENDPOINT"] = f"http://127.0.0.1:{own['XINFERENCE_PORT']}"
        yield {name: value for name, value in os.environ.items() if not name.startswith(("XINFERENCE_", "XOSCAR_"))} | own
        for process in ours(str(home)):
            process.kill()


def ours(home: str) -> list[psutil.Process]:
    """Processes of this test's server and its engines: those with its home in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("XINFERENCE_HOME") == home:
                found.append(process)
        except psutil.Error:
            continue
    return found


def tool(environment: dict[str, str], *words: str) -> str:
    """One command; its stdout."""
    command = [sys.executable, "-m", "xinference.deploy", *words]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    log = Path(environment["XINFERENCE_HOME"], "local.log")
    assert found.returncode == 0, found.stdout + found.stderr + (log.read_text() if log.exists() else "")
    return found.stdout


def test_two_replicas_share_a_prompt_and_everything_can_be_stopped(environment: dict[str, str]) -> None:
    first = tool(environment, "quickstart")
    assert first.splitlines()[-1] == LAST_LINE
    assert "The server stays" in first
    answer = tool(environment, "chat", "demo", "--prompt", "What is the capital of France?", "--temperature", "0", "--max-tokens", "16")
    assert "Paris" in answer
    assert re.search(r"peer_cpu +0 +1,472", tool(environment, "cache", "stats", "demo"))
    second = tool(environment, "quickstart", "--exit")
    assert second.splitlines()[-1] == LAST_LINE
    assert "done launch" not in second
    assert "no process and no shared memory is left" in second
    assert ours(environment["XINFERENCE_HOME"]) == []
    assert list(Path(environment["XINFERENCE_SHM_DIR"]).iterdir()) == []

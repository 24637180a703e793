"""The doctor on the machine that runs the tests."""

import json
import socket
from pathlib import Path

import pytest

from xinference.deploy.cli import cli, run
from xinference.deploy.machine import survey
from xinference.settings import Settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a server that nobody else runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("XINFERENCE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XINFERENCE_PORT", str(port))
    monkeypatch.setenv("XINFERENCE_SUPERVISOR_PORT", "0")
    monkeypatch.setenv("XINFERENCE_SHM_DIR", str(tmp_path))
    return Settings()


def test_this_machine_is_surveyed_without_changing_it(settings: Settings) -> None:
    found = survey(settings)
    assert found.versions["xoscar"].startswith("0.12")
    assert [port.free for port in found.ports] == [True]
    assert found.home.mode is None
    assert not settings.home_dir.exists()


def test_a_port_that_a_stranger_holds_is_broken_and_the_exit_code_says_so(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", settings.port)):
        code = run(cli, ["doctor", "-o", "json"], "xinference")
    findings = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert code == 1
    assert findings[f"port {settings.port}"]["status"] == "broken"
    assert "--port" in findings[f"port {settings.port}"]["fix"]

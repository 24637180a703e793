"""A server in the background: started detached, found again, stopped with proof."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from xinference.client.presence import is_running
from xinference.deploy import background
from xinference.deploy.background import BackgroundError
from xinference.deploy.test.servers import free_port
from xinference.settings import Settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings that the background server reads from the environment, as its starter did."""
    monkeypatch.setenv("XINFERENCE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XINFERENCE_SHM_DIR", str(tmp_path))
    monkeypatch.setenv("XINFERENCE_SUPERVISOR_PORT", "0")
    monkeypatch.setenv("XINFERENCE_PORT", str(free_port()))
    settings = Settings()
    yield settings
    server = background.find(settings.home_dir)
    if server is not None:
        background.stop(server, settings)


def nothing() -> None:
    """Nobody watches."""


def test_a_server_is_started_found_again_and_stopped_without_remains(settings: Settings) -> None:
    server = background.start(settings, nothing)
    assert is_running(server.endpoint)
    assert background.find(settings.home_dir) == server
    assert background.stop(server, settings) == []
    assert background.find(settings.home_dir) is None
    assert not is_running(server.endpoint)
    assert not server.record.exists()


def test_a_server_that_cannot_start_says_why_with_its_own_words(settings: Settings) -> None:
    expected = f"cannot listen on .* port {settings.port}"
    with socket.create_server(("127.0.0.1", settings.port)), pytest.raises(BackgroundError, match=expected):
        background.start(settings, nothing)
    assert background.find(settings.home_dir) is None


@pytest.mark.parametrize("text", ["", "not JSON", '{"pid": 1}', '{"pid": 1, "created": 0.5, "endpoint": "http://127.0.0.1:1"}'])
def test_a_record_of_nobody_is_not_taken_for_a_server(settings: Settings, text: str) -> None:
    settings.home_dir.mkdir()
    (settings.home_dir / background.RECORD_NAME).write_text(text)
    assert background.find(settings.home_dir) is None

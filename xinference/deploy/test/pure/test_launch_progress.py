"""What a launch looks like: bars on a terminal, lines elsewhere."""

import re
from typing import Any

import pytest

from xinference.deploy.launch_follow import LaunchProgress

EVENTS: list[dict[str, Any]] = [
    {"stage": "accepted", "replica_uid": None, "message": "2 replicas", "progress": 0.0},
    {"stage": "planned", "replica_uid": None, "message": "1 MiB = 32 blocks", "progress": 0.0},
    {"stage": "loading", "replica_uid": "m-0", "message": "the engine\nloads \x1b[2Jthe model", "progress": 0.25},
    {"stage": "replica_ready", "replica_uid": "m-0", "message": "ready", "progress": 1.0},
    {"stage": "ready", "replica_uid": None, "message": "it serves", "progress": 1.0},
]


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines on stderr after all events, without colours; of a terminal, those of its last frame."""
    with LaunchProgress("m") as progress:
        for event in EVENTS:
            progress.show(event)
    out, err = capsys.readouterr()
    assert out == ""
    frames = re.split(r"(?:\x1b\[2K|\x1b\[1A|\r)+", err)
    return [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frames[-1]).splitlines() if line.strip()]


def test_without_a_terminal_every_event_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert shown(capsys) == ["m: 2 replicas", "m: 1 MiB = 32 blocks", "m-0: the engine loads [2Jthe model", "m-0: ready", "m: it serves"]


def test_on_a_terminal_model_and_replicas_have_a_bar_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    model, replica = shown(capsys)
    assert re.match(r"m +━+ it serves +0:00:00$", model)
    assert re.match(r"m-0 +━+ ready +0:00:00$", replica)

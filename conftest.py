"""Layers of tests: a test's folder says what it needs, and the marker follows from the folder."""

from pathlib import Path

import pytest

LAYERS = ("pure", "cpu", "live", "gpu")
LIVE_TIMEOUT_SECONDS = 600


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say what is not run."""
    return None if _wants_gpu(config) else "GPU tests are left out: `make test-gpu` runs them"


def _wants_gpu(config: pytest.Config) -> bool:
    return "gpu" in config.getoption("markexpr")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test by its layer and run the cheap layers first. Those for a GPU run only when they are asked for."""
    for item in items:
        layer = next((part for part in reversed(Path(item.fspath).parts) if part in LAYERS), "pure")
        item.add_marker(getattr(pytest.mark, layer))
        if layer in ("live", "gpu"):
            item.add_marker(pytest.mark.timeout(LIVE_TIMEOUT_SECONDS))
    items.sort(key=lambda item: next(LAYERS.index(mark.name) for mark in item.iter_markers() if mark.name in LAYERS))
    if not _wants_gpu(config):
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)

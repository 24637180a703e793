"""Layers of tests: a test's folder says what it needs, and the marker follows from the folder."""

from pathlib import Path

import pytest

LAYERS = ("pure", "cpu", "live", "gpu")
LIVE_TIMEOUT_SECONDS = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its layer and run the cheap layers first."""
    for item in items:
        layer = next((part for part in reversed(Path(item.fspath).parts) if part in LAYERS), "pure")
        item.add_marker(getattr(pytest.mark, layer))
        if layer in ("live", "gpu"):
            item.add_marker(pytest.mark.timeout(LIVE_TIMEOUT_SECONDS))
    items.sort(key=lambda item: next(LAYERS.index(mark.name) for mark in item.iter_markers() if mark.name in LAYERS))

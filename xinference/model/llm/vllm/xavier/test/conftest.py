"""For all tests of the cache: property tests are not timed, and a lock that a test did not release ends with it."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from xinference.model.llm.vllm.xavier.directory.files import FileLock

# A machine that is busy with something else is no reason to fail.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def locks_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lock lasts as long as its process, also when its segment is forgotten: thousands of tests would hold thousands of descriptors.

    What fixtures of a wider scope made before is theirs.
    """
    made: list[FileLock] = []
    init = FileLock.__init__

    def noted(self: FileLock, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(FileLock, "__init__", noted)
    yield
    for lock in made:
        lock.release()

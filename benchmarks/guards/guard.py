"""What an entry of the list of guards is, and how one is taken away from a source."""

from dataclasses import dataclass
from pathlib import Path

XAVIER = "xinference/model/llm/vllm/xavier"
XAVIER_TESTS = f"{XAVIER}/test"


class GuardMissing(Exception):
    """The text of a guard does not stand exactly once in its file, or the file is no Python without it."""


@dataclass(frozen=True)
class Guard:
    """One guard.

    Args:
        name: file and purpose, unique in the list.
        file: where it stands, from the top of the repository.
        text: the guard as it is written there; it occurs exactly once.
        without: what stands there when the guard is gone.
        protects: what goes wrong without it.
        tests: asked first, from the top of the repository.
    """

    name: str
    file: str
    text: str
    without: str
    protects: str
    tests: tuple[str, ...]

    def removed_from(self, root: Path) -> str:
        """The file's source without this guard.

        Raises:
            GuardMissing: the text does not occur exactly once, or what is left does not compile.
        """
        source = (root / self.file).read_text()
        if (found := source.count(self.text)) != 1:
            raise GuardMissing(f"{self.name}: its text occurs {found} times in {self.file}, not once")
        mutated = source.replace(self.text, self.without)
        try:
            compile(mutated, self.file, "exec")
        except SyntaxError as error:
            raise GuardMissing(f"{self.name}: {self.file} does not compile without it: {error}") from None
        return mutated


class In:
    """Makes the entries of one file.

    Args:
        file: from the package of the shared cache, or from the top of the repository if it begins with ``xinference/``.
        tests: asked first for every guard of this file, in the same notation, below ``test`` of the package.
    """

    def __init__(self, file: str, *tests: str) -> None:
        self._file = file if file.startswith("xinference/") else f"{XAVIER}/{file}"
        self._tests = tests

    def __call__(self, what: str, text: str, without: str, protects: str, *tests: str) -> Guard:
        """One entry; ``tests`` are asked before those of the file."""
        asked = tuple(
            test if test.startswith("xinference/") else f"{XAVIER_TESTS}/{test}" for test in dict.fromkeys((*tests, *self._tests))
        )
        return Guard(f"{Path(self._file).stem}.{what}", self._file, text, without, protects, asked)

"""The pages as the tests read them: commands, quoted messages and names, taken out of the markup."""

import ast
import functools
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "doc" / "source"
PAGES = sorted(SOURCE.rglob("*.rst"))
PLAIN = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / ".github" / "CONTRIBUTING.md", ROOT / "requirements" / "README.md"]
_RST_BLOCK = re.compile(r"^(?P<indent> *)\.\. code-block:: console\n\n(?P<body>(?:(?P=indent)   .*\n|\n)+)", re.MULTILINE)
_MARKDOWN_BLOCK = re.compile(r"^```console\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)


class CommandLine(NamedTuple):
    """One command of a page."""

    page: str
    words: list[str]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def command_lines(page: Path) -> Iterator[CommandLine]:
    """The commands of a page's console blocks; a line that ends in a backslash goes on."""
    text = page.read_text()
    for block in [*_RST_BLOCK.finditer(text), *_MARKDOWN_BLOCK.finditer(text)]:
        joined = block["body"].replace("\\\n", " ")
        for line in joined.splitlines():
            if line.strip().startswith("$ "):
                for part in re.split(r"\s+&&\s+", line.strip()[2:]):
                    yield CommandLine(name_of(page), shlex.split(part, comments=True))


def literals(text: str) -> list[str]:
    """What stands in double back quotes, line ends as spaces."""
    return [" ".join(found.split()) for found in re.findall(r"``(.+?)``", text, re.DOTALL)]


def section_of(page: Path, title: str) -> str:
    """The text below a heading, up to the next one of its level."""
    text = page.read_text()
    start = re.search(rf"^{re.escape(title)}\n([-=~])\1+\n", text, re.MULTILINE)
    if start is None:
        raise LookupError(f"{page} has no section {title}")
    after = text[start.end() :]
    following = re.search(rf"^\S.*\n{re.escape(start[1])}{{3,}}\n", after, re.MULTILINE)
    return after[: following.start()] if following else after


@functools.cache
def names_of_tests() -> frozenset[str]:
    """Names of all tests and of all state machines of this repository."""
    found: set[str] = set()
    for path in [*ROOT.glob("xinference/**/test/**/test_*.py"), *ROOT.glob("doc/test/**/test_*.py")]:
        found.add(path.name)
        for function, kind in re.findall(r"^\s*(?:async )?def (test_\w+)|^class (\w+)", path.read_text(), re.MULTILINE):
            found.add(function or kind)
    return frozenset(found)


def messages() -> list[str]:
    """Every string of the product's code, with an ellipsis for each part that is filled in."""
    found = []
    for path in ROOT.glob("xinference/**/*.py"):
        if "test" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdr]", "…", node.value))
    return found


def extension(name: str) -> ModuleType:
    """A module of the Sphinx extension, which is no package."""
    folder = str(SOURCE / "_ext")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = sys.modules.get(name)
    if found is None:
        spec = importlib.util.spec_from_file_location(name, SOURCE / "_ext" / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ImportError(name)
        found = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found

"""The dependency rule and the size budget of the xavier package, checked on every commit.

The folders form a line; a file imports from its own folder and from those to its left:

    block <- policy, directory <- store <- transfer <- connector

config.py and errors.py sit below all of them. Nothing here imports the rest of xinference. Third-party packages are for the files named
in DOORS alone; everything else needs the standard library and nothing more, so it runs and is tested without an engine.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

XAVIER = Path(__file__).parents[2]
PACKAGE = "xinference.model.llm.vllm.xavier"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50  # docstring not counted
MAX_METHODS = 12  # public ones; properties and constructors not counted

# folder -> folders it may import
FOLDERS = {
    "": {""},
    "block": {"", "block"},
    "policy": {"", "block", "policy"},
    "directory": {"", "block", "directory"},
    "store": {"", "block", "policy", "directory", "store"},
    "transfer": {"", "block", "policy", "directory", "store", "transfer"},
    "connector": {"", "block", "policy", "directory", "store", "transfer", "connector"},
}
# The only files that know an engine or its tensors -> third-party packages they may import.
DOORS = {
    "transfer/cpu.py": {"torch"},
    "transfer/cuda.py": {"torch"},
    "transfer/staged.py": {"torch"},
    "transfer/strided.py": {"torch"},
    "connector/connector.py": {"torch", "vllm"},
    "connector/views.py": {"torch", "vllm"},
}
# Debts, to be paid off and never added to: "folder/file.py" or "folder/file.py:function" or "folder/file.py:Class".
TOO_LONG: set[str] = {
    "directory/segment.py:SegmentWriter",  # the one writer's verbs; its parts are records, requests, counters, files
    "directory/reader.py:SegmentReader",  # mirrors them
    "policy/placement.py:PlacementBook",  # every move of a place, and what the move is checked against
}

SOURCES = [p for p in sorted(XAVIER.rglob("*.py")) if not {"test", "bench"} & set(p.relative_to(XAVIER).parts)]
each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(XAVIER).as_posix())


def name_of(path: Path) -> str:
    return path.relative_to(XAVIER).as_posix()


def folder_of(path: Path) -> str:
    parts = path.relative_to(XAVIER).parts
    return parts[0] if len(parts) > 1 else ""


def imported_names(path: Path) -> Iterator[str]:
    """Every import in a file as an absolute name; those in functions and TYPE_CHECKING blocks too."""
    here = [*PACKAGE.split("."), *path.relative_to(XAVIER).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = base + node.module.split(".") if node.module else base
            yield from (".".join([*base, alias.name]) for alias in node.names)


@each_source
def test_imports_point_left(path: Path) -> None:
    for name in imported_names(path):
        if name.startswith(PACKAGE):
            first = name.removeprefix(PACKAGE).strip(".").split(".")[0]
            target = first if (XAVIER / first).is_dir() else ""
            assert target in FOLDERS[folder_of(path)], f"{name_of(path)} must not import {name}"
        else:
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top in DOORS.get(name_of(path), set()), f"{name_of(path)} must not import {name}"


@each_source
def test_files_functions_and_classes_stay_within_their_size(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES or name_of(path) in TOO_LONG
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            has_doc = ast.get_docstring(node) is not None
            doc = first.end_lineno - first.lineno + 1 if has_doc else 0
            lines = node.end_lineno - node.lineno + 1 - doc
            assert lines <= MAX_FUNCTION_LINES or f"{name_of(path)}:{node.name}" in TOO_LONG, f"{node.name}: {lines} lines"
        elif isinstance(node, ast.ClassDef) and name_of(path) not in DOORS:
            methods = [m.name for m in node.body if isinstance(m, ast.FunctionDef) and m.name[0] != "_" and not m.decorator_list]
            assert len(methods) <= MAX_METHODS or f"{name_of(path)}:{node.name}" in TOO_LONG, f"{node.name}: {len(methods)} methods"


@each_source
def test_no_work_is_done_inside_an_assert(path: Path) -> None:
    """Under -O an assert vanishes with whatever it calls."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert):
            calls = [call for call in ast.walk(node.test) if isinstance(call, ast.Call)]
            names = {call.func.id if isinstance(call.func, ast.Name) else "?" for call in calls}
            assert names <= {"len", "isinstance", "all", "any"}, f"{name_of(path)}:{node.lineno}"


@each_source
def test_package_files_hold_only_a_docstring(path: Path) -> None:
    if path.name == "__init__.py":
        body = ast.parse(path.read_text()).body
        assert len(body) == 1
        assert ast.get_docstring(ast.parse(path.read_text()))


def test_live_words_are_never_packed_in_place() -> None:
    """struct.pack_into zeroes its target before it packs: readers in other processes would see zeros."""
    users = [name_of(p) for p in SOURCES if folder_of(p) == "directory" and "pack_into(" in p.read_text().replace("unpack_into", "")]
    assert users == []


def test_everything_but_the_doors_imports_without_an_engine() -> None:
    """In a fresh interpreter without torch, vllm, xoscar or nixl; so every parent __init__ is light as well."""
    pure = [p for p in SOURCES if name_of(p) not in DOORS and p.name != "__init__.py"]
    modules = [".".join([PACKAGE, *p.relative_to(XAVIER).with_suffix("").parts]) for p in pure]
    code = "import importlib, sys\n"
    code += "sys.modules.update(dict.fromkeys(['torch', 'vllm', 'xoscar', 'nixl', 'numpy', 'fastapi', 'pydantic']))\n"
    code += f"for module in {modules!r}: importlib.import_module(module)\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr

"""The shape of the control plane: who may import what, how long things may be, and that importing it starts nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2]
PACKAGE = "xinference.core"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50  # docstring not counted
MAX_METHODS = 12

# Modules that know actors. Everything else is imported with xoscar out of reach.
ACTORS = {"calls", "fleet", "pool_modules", "processes", "replica", "supervisor", "worker", "cache_service", "replica_service"}
# Of the others, those that decide only: no clock, no file, no socket, no process.
DECISIONS = {
    "spec", "engine_arguments", "environment", "topology", "placement", "plan", "states", "orders", "relaunch", "peers", "route", "roster",
    "log_ring", "stalls",
}  # fmt: skip
IMPURE = {"asyncio", "time", "socket", "subprocess", "random", "secrets", "os", "logging"}
# The public interface of the supervisor, and the private and public verbs that make a host one class.
MANY_METHODS = {"supervisor.SupervisorActor", "host.WorkerHost", "worker.WorkerActor", "keeper.ReplicaKeeper", "replica.ReplicaActor",
                "fleet.Fleet", "cluster_state.ClusterState", "replica_service.ReplicaService", "cache_service.CacheService",
                "launching.Launcher", "runner.ReplicaRunner"}  # fmt: skip

SOURCES = sorted(path for path in CORE.glob("*.py") if path.name != "__init__.py")
each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@each_source
def test_only_actor_modules_import_xoscar(path: Path) -> None:
    if path.stem in ACTORS or path.stem == "cluster":  # cluster imports it inside its functions
        return
    assert not any(name.split(".")[0] == "xoscar" for name in imports_of(path))


@each_source
def test_only_actor_modules_import_actor_modules(path: Path) -> None:
    if path.stem in ACTORS or path.stem == "cluster":
        return
    assert not imports_of(path) & {f"{PACKAGE}.{name}" for name in ACTORS}


@pytest.mark.parametrize("name", sorted(DECISIONS))
def test_decisions_touch_no_clock_file_socket_or_process(name: str) -> None:
    assert not {imported.split(".")[0] for imported in imports_of(CORE / f"{name}.py")} & IMPURE


@each_source
def test_nothing_imports_the_api_or_the_command_line(path: Path) -> None:
    assert not any(name.startswith(("xinference.api", "xinference.deploy", "xinference.client", "fastapi")) for name in imports_of(path))


@each_source
def test_size_budget(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            doc = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
            lines = (node.end_lineno or 0) - node.lineno + 1 - doc
            assert lines <= MAX_FUNCTION_LINES, f"{node.name}: {lines} lines"
        elif isinstance(node, ast.ClassDef) and f"{path.stem}.{node.name}" not in MANY_METHODS:
            methods = [item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
            assert len(methods) <= MAX_METHODS, f"{node.name}: {len(methods)} methods"


@each_source
def test_asserts_state_facts_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert):
            calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
            assert all(isinstance(call, ast.Name) and call.id in {"len", "isinstance", "all", "any"} for call in calls)


def test_everything_but_actors_imports_with_xoscar_torch_and_vllm_out_of_reach() -> None:
    modules = [f"{PACKAGE}.{path.stem}" for path in SOURCES if path.stem not in ACTORS]
    code = "import importlib, sys\n"
    code += "sys.modules.update(dict.fromkeys(['torch', 'vllm', 'xoscar', 'nixl', 'fastapi']))\n"
    code += f"for module in {modules!r}: importlib.import_module(module)\n"
    subprocess.run([sys.executable, "-c", code], check=True)

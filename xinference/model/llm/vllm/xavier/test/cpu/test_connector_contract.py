"""XavierConnector held to the connector interface of every vLLM from 0.21 to 0.33.

connector_hooks.json lists the hooks by version, as read in each version's source. The installed version is read here, live.
"""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.version import __version__ as installed

from xinference.model.llm.vllm.xavier.connector import connector as module
from xinference.model.llm.vllm.xavier.connector.connector import XavierConnector
from xinference.model.llm.vllm.xavier.connector.facts import NEWEST_VERSION, OLDEST_VERSION, version_of

MODULE = "xinference.model.llm.vllm.xavier.connector.connector"
TABLE: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "connector_hooks.json").read_text())
# Of the base class, not hooks: nobody outside calls or overrides them.
NOT_HOOKS = frozenset({"role", "has_connector_metadata"})
MAY_CALL_SUPER = frozenset({"__init__", "bind_connector_metadata", "clear_connector_metadata"})


def hooks_of(version: str) -> dict[str, str]:
    """All hooks of a version, as "abstract kind (parameters)"."""
    hooks: dict[str, str] = {}
    for name, entry in TABLE.items():
        hooks.update(entry["added"])
        for removed in entry["removed"]:
            del hooks[removed]
        if name == version:
            return hooks
    raise KeyError(version)


def parameters_of(hook: str) -> list[str]:
    inside = hook[hook.index("(") + 1 : -1]
    return [name for name in inside.split(", ") if name]


def live_hooks() -> dict[str, str]:
    """What the installed base classes say, in the table's notation."""
    found = {}
    for cls in (base.SupportsHMA, base.KVConnectorBase_V1):
        for name, member in vars(cls).items():
            if (name.startswith("_") and name != "__init__") or name in NOT_HOOKS:
                continue
            kind = "property " if isinstance(member, property) else "classmethod " if isinstance(member, classmethod) else ""
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not inspect.isfunction(function):
                continue
            given = list(inspect.signature(function).parameters.values())[1:]
            names = [f"**{p.name}" if p.kind is p.VAR_KEYWORD else f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name for p in given]
            abstract = "abstract " if getattr(function, "__isabstractmethod__", False) else ""
            found[name] = f"{abstract}{kind}({', '.join(names)})"
    return found


def test_the_table_says_what_the_installed_version_says() -> None:
    major, minor = version_of(installed)
    assert hooks_of(f"{major}.{minor}") == live_hooks()


def test_the_table_covers_the_range_that_is_accepted() -> None:
    assert list(TABLE) == [f"0.{minor}" for minor in range(OLDEST_VERSION[1], NEWEST_VERSION[1] + 1)]


@pytest.mark.parametrize("version", TABLE)
def test_every_hook_takes_what_this_version_passes(version: str) -> None:
    for name, hook in hooks_of(version).items():
        member = inspect.getattr_static(XavierConnector, name, None)
        if member is None:
            # A hook that only an older base class has, and that our answer to another one keeps from being called.
            assert name in {"register_cross_layers_kv_cache"}, name
            continue
        assert isinstance(member, property) == ("property" in hook), name
        assert isinstance(member, classmethod) == ("classmethod" in hook), name
        if isinstance(member, property):
            continue
        given = parameters_of(hook)
        keywords = {parameter: None for parameter in given if not parameter.startswith("*")}
        if "**kwargs" in given:
            keywords["something_new"] = None
        bound = inspect.signature(getattr(XavierConnector, name))
        first = () if isinstance(member, classmethod) else (None,)
        bound.bind(*first, **keywords)
        bound.bind(*first, *keywords.values()) if "**kwargs" not in given else None


@pytest.mark.parametrize("version", TABLE)
def test_hooks_that_0_21_lacks_are_our_own(version: str) -> None:
    """With an older base class there is nothing to inherit them from."""
    newer = set(hooks_of(version)) - set(hooks_of("0.21"))
    assert newer <= set(vars(XavierConnector))


@pytest.mark.parametrize("version", TABLE)
def test_nothing_abstract_is_left(version: str) -> None:
    abstract = {name for name, hook in hooks_of(version).items() if hook.startswith("abstract")}
    assert abstract <= set(vars(XavierConnector))
    assert XavierConnector.__abstractmethods__ == frozenset()


def test_no_hook_calls_a_base_class_that_may_not_have_it() -> None:
    tree = ast.parse(inspect.getsource(module))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == "super"]
            assert not calls or function.name in MAY_CALL_SUPER, function.name


STUB = """
import abc, enum, importlib, json, sys, types
versions, module = json.loads(sys.argv[1]), sys.argv[2]
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
def package(name):
    made = types.ModuleType(name); made.__path__ = []; sys.modules[name] = made; return made
def member(hook):
    def body(self, *arguments, **keywords): return None
    if hook.startswith("abstract"): return abc.abstractmethod(body)
    return property(body) if "property" in hook else classmethod(body) if "classmethod" in hook else body
def stub(hooks):
    parts = V1.split(".")
    for end in range(1, len(parts) + 1): package(".".join(parts[:end]))
    sys.modules["vllm"].__version__ = "0.21.0"
    base = package(V1 + ".base")
    hma = {"request_finished_all_groups": member(hooks.pop("request_finished_all_groups"))}
    base.KVConnectorBase_V1 = abc.ABCMeta("KVConnectorBase_V1", (), {name: member(hook) for name, hook in hooks.items()})
    base.SupportsHMA = abc.ABCMeta("SupportsHMA", (), hma)
    base.KVConnectorMetadata = abc.ABCMeta("KVConnectorMetadata", (), {})
    base.KVConnectorRole = enum.Enum("KVConnectorRole", "SCHEDULER WORKER")
newest = set(versions["0.33"]) - {"register_cross_layers_kv_cache"}
for version, hooks in versions.items():
    stub(dict(hooks))
    sys.modules.pop(module, None)
    found = importlib.import_module(module).XavierConnector
    assert found.__abstractmethods__ == frozenset(), (version, found.__abstractmethods__)
    missing = newest - set(dir(found))
    assert not missing, (version, missing)
"""


def test_the_module_can_be_imported_where_only_one_versions_names_exist() -> None:
    """For each version a package vllm that holds nothing but this version's base classes; torch is loaded once for all."""
    hooks = json.dumps({version: hooks_of(version) for version in TABLE})
    result = subprocess.run([sys.executable, "-c", STUB, hooks, MODULE], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_vllm_finds_the_class_and_takes_it_for_a_connector_of_its_own() -> None:
    config = KVTransferConfig(kv_connector="XavierConnector", kv_role="kv_both", kv_connector_module_path=MODULE)
    assert KVConnectorFactory.get_connector_class(config) is XavierConnector
    assert base.supports_hma(XavierConnector)
    assert XavierConnector.requires_piecewise_for_cudagraph({}) is False
    assert XavierConnector.get_required_kvcache_layout(None) is None  # type: ignore[arg-type]


def test_importing_the_module_starts_nothing() -> None:
    code = f"""
import sys, threading, torch
before = set(threading.enumerate())
import {MODULE}
assert set(threading.enumerate()) == before, threading.enumerate()
assert not torch.cuda.is_initialized()
assert "xoscar" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr

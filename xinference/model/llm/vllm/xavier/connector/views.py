"""vLLM's objects as the plain values that the rest of the connector knows. What moved between versions is dealt with here."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import vllm

from xinference.model.llm.vllm.xavier.connector.adapters import AdapterDigests
from xinference.model.llm.vllm.xavier.connector.facts import SCALES_COMPUTED, EngineFacts, GroupFacts
from xinference.model.llm.vllm.xavier.connector.metadata import RequestView, Scheduled, StepView
from xinference.model.llm.vllm.xavier.directory.requests import REQUEST_ID_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

PARAMS_KEY = "xavier"
PARAMS_VERSION = 1
PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
# A spec's fields that stand in GroupFacts by themselves, or say where bytes lie in this engine only.
_SPEC_FIELDS = frozenset({"block_size", "page_size_padded"})
_STATUS_BY_NAME = {"FINISHED_ABORTED": "aborted", "FINISHED_ERROR": "failed"}


class PoolCache:
    """The engine's own prefix cache, through its block pool.

    Args:
        pool: given to connectors by ``bind_gpu_block_pool``.
    """

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool

    def idle(self) -> bool:
        """No block but the null block is in use."""
        return self._pool.get_num_free_blocks() == self._pool.num_gpu_blocks - 1

    def reset(self) -> bool:
        """Forget all cached prefixes."""
        return bool(self._pool.reset_prefix_cache())

    def forget(self, blocks: Iterable[int]) -> None:
        """Give these blocks to no other request."""
        self._pool.evict_blocks(set(blocks))


def request_view(request: "Request", adapters: AdapterDigests) -> RequestView:
    """A request. ``all_token_ids`` is not touched: it costs a copy, and its type changed."""
    params = request.sampling_params
    return RequestView(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        block_hashes=request.block_hashes,
        xavier_request=_identity(request.kv_transfer_params),
        adapter=_adapter(request.lora_request, adapters) if request.lora_request is not None else b"",
        skip_reading=bool(request.skip_reading_prefix_cache) or (params is not None and params.prompt_logprobs is not None),
    )


def _identity(params: Mapping[str, Any] | None) -> bytes | None:
    """The 128 bits that the route drew for this request; None if it did not come through one."""
    ours = params.get(PARAMS_KEY) if params else None
    if not isinstance(ours, Mapping) or ours.get("v") != PARAMS_VERSION:
        return None
    text = ours.get("request")
    try:
        identity = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return None
    return identity if len(identity) == REQUEST_ID_BYTES else None


def _adapter(lora: Any, adapters: AdapterDigests) -> bytes:
    return adapters.digest(lora.lora_name, lora.lora_int_id, lora.lora_path, bool(getattr(lora, "load_inplace", False)))


def request_status(request: "Request") -> str:
    """How a request ended, in the words of the accounting records."""
    return _STATUS_BY_NAME.get(request.status.name, "finished")


def step_view(output: "SchedulerOutput", wake_at: Mapping[str, int]) -> StepView:
    """A step, without running requests for which nothing changes: most of them, most of the time."""
    tokens = output.num_scheduled_tokens
    scheduled = [Scheduled(new.req_id, new.num_computed_tokens + tokens[new.req_id]) for new in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    for request_id, computed, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
        after = computed + tokens[request_id]
        if blocks is not None:
            scheduled.append(Scheduled(request_id, after, blocks[0]))
        elif after >= wake_at.get(request_id, 0):
            scheduled.append(Scheduled(request_id, after))
    return StepView(scheduled, tuple(output.preempted_req_ids or ()), tuple(output.finished_req_ids), output.total_num_scheduled_tokens)


def engine_facts(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> EngineFacts:
    """What sharing depends on, from the engine's configuration as it is once KV memory is sized."""
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    transfer = vllm_config.kv_transfer_config
    groups = tuple(_group_facts(group.layer_names, group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)
    executor = parallel.distributed_executor_backend or "uni"
    return EngineFacts(
        version=vllm.__version__,
        executor=executor if isinstance(executor, str) else executor.__name__,
        parallel_sizes=tuple((name, int(getattr(parallel, name, 1))) for name in PARALLEL_SIZES),
        role=str(transfer.kv_role) if transfer is not None else "",
        failure_policy=str(getattr(transfer, "kv_load_failure_policy", "")),
        device=str(vllm_config.device_config.device_type),
        runner=str(model.runner_type),
        dtype=str(model.dtype),
        quantization=str(model.quantization),
        kv_cache_dtype=str(cache.cache_dtype),
        kv_scales=_kv_scales(cache),
        rope_overrides=_overrides(model),
        attention_backend=_backend(vllm_config, groups),
        instruction_set=_instruction_set(),
        speculative=_speculative(vllm_config.speculative_config),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_block_size=int(getattr(kv_cache_config, "hash_block_size", None) or cache.block_size),
        groups=groups,
        num_blocks=kv_cache_config.num_blocks,
    )


def _group_facts(layer_names: Iterable[str], spec: "KVCacheSpec") -> GroupFacts:
    fields = {name: str(value) for name, value in vars(spec).items() if name not in _SPEC_FIELDS}
    return GroupFacts(
        kind=type(spec).__name__,
        block_size=spec.block_size,
        page_bytes=spec.page_size_bytes,
        layer_names=tuple(layer_names),
        details=tuple(sorted(fields.items())),
        limits=tuple(_limits(spec)),
    )


def _limits(spec: Any) -> Iterator[str]:
    if getattr(spec, "sliding_window", None) is not None:
        yield "a sliding window"
    if getattr(spec, "attention_chunk_size", None) is not None:
        yield "chunks"
    if getattr(spec, "non_causal", False):
        yield "no causal mask"


def _kv_scales(cache: Any) -> str:
    if not str(cache.cache_dtype).startswith("fp8"):
        return "none"
    return SCALES_COMPUTED if getattr(cache, "calculate_kv_scales", False) else "checkpoint"


def _overrides(model: Any) -> str:
    """Whatever changes how positions are encoded, as canonical text."""
    config = model.hf_text_config
    rope = {name: getattr(config, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")}
    overrides = model.hf_overrides if isinstance(model.hf_overrides, Mapping) else str(model.hf_overrides)
    return json.dumps({"rope": rope, "overrides": overrides}, sort_keys=True, default=str)


def _backend(vllm_config: "VllmConfig", groups: Iterable[GroupFacts]) -> str:
    """Names of the attention back ends of the group's layers, which are known once the model is loaded."""
    layers = vllm_config.compilation_config.static_forward_context
    used = (layers[name] for group in groups for name in group.layer_names if name in layers)
    return ",".join(sorted({str(layer.get_attn_backend().get_name()) for layer in used if hasattr(layer, "get_attn_backend")}))


def _instruction_set() -> str:
    """The CPU back end packs the inside of a block for the instructions at hand."""
    probes = ("_is_avx2_supported", "_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported")
    found = [name for name in probes if hasattr(torch.cpu, name) and getattr(torch.cpu, name)()]
    return ",".join([torch.backends.cpu.get_cpu_capability(), *found])


def _speculative(speculative: Any) -> str:
    return "" if speculative is None else f"{speculative.method}:{speculative.model}"

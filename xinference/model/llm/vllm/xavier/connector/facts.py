"""What the connector has to know about an engine, as plain values; and which engines may not share."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from xinference.model.llm.vllm.xavier.errors import ConfigRefused

OLDEST_VERSION = (0, 21)
NEWEST_VERSION = (0, 33)
SHARED_SPEC = "FullAttentionSpec"
SHARED_DEVICES = ("cpu", "cuda")
SCALES_COMPUTED = "computed"


@dataclass(frozen=True)
class GroupFacts:
    """One KV group as the engine describes it.

    Args:
        kind: class name of the engine's spec.
        block_size: tokens a block.
        page_bytes: bytes of one block in one layer.
        layer_names: the group's layers.
        details: what else the spec says, as sorted (name, value) pairs.
        limits: restrictions that the spec puts on what a token may see (window, chunk, not causal), as words; empty for full attention.
    """

    kind: str
    block_size: int
    page_bytes: int
    layer_names: tuple[str, ...]
    details: tuple[tuple[str, str], ...]
    limits: tuple[str, ...]


@dataclass(frozen=True)
class EngineFacts:
    """One engine's configuration, as far as sharing depends on it.

    Args:
        version: vLLM's version.
        executor: name of the executor back end, or of its class.
        parallel_sizes: (name, size) of every kind of parallelism.
        role, failure_policy: of the KV transfer configuration.
        device: "cpu", "cuda", ...
        runner: "generate" or something else.
        dtype, quantization, kv_cache_dtype, kv_scales, rope_overrides, attention_backend, instruction_set: see Namespace.
        speculative: method and draft model, or empty.
        hash_algorithm: of block hashes.
        hash_block_size: tokens that a block hash covers.
        groups: the KV groups.
        num_blocks: engine blocks, the null block included.
    """

    version: str
    executor: str
    parallel_sizes: tuple[tuple[str, int], ...]
    role: str
    failure_policy: str
    device: str
    runner: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    kv_scales: str
    rope_overrides: str
    attention_backend: str
    instruction_set: str
    speculative: str
    hash_algorithm: str
    hash_block_size: int
    groups: tuple[GroupFacts, ...]
    num_blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(group.page_bytes * len(group.layer_names) for group in self.groups)


def version_of(text: str) -> tuple[int, int]:
    """Major and minor number.

    Raises:
        ConfigRefused: the text does not begin with two numbers.
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ConfigRefused(f"a vLLM of version {text!r} is not known to Xavier")
    return int(match[1]), int(match[2])


def refuse_unproven(facts: EngineFacts) -> None:
    """Refuse an engine for which sharing is not proven, with every reason in one message.

    Raises:
        ConfigRefused: there is a reason.
    """
    reasons = list(_reasons(facts))
    if reasons:
        raise ConfigRefused(f"Xavier cannot share the KV cache of this engine: {'; '.join(reasons)}")


def _reasons(facts: EngineFacts) -> Iterator[str]:
    if not OLDEST_VERSION <= version_of(facts.version) <= NEWEST_VERSION:
        yield f"vLLM {facts.version} is outside 0.{OLDEST_VERSION[1]} to 0.{NEWEST_VERSION[1]}"
    if facts.executor not in ("uni", "UniProcExecutor"):
        yield (
            f"its executor is {facts.executor!r}, and scheduler and worker must share one process: set distributed_executor_backend=uni, "
            "and on a CPU VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    for name, size in facts.parallel_sizes:
        if size > 1:
            yield f"{name} is {size}, not 1"
    if facts.role != "kv_both":
        yield f"kv_role is {facts.role!r}, not 'kv_both'"
    if facts.failure_policy != "recompute":
        yield f"kv_load_failure_policy is {facts.failure_policy!r}, not 'recompute'"
    if facts.device not in SHARED_DEVICES:
        yield f"its KV memory is on {facts.device!r}, and only that of {' and '.join(SHARED_DEVICES)} can be copied in this version"
    if facts.runner != "generate":
        yield f"it runs {facts.runner!r} models, not 'generate'"
    if facts.speculative:
        yield f"speculative decoding ({facts.speculative})"
    if facts.kv_scales == SCALES_COMPUTED:
        yield "the scales of its FP8 KV are computed while it runs, so no two engines have the same: take calculate_kv_scales away"
    yield from _group_reasons(facts)


def _group_reasons(facts: EngineFacts) -> Iterator[str]:
    if len(facts.groups) != 1:
        yield f"its layers form {len(facts.groups)} KV groups, not 1 (hybrid or sliding-window model)"
    for group in facts.groups:
        if group.kind != SHARED_SPEC:
            yield f"its attention is of kind {group.kind}, not {SHARED_SPEC}"
        yield from (f"its attention has {limit}" for limit in group.limits)
        if group.block_size != facts.hash_block_size:
            yield f"blocks have {group.block_size} tokens and block hashes cover {facts.hash_block_size}"

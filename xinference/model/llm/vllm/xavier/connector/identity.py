"""The namespace of one engine: everything that decides whether another one's blocks mean the same bytes."""

import platform
from hashlib import sha256

from xinference.model.llm.vllm.xavier.block.namespace import GroupSpec, Namespace
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.connector.facts import EngineFacts, version_of

# From here on vLLM derives the chain's root from a fixed seed, if the hash is collision resistant; before, it is random in each process.
FIXED_ROOT_VERSION = (0, 29)
RESISTANT_ALGORITHMS = frozenset({"sha256", "sha256_cbor"})


def hash_root(facts: EngineFacts, seed: str | None, random_bytes: bytes) -> tuple[str, bool]:
    """The root of the engine's hash chains, as a name in hex, and whether another process can have the same.

    Args:
        facts: the engine.
        seed: PYTHONHASHSEED of this process, or None.
        random_bytes: what makes a root unique that the engine draws at random.
    """
    if seed is not None:
        return sha256(b"seed:" + seed.encode()).hexdigest(), True
    if version_of(facts.version) >= FIXED_ROOT_VERSION and facts.hash_algorithm in RESISTANT_ALGORITHMS:
        return sha256(b"fixed").hexdigest(), True
    return sha256(b"random:" + random_bytes).hexdigest(), False


def namespace_of(facts: EngineFacts, config: XavierConfig, block_layout: str, root: str) -> Namespace:
    """The namespace of an engine that may share.

    Args:
        block_layout: how a block is packed into a place, as the mover describes it.
        root: name of the hash chains' root.
    """
    sizes = dict(facts.parallel_sizes)
    return Namespace(
        engine_version=facts.version,
        python_version=".".join(platform.python_version_tuple()[:2]),
        model_identity=config.model_identity,
        dtype=facts.dtype,
        quantization=facts.quantization,
        kv_cache_dtype=facts.kv_cache_dtype,
        kv_scales=facts.kv_scales,
        rope_overrides=facts.rope_overrides,
        block_size=facts.hash_block_size,
        groups=tuple(GroupSpec(group.kind, group.block_size, group.page_bytes, group.layer_names, group.details) for group in facts.groups),
        block_layout=block_layout,
        attention_backend=facts.attention_backend,
        instruction_set=facts.instruction_set,
        hash_algorithm=facts.hash_algorithm,
        hash_root=root,
        speculative=facts.speculative,
        tp_rank=0,
        tp_size=sizes.get("tensor_parallel_size", 1),
        pp_rank=0,
        pp_size=sizes.get("pipeline_parallel_size", 1),
    )

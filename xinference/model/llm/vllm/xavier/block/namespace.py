"""Where a block key means the same bytes: every setting that decides what the bytes of a block are, as one digest.

Replicas with different digests use segment files of different names, so nothing is shared and nothing can go wrong.
"""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256

# Raised when the meaning of a field, or of the bytes in a place, changes.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class GroupSpec:
    """One KV group: layers whose blocks are handed out together.

    Args:
        kind: the engine's name of the attention type.
        block_size: tokens a block.
        page_bytes: bytes of one block in one layer.
        layer_names: in the order in which their segments lie in a place.
        details: whatever else the engine's spec says (heads, head size, window), as sorted (name, value) pairs.
    """

    kind: str
    block_size: int
    page_bytes: int
    layer_names: tuple[str, ...]
    details: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Namespace:
    """Everything on which the bytes of a block depend besides its key. No field has a default: a forgotten one would be shared by mistake.

    Args:
        engine_version: vLLM's version, with its local part (``0.32.0+cpu``).
        python_version: major.minor; the engine's default hash pickles.
        model_identity: digest of the weights, or path and revision.
        dtype, quantization, kv_cache_dtype, kv_scales: how weights and KV are stored; ``kv_scales`` names the source of FP8 scales.
        rope_overrides: rope and config overrides of the launch, as canonical text.
        block_size: tokens a block hash covers.
        groups: the KV groups in the engine's order.
        block_layout: order of dimensions in physical memory, with strides where they matter.
        attention_backend: backends pack the inside of a block differently.
        instruction_set: CPU engines: the instruction set that decides the packing; otherwise the device's architecture.
        hash_algorithm, hash_root: how block hashes are chained, and the chain's root in hex.
        speculative: method and draft model, or empty.
        tp_rank, tp_size, pp_rank, pp_size: which shard of the model this is.
    """

    engine_version: str
    python_version: str
    model_identity: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    kv_scales: str
    rope_overrides: str
    block_size: int
    groups: tuple[GroupSpec, ...]
    block_layout: str
    attention_backend: str
    instruction_set: str
    hash_algorithm: str
    hash_root: str
    speculative: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int

    def digest(self) -> str:
        """64 hex digits: equal exactly when all fields are."""
        canonical = json.dumps({"schema": SCHEMA_VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":"))
        return sha256(canonical.encode()).hexdigest()

    def short(self) -> str:
        """The first 16 hex digits, as used in file names."""
        return self.digest()[:16]

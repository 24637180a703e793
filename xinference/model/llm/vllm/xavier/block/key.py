"""A block's content identity: two words, made from the engine's own chained block hash.

The engine's hash already covers the tokens of the block, all blocks before it, the cache salt, adapters and images. Tokens are never
hashed again here; what is added is what the hash does not say: the KV group, and a digest of an adapter's weights (before vLLM 0.31 the
hash holds an adapter's name only).
"""

from functools import lru_cache
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

KEY_BYTES = 16
_WORDS = Struct("<2Q")


class BlockKey(NamedTuple):
    """128 bits of identity as two unsigned 64-bit words."""

    k0: int
    k1: int


def block_key(block_hash: bytes, group_id: int = 0, adapter: bytes = b"") -> BlockKey:
    """The key of the block with this engine hash.

    Args:
        block_hash: the engine's chained hash, at least 16 bytes; the first 16 are used.
        group_id: the KV group that the block belongs to.
        adapter: digest of the adapter's weights, or empty.

    Raises:
        ValueError: the hash is shorter than 16 bytes, so it is not one that the engine can vouch for.
    """
    if len(block_hash) < KEY_BYTES:
        raise ValueError(f"a block hash has at least {KEY_BYTES} bytes, not {len(block_hash)}")
    k0, k1 = _WORDS.unpack_from(block_hash)
    if group_id or adapter:
        m0, m1 = _mask(group_id, adapter)
        return BlockKey(k0 ^ m0, k1 ^ m1)
    return BlockKey(k0, k1)


@lru_cache(maxsize=1024)
def _mask(group_id: int, adapter: bytes) -> tuple[int, int]:
    """What sets one (group, adapter) apart from all others: XOR with a constant keeps distinct hashes distinct."""
    digest = blake2b(group_id.to_bytes(4, "little") + adapter, digest_size=KEY_BYTES, person=b"xavier-key").digest()
    k0, k1 = _WORDS.unpack(digest)
    return k0, k1

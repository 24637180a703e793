import dataclasses
import os
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference.model.llm.vllm.xavier.block.key import BlockKey, block_key
from xinference.model.llm.vllm.xavier.block.namespace import GroupSpec, Namespace

HASH = bytes(range(32))
NAMESPACE = Namespace(
    engine_version="0.32.0+cpu",
    python_version="3.11",
    model_identity="sha256:00",
    dtype="bfloat16",
    quantization="",
    kv_cache_dtype="auto",
    kv_scales="",
    rope_overrides="",
    block_size=32,
    groups=(GroupSpec("full", 32, 4096, ("layer.0", "layer.1"), (("heads", "2"),)),),
    block_layout="BLHNC",
    attention_backend="CPU_ATTN",
    instruction_set="avx512",
    hash_algorithm="sha256",
    hash_root="00",
    speculative="",
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
)


def test_a_key_is_the_first_sixteen_bytes_of_the_engine_hash() -> None:
    assert block_key(HASH) == BlockKey(0x0706050403020100, 0x0F0E0D0C0B0A0908)


def test_a_short_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes, not 8"):
        block_key(bytes(8))


def test_groups_and_adapters_never_meet() -> None:
    keys = [block_key(HASH, group, adapter) for group in (0, 1, 2) for adapter in (b"", b"a", b"b")]
    assert len(set(keys)) == 9


def test_the_same_adapter_of_the_same_group_meets_itself() -> None:
    assert block_key(HASH, 1, b"digest") == block_key(bytes(HASH), 1, b"digest")


@given(st.binary(min_size=16, max_size=32), st.binary(min_size=16, max_size=32), st.integers(0, 7), st.binary(max_size=8))
def test_distinct_hashes_stay_distinct_under_any_adapter(one: bytes, other: bytes, group: int, adapter: bytes) -> None:
    assert (block_key(one, group, adapter) == block_key(other, group, adapter)) == (one[:16] == other[:16])


def test_a_namespace_has_64_hex_digits_and_files_use_16_of_them() -> None:
    digest = NAMESPACE.digest()
    assert len(bytes.fromhex(digest)) == 32
    assert NAMESPACE.short() == digest[:16]


def test_every_field_of_a_namespace_sets_it_apart() -> None:
    seen = {NAMESPACE.digest()}
    for field in dataclasses.fields(Namespace):
        value = getattr(NAMESPACE, field.name)
        other = value + 1 if isinstance(value, int) else (value + "x" if isinstance(value, str) else ())
        seen.add(dataclasses.replace(NAMESPACE, **{field.name: other}).digest())
    assert len(seen) == 1 + len(dataclasses.fields(Namespace))


def test_every_field_of_a_group_sets_the_namespace_apart() -> None:
    group = NAMESPACE.groups[0]
    seen = {NAMESPACE.digest()}
    for field in dataclasses.fields(GroupSpec):
        value = getattr(group, field.name)
        other = value + 1 if isinstance(value, int) else (value + "x" if isinstance(value, str) else value[:-1])
        seen.add(dataclasses.replace(NAMESPACE, groups=(dataclasses.replace(group, **{field.name: other}),)).digest())
    assert len(seen) == 1 + len(dataclasses.fields(GroupSpec))


def test_moving_text_between_neighbouring_fields_changes_the_namespace() -> None:
    one = dataclasses.replace(NAMESPACE, dtype="ab", quantization="c")
    other = dataclasses.replace(NAMESPACE, dtype="a", quantization="bc")
    assert one.digest() != other.digest()


def test_keys_of_random_hashes_spread_over_any_number_of_lines() -> None:
    lines = [0] * 100
    for _ in range(10_000):
        lines[block_key(sha256(os.urandom(8)).digest()).k0 % 100] += 1
    assert max(lines) < 200

"""Which engines are refused, what a namespace is made of, whose adapters are whose."""

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.connector import adapters
from xinference.model.llm.vllm.xavier.connector.adapters import AdapterDigests
from xinference.model.llm.vllm.xavier.connector.facts import EngineFacts, GroupFacts, refuse_unproven, version_of
from xinference.model.llm.vllm.xavier.connector.identity import hash_root, namespace_of
from xinference.model.llm.vllm.xavier.errors import ConfigRefused

GROUP = GroupFacts("FullAttentionSpec", 32, 4096, ("layer.0", "layer.1"), (("head_size", "64"),), ())
FACTS = EngineFacts(
    version="0.32.0",
    executor="uni",
    parallel_sizes=(("tensor_parallel_size", 1), ("pipeline_parallel_size", 1), ("data_parallel_size", 1)),
    role="kv_both",
    failure_policy="recompute",
    device="cpu",
    runner="generate",
    dtype="torch.bfloat16",
    quantization="None",
    kv_cache_dtype="auto",
    kv_scales="none",
    rope_overrides="{}",
    attention_backend="CPU_ATTN",
    instruction_set="AVX2",
    speculative="",
    hash_algorithm="sha256",
    hash_block_size=32,
    groups=(GROUP,),
    num_blocks=100,
)
CONFIG = XavierConfig("w", "r", 1, "/dev/shm", 1 << 20, "weights")


@pytest.mark.parametrize("version", ["0.21.0", "0.27.1", "0.32.0", "0.33.0", "0.33.1.dev3+g1234"])
def test_every_version_of_the_range_is_accepted(version: str) -> None:
    refuse_unproven(replace(FACTS, version=version))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "0.20.2"}, "vLLM 0.20.2 is outside 0.21 to 0.33"),
        ({"version": "0.34.0"}, "vLLM 0.34.0 is outside 0.21 to 0.33"),
        ({"executor": "mp"}, "VLLM_ENABLE_V1_MULTIPROCESSING=0"),
        ({"executor": "RayDistributedExecutor"}, "RayDistributedExecutor"),
        ({"parallel_sizes": (("tensor_parallel_size", 2),)}, "tensor_parallel_size is 2, not 1"),
        ({"parallel_sizes": (("pipeline_parallel_size", 4),)}, "pipeline_parallel_size is 4, not 1"),
        ({"role": "kv_producer"}, "kv_role is 'kv_producer'"),
        ({"failure_policy": "fail"}, "kv_load_failure_policy is 'fail'"),
        ({"device": "xpu"}, "KV memory is on 'xpu', and only that of cpu and cuda"),
        ({"runner": "pooling"}, "'pooling' models"),
        ({"speculative": "eagle:draft"}, "speculative decoding (eagle:draft)"),
        ({"kv_cache_dtype": "fp8", "kv_scales": "computed"}, "the scales of its FP8 KV are computed while it runs"),
        ({"groups": (GROUP, GROUP)}, "2 KV groups, not 1"),
        ({"groups": ()}, "0 KV groups, not 1"),
        ({"groups": (replace(GROUP, kind="MambaSpec"),)}, "kind MambaSpec"),
        ({"groups": (replace(GROUP, limits=("a sliding window",)),)}, "a sliding window"),
        ({"hash_block_size": 16}, "blocks have 32 tokens and block hashes cover 16"),
    ],
)
def test_an_engine_for_which_sharing_is_not_proven_is_refused_with_the_reason(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigRefused) as refusal:
        refuse_unproven(replace(FACTS, **changes))  # type: ignore[arg-type]
    assert words in str(refusal.value)


def test_all_reasons_are_named_at_once() -> None:
    with pytest.raises(ConfigRefused, match=r"executor.*speculative"):
        refuse_unproven(replace(FACTS, executor="mp", speculative="ngram:None"))


def test_a_version_that_cannot_be_read_is_refused() -> None:
    assert version_of("0.21.0+cpu") == (0, 21)
    with pytest.raises(ConfigRefused, match="'dev'"):
        version_of("dev")


# ---- namespace


def namespace(**changes: object) -> str:
    layout = str(changes.pop("layout", "2*0:bf16"))
    root = str(changes.pop("root", "00"))
    config = replace(CONFIG, **{name: changes.pop(name) for name in ("model_identity", "replica_uid") if name in changes})
    return namespace_of(replace(FACTS, **changes), config, layout, root).digest()  # type: ignore[arg-type]


def test_replicas_of_one_launch_are_in_one_namespace() -> None:
    assert namespace(replica_uid="other", num_blocks=7, executor="UniProcExecutor") == namespace()


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "0.32.1"},
        {"model_identity": "other weights"},
        {"dtype": "torch.float16"},
        {"quantization": "awq"},
        {"kv_cache_dtype": "fp8"},
        {"kv_scales": "computed"},
        {"rope_overrides": '{"rope_scaling": 2}'},
        {"attention_backend": "TORCH_SDPA"},
        {"instruction_set": "AVX512"},
        {"hash_algorithm": "sha256_cbor"},
        {"hash_block_size": 16},
        {"speculative": "eagle:draft"},
        {"layout": "2*1:bf16"},
        {"root": "01"},
        {"groups": (replace(GROUP, page_bytes=8192),)},
        {"groups": (replace(GROUP, details=(("head_size", "128"),)),)},
        {"groups": (replace(GROUP, layer_names=("layer.1", "layer.0")),)},
        {"parallel_sizes": (("tensor_parallel_size", 2),)},
    ],
)
def test_whatever_changes_the_bytes_of_a_block_changes_the_namespace(changes: dict[str, object]) -> None:
    assert namespace(**changes) != namespace()


def test_every_fact_is_either_in_the_namespace_or_known_not_to_matter() -> None:
    elsewhere = {"executor", "role", "failure_policy", "device", "runner", "num_blocks", "parallel_sizes"}
    in_namespace = {"version", "dtype", "quantization", "kv_cache_dtype", "kv_scales", "rope_overrides", "attention_backend"}
    in_namespace |= {"instruction_set", "speculative", "hash_algorithm", "hash_block_size", "groups"}
    assert {field.name for field in fields(EngineFacts)} == elsewhere | in_namespace


def test_the_same_seed_gives_the_same_root_and_another_seed_another() -> None:
    assert hash_root(FACTS, "0", b"x") == hash_root(FACTS, "0", b"y")
    assert hash_root(FACTS, "0", b"x")[0] != hash_root(FACTS, "1", b"x")[0]
    assert hash_root(FACTS, "0", b"x")[0] != hash_root(FACTS, None, b"x")[0]


@pytest.mark.parametrize(
    ("version", "algorithm", "common"),
    [("0.28.0", "sha256", False), ("0.29.0", "sha256", True), ("0.29.0", "sha256_cbor", True), ("0.32.0", "xxhash", False)],
)
def test_without_a_seed_a_root_is_common_only_where_the_engine_fixes_it(version: str, algorithm: str, common: bool) -> None:
    facts = replace(FACTS, version=version, hash_algorithm=algorithm)
    first, shared = hash_root(facts, None, os.urandom(16))
    second, _ = hash_root(facts, None, os.urandom(16))
    assert shared is common
    assert (first == second) is common


# ---- adapters


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"weights")
    return path


def test_two_engines_see_one_adapter_alike(adapter: Path) -> None:
    assert AdapterDigests().digest("a", 1, str(adapter), False) == AdapterDigests().digest("a", 7, str(adapter), False)


def test_another_name_or_other_files_are_another_adapter(adapter: Path, tmp_path: Path) -> None:
    first = AdapterDigests().digest("a", 1, str(adapter), False)
    assert AdapterDigests().digest("b", 1, str(adapter), False) != first
    (adapter / "adapter_model.safetensors").write_bytes(b"WEIGHTS")
    assert AdapterDigests().digest("a", 1, str(adapter), False) != first


def test_a_file_replaced_by_one_of_equal_size_and_time_is_another_adapter(adapter: Path) -> None:
    first = AdapterDigests().digest("a", 1, str(adapter), False)
    file = adapter / "adapter_model.safetensors"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    replacement = adapter / "new"
    replacement.write_bytes(b"WEIGHTS")
    replacement.rename(file)
    os.utime(file, ns=times)
    assert AdapterDigests().digest("a", 1, str(adapter), False) != first


def test_files_that_changed_after_the_engine_loaded_them_share_nothing_until_they_are_loaded_again(
    adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine may have the old ones still, or have loaded the new ones for want of room: nobody can say."""
    digests = AdapterDigests()
    first = digests.digest("a", 1, str(adapter), False)
    (adapter / "adapter_model.safetensors").write_bytes(b"other weights")
    doubtful = [digests.digest("a", 1, str(adapter), False) for _ in range(3)]
    assert len({first, AdapterDigests().digest("a", 1, str(adapter), False), *doubtful}) == 5
    assert caplog.text.count("adapter a shares nothing any more") == 1
    second = digests.digest("a", 1, str(adapter), True)
    assert second == AdapterDigests().digest("a", 1, str(adapter), False)
    assert digests.digest("a", 1, str(adapter), False) == second
    assert digests.digest("a", 2, str(adapter), False) == second


def test_an_adapter_in_use_is_remembered_however_many_others_come(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "DIGESTS_MAX", 4)
    digests = AdapterDigests()
    digests.digest("a", 1, str(adapter), False)
    (adapter / "adapter_model.safetensors").write_bytes(b"other weights")
    present = AdapterDigests().digest("a", 1, str(adapter), False)
    for number in range(2, 20):
        digests.digest("other", number, "hub/other", False)
        digests.digest("other", number + 100, "hub/other", False)
        assert digests.digest("a", 1, str(adapter), False) != present
        assert len(digests._digest_by_loading) <= 4


def test_an_adapter_that_is_not_a_directory_is_known_by_its_name(tmp_path: Path) -> None:
    digests = AdapterDigests()
    assert digests.digest("a", 1, "hub/name", False) != digests.digest("a", 2, "hub/other", False)

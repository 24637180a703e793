"""Who may read whose blocks: a pair of replicas for each thing that decides what bytes are, with a pair beside it that does meet."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xinference.model.llm.vllm.xavier.block import namespace as namespace_module
from xinference.model.llm.vllm.xavier.block.namespace import GroupSpec, Namespace
from xinference.model.llm.vllm.xavier.connector.adapters import AdapterDigests
from xinference.model.llm.vllm.xavier.directory.sweep import remove_segments
from xinference.model.llm.vllm.xavier.test import mini_engine
from xinference.model.llm.vllm.xavier.test.mini_engine import Clock, MiniEngine
from xinference.model.llm.weights import model_identity

GROUP = GroupSpec("FullAttentionSpec", 32, 4096, ("layers.0", "layers.1"), (("head_size", "64"), ("num_kv_heads", "3")))
BASE: dict[str, Any] = {
    "engine_version": "0.32.0+cpu",
    "python_version": "3.11",
    "model_identity": "sha256:0123",
    "dtype": "torch.bfloat16",
    "quantization": "None",
    "kv_cache_dtype": "auto",
    "kv_scales": "none",
    "rope_overrides": '{"overrides": {}, "rope": {"rope_theta": 10000}}',
    "block_size": 32,
    "groups": (GROUP,),
    "block_layout": "BLHNC",
    "attention_backend": "CPU_ATTN",
    "instruction_set": "AVX512,_is_avx512_bf16_supported",
    "hash_algorithm": "sha256",
    "hash_root": "5eed0",
    "speculative": "",
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
}
OTHER: dict[str, Any] = {
    "engine_version": "0.32.0",
    "python_version": "3.12",
    "model_identity": "sha256:0124",
    "dtype": "torch.float16",
    "quantization": "awq",
    "kv_cache_dtype": "fp8_e4m3",
    "kv_scales": "checkpoint",
    "rope_overrides": '{"overrides": {}, "rope": {"rope_theta": 20000}}',
    "block_size": 64,
    "groups": (GROUP, GROUP),
    "block_layout": "BLNHC",
    "attention_backend": "TORCH_SDPA",
    "instruction_set": "AVX2",
    "hash_algorithm": "sha256_cbor",
    "hash_root": "5eed1",
    "speculative": "eagle:draft",
    "tp_rank": 1,
    "tp_size": 2,
    "pp_rank": 1,
    "pp_size": 2,
}
OTHER_GROUP: dict[str, Any] = {
    "kind": "SlidingWindowSpec",
    "block_size": 16,
    "page_bytes": 8192,
    "layer_names": ("layers.1", "layers.0"),
    "details": (("head_size", "64"), ("num_kv_heads", "4")),
}
FIELDS = [field.name for field in dataclasses.fields(Namespace)]
GROUP_FIELDS = [field.name for field in dataclasses.fields(GroupSpec)]
Make = Callable[..., MiniEngine]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a replica in a namespace."""
    clock = Clock()

    def make(uid: str, namespace: Namespace, **settings: Any) -> MiniEngine:
        monkeypatch.setattr(mini_engine, "NAMESPACE", namespace.short())
        return MiniEngine(tmp_path, uid, clock, **settings)

    return make


def sources_of_the_second(make: Make, first: Namespace, second: Namespace) -> dict[str, int]:
    """Where a replica's tokens come from that is asked what another was asked before."""
    one, two = make("one", first), make("two", second)
    one.know(two)
    two.know(one)
    one.ask("r1", range(20))
    two.poll()
    two.ask("r2", range(20))
    assert two.counter("hook_errors") == 0
    return two.sources("r2")


def test_every_field_has_a_pair_of_values_here() -> None:
    assert list(BASE) == list(OTHER) == FIELDS
    assert list(OTHER_GROUP) == GROUP_FIELDS
    assert all(BASE[name] != OTHER[name] for name in FIELDS)


def test_replicas_of_one_namespace_share(make: Make) -> None:
    assert sources_of_the_second(make, Namespace(**BASE), Namespace(**BASE)) == {"peer_cpu": 16, "computed": 4}


@pytest.mark.parametrize("field", FIELDS)
def test_replicas_that_differ_in_one_field_share_nothing(make: Make, field: str) -> None:
    other = Namespace(**{**BASE, field: OTHER[field]})
    assert sources_of_the_second(make, Namespace(**BASE), other) == {"computed": 20}


@pytest.mark.parametrize("field", GROUP_FIELDS)
def test_replicas_whose_group_differs_in_one_field_share_nothing(make: Make, field: str) -> None:
    group = dataclasses.replace(GROUP, **{field: OTHER_GROUP[field]})
    assert sources_of_the_second(make, Namespace(**BASE), Namespace(**{**BASE, "groups": (group,)})) == {"computed": 20}


def test_replicas_of_another_schema_share_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make("one", Namespace(**BASE))
    monkeypatch.setattr(namespace_module, "SCHEMA_VERSION", namespace_module.SCHEMA_VERSION + 1)
    two = make("two", Namespace(**BASE))
    one.know(two)
    two.know(one)
    one.ask("r1", range(20))
    two.ask("r2", range(20))
    assert two.sources("r2") == {"computed": 20}


# ---- one replica after another


@pytest.mark.parametrize("field", ["model_identity", "dtype", "quantization", "rope_overrides", "kv_cache_dtype"])
def test_a_replica_relaunched_as_something_else_finds_nothing_of_what_it_was_and_leaves_nothing(
    make: Make, tmp_path: Path, field: str
) -> None:
    first = make("one", Namespace(**BASE))
    first.ask("r1", range(20))
    first.engine.close()
    second = make("one", Namespace(**{**BASE, field: OTHER[field]}), incarnation=2, page=first.page)
    second.ask("r2", range(20))
    assert second.sources("r2") == {"computed": 20}
    second.engine.close()
    third = make("one", Namespace(**BASE), incarnation=3, page=first.page)
    third.ask("r3", range(20))
    assert third.sources("r3") == {"cpu_tier": 16, "computed": 4}, "what it was first is still there"
    third.engine.close()
    third.page.close()
    remove_segments(str(tmp_path), "w", "one", force=True)
    assert list(tmp_path.iterdir()) == []


def test_weights_changed_in_place_between_launches_are_another_model(make: Make, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")
    weights = model / "model.safetensors"
    weights.write_bytes((8).to_bytes(8, "little") + b"{}      " + bytes(4096))
    status = weights.stat()
    before = Namespace(**{**BASE, "model_identity": model_identity(model)})
    same = Namespace(**{**BASE, "model_identity": model_identity(model)})
    assert sources_of_the_second(make, before, same)["peer_cpu"] == 16
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights.stat().st_size == status.st_size
    changed = make("three", Namespace(**{**BASE, "model_identity": model_identity(model)}))
    changed.ask("r3", range(20))
    assert changed.sources("r3") == {"computed": 20}


# ---- adapters


@pytest.fixture
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "a"
    path.mkdir()
    (path / "adapter_model.safetensors").write_text("weights")
    return path


def replace_weights(adapter: Path) -> None:
    """Other weights under the same name, of the same size."""
    (adapter / "adapter_model.new").write_text("WEIGHTS")
    (adapter / "adapter_model.new").rename(adapter / "adapter_model.safetensors")


def test_an_adapter_of_the_same_name_with_other_weights_finds_nothing(make: Make, adapter: Path) -> None:
    one, two, three = (make(uid, Namespace(**BASE)) for uid in ("one", "two", "three"))
    for engine in (one, two, three):
        engine.know(*(other for other in (one, two, three) if other is not engine))
    one.ask("r1", range(20), adapter=AdapterDigests().digest("a", 1, str(adapter), False))
    two.ask("r2", range(20), adapter=AdapterDigests().digest("a", 1, str(adapter), False))
    assert two.sources("r2") == {"peer_cpu": 16, "computed": 4}
    replace_weights(adapter)
    three.ask("r3", range(20), adapter=AdapterDigests().digest("a", 1, str(adapter), False))
    assert three.sources("r3") == {"computed": 20}


def test_an_adapter_reloaded_under_its_name_while_the_engine_runs_finds_nothing_of_before_in_any_slab(make: Make, adapter: Path) -> None:
    one, two = (make(uid, Namespace(**BASE)) for uid in ("one", "two"))
    one.know(two)
    two.know(one)
    digests = AdapterDigests()
    one.ask("r1", range(20), adapter=digests.digest("a", 1, str(adapter), False))
    replace_weights(adapter)
    one.reset()  # the engine forgets its own prefixes when an adapter is replaced; what is at stake here are the slabs
    one.ask("r2", range(20), adapter=digests.digest("a", 1, str(adapter), True))
    assert one.sources("r2") == {"computed": 20}
    two.ask("r3", range(20), adapter=AdapterDigests().digest("a", 7, str(adapter), False))
    assert two.sources("r3") == {"peer_cpu": 16, "computed": 4}, "the new weights are shared"


def test_an_adapter_whose_files_changed_under_a_running_engine_shares_nothing_with_anybody(make: Make, adapter: Path) -> None:
    """The engine may have loaded them anew for want of room, without a word: its blocks may be of either weights."""
    one, two = (make(uid, Namespace(**BASE)) for uid in ("one", "two"))
    one.know(two)
    two.know(one)
    digests = AdapterDigests()
    one.ask("r1", range(20), adapter=digests.digest("a", 1, str(adapter), False))
    replace_weights(adapter)
    one.reset()
    for number in range(2):
        one.ask(f"doubtful-{number}", range(20), adapter=digests.digest("a", 1, str(adapter), False))
        assert one.sources(f"doubtful-{number}") == {"computed": 20}
        one.reset()
    two.ask("r3", range(20), adapter=AdapterDigests().digest("a", 1, str(adapter), False))
    assert two.sources("r3") == {"computed": 20}

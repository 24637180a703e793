"""What the connector reads off vLLM's own objects: requests, steps, configurations; and what it refuses when it is made."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from xinference.model.llm.random_model import make_random_model
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.connector.adapters import AdapterDigests
from xinference.model.llm.vllm.xavier.connector.connector import XavierConnector
from xinference.model.llm.vllm.xavier.connector.engine import ENGINES
from xinference.model.llm.vllm.xavier.connector.facts import refuse_unproven
from xinference.model.llm.vllm.xavier.connector.views import engine_facts, request_view
from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter
from xinference.model.llm.vllm.xavier.directory.names import control_path
from xinference.model.llm.vllm.xavier.errors import ConfigRefused, ControlPageRefused
from xinference.model.llm.vllm.xavier.test import vllm_schedule
from xinference.model.llm.vllm.xavier.test.vllm_schedule import BLOCK, LAYERS, engine_config, kv_tensors

IDENTITY = "00112233445566778899aabbccddeeff"


def request(params: Any = None, lora: LoRARequest | None = None, **sampling: Any) -> Request:
    settings = SamplingParams(max_tokens=1, **sampling)
    if params is not None:
        settings.extra_args = {"kv_transfer_params": params}
    init_none_hash(sha256)
    return Request("r1", list(range(70)), settings, None, lora_request=lora, block_hasher=get_request_block_hasher(BLOCK, sha256))


def test_a_request_is_seen_with_its_hashes_and_the_identity_that_the_route_drew() -> None:
    view = request_view(request({"xavier": {"v": 1, "request": IDENTITY}}), AdapterDigests())
    assert (view.request_id, view.num_tokens, view.num_prompt_tokens, len(view.block_hashes)) == ("r1", 70, 70, 2)
    assert view.xavier_request == bytes.fromhex(IDENTITY)
    assert view.adapter == b""
    assert not view.skip_reading


def test_hashes_are_the_engines_own_list_and_grow_with_it() -> None:
    seen = request()
    view = request_view(seen, AdapterDigests())
    seen.append_output_token_ids(list(range(30)))
    assert len(view.block_hashes) == 3


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"other": 1},
        {"xavier": None},
        {"xavier": {"v": 2, "request": IDENTITY}},
        {"xavier": {"v": 1, "request": "xyz"}},
        {"xavier": {"v": 1, "request": IDENTITY[:-2]}},
        {"xavier": {"v": 1, "request": 17}},
        {"xavier": {"v": 1}},
    ],
)
def test_parameters_that_are_not_the_routes_give_no_identity(params: Any) -> None:
    assert request_view(request(params), AdapterDigests()).xavier_request is None


def test_prompt_logprobs_skip_reading() -> None:
    assert request_view(request(prompt_logprobs=2), AdapterDigests()).skip_reading


def test_adapters_are_told_apart_by_their_files(tmp_path: Path) -> None:
    adapters = AdapterDigests()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
    first = request_view(request(lora=LoRARequest("a", 1, str(tmp_path / "one"))), adapters).adapter
    second = request_view(request(lora=LoRARequest("a", 2, str(tmp_path / "two"))), adapters).adapter
    assert len({first, second, b""}) == 3


# ---- configuration


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def config(tmp_path: Path) -> Iterator[XavierConfig]:
    config = XavierConfig("w", "a", 1, str(tmp_path), 2 << 20, "model")
    yield config
    ENGINES.close(config)


def kv_config(num_blocks: int = 8, **spec: Any) -> KVCacheConfig:
    made = FullAttentionSpec(**{"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16, **spec})
    return KVCacheConfig(num_blocks, kv_tensors(made.page_size_bytes, num_blocks), [KVCacheGroupSpec(list(LAYERS), made)])


def tensors(num_blocks: int = 8, heads: int = 1) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(num_blocks, heads, BLOCK, 16, dtype=torch.bfloat16) for name in LAYERS}


@pytest.fixture
def vllm_config(model: Path, config: XavierConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return engine_config(model, config, 8, 128, 1)


def test_the_launchers_own_arguments_are_accepted(vllm_config: Any) -> None:
    facts = engine_facts(vllm_config, kv_config())
    refuse_unproven(facts)
    assert (facts.executor, facts.device, facts.dtype, facts.hash_algorithm) == ("uni", "cpu", "torch.bfloat16", "sha256")
    assert (facts.hash_block_size, facts.num_blocks, facts.block_bytes) == (BLOCK, 8, 2 * 2 * BLOCK * 8 * 2)


def test_an_executor_in_another_process_is_refused(model: Path, config: XavierConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setattr(vllm_schedule, "base_config", vllm_schedule.base_config.__wrapped__)  # one that is not kept
    with pytest.raises(ConfigRefused, match="its executor is 'mp'"):
        XavierConnector(engine_config(model, config, 8, 128, 1), KVConnectorRole.WORKER, kv_config())


def test_a_sliding_window_is_refused(vllm_config: Any) -> None:
    with pytest.raises(ConfigRefused, match="a sliding window"):
        XavierConnector(vllm_config, KVConnectorRole.WORKER, kv_config(sliding_window=64))


def test_several_groups_are_refused(vllm_config: Any) -> None:
    two = kv_config()
    two.kv_cache_groups.append(two.kv_cache_groups[0])
    with pytest.raises(ConfigRefused, match="2 KV groups"):
        XavierConnector(vllm_config, KVConnectorRole.WORKER, two)


def test_settings_that_are_not_ours_are_refused(vllm_config: Any) -> None:
    vllm_config.kv_transfer_config.kv_connector_extra_config = {"something": "else"}
    with pytest.raises(ConfigRefused, match="unknown settings: something"):
        XavierConnector(vllm_config, KVConnectorRole.WORKER, kv_config())


def test_a_scheduler_half_without_its_worker_half_is_refused(vllm_config: Any) -> None:
    with pytest.raises(ConfigRefused, match="not in this process"):
        XavierConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_config())


def test_an_engine_without_a_control_page_is_refused(vllm_config: Any) -> None:
    worker = XavierConnector(vllm_config, KVConnectorRole.WORKER, kv_config())
    with pytest.raises(ControlPageRefused):
        worker.register_kv_caches(tensors())


def test_tensors_that_are_not_what_the_configuration_says_are_refused(vllm_config: Any) -> None:
    worker = XavierConnector(vllm_config, KVConnectorRole.WORKER, kv_config())
    with pytest.raises(ConfigRefused, match="bytes a block"):
        worker.register_kv_caches(tensors(heads=2))


def test_worker_hooks_before_kv_memory_is_registered_do_nothing(vllm_config: Any) -> None:
    worker = XavierConnector(vllm_config, KVConnectorRole.WORKER, kv_config())
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    worker.wait_for_save()


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.seg"))


def test_replicas_with_other_amounts_of_kv_memory_are_in_one_namespace(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for uid, num_blocks in (("a", 8), ("b", 12)):
        config = XavierConfig("w", uid, 1, str(tmp_path), 2 << 20, "model")
        page = ControlPageWriter.create(control_path(str(tmp_path), "w", uid))
        worker = XavierConnector(engine_config(model, config, num_blocks, 128, 1), KVConnectorRole.WORKER, kv_config(num_blocks))
        worker.register_kv_caches(tensors(num_blocks))
        worker.shutdown()
        page.close()
    first, second = segments(tmp_path)
    assert first.split(".")[-2] == second.split(".")[-2]


def test_another_hash_seed_is_another_namespace(tmp_path: Path, vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ControlPageWriter.create(control_path(str(tmp_path), "w", "a"))
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        worker = XavierConnector(vllm_config, KVConnectorRole.WORKER, kv_config())
        worker.register_kv_caches(tensors())
        worker.shutdown()
    assert len(segments(tmp_path)) == 2
    page.close()

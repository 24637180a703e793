"""Keys made of vLLM's own block hashes: salts, adapters, images and tokens never meet, whatever they are called; equal ones do."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from xinference.model.llm.vllm.xavier.block.key import BlockKey, block_key
from xinference.model.llm.vllm.xavier.connector.adapters import AdapterDigests
from xinference.model.llm.vllm.xavier.connector.views import request_view

BLOCK = 16
Hash = Callable[[Any], bytes]


class Kind(NamedTuple):
    """What a request is, besides its tokens."""

    salt: str | None = None
    adapter: str | None = None
    image: tuple[str, int] | None = None
    first_token: int = 0


@pytest.fixture(autouse=True)
def same_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher sets it: before vLLM 0.29 each process has a root of its own otherwise."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    for name in ("a", "b", "other/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_model.safetensors").write_text(f"weights of {name}")
    return tmp_path


def keys_of(kind: Kind, adapters: Path, algorithm: Hash) -> list[BlockKey]:
    """The keys of four full blocks, the first two under the image if there is one."""
    init_none_hash(algorithm)
    lora = None
    if kind.adapter is not None:
        lora = LoRARequest(Path(kind.adapter).name, 1 + len(kind.adapter), str(adapters / kind.adapter))
    features = None
    if kind.image is not None:
        identifier, offset = kind.image
        features = [MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=2 * BLOCK - offset - 2))]
    tokens = [kind.first_token, *[9] * (4 * BLOCK)]  # placeholders: nothing but the image tells two requests apart
    request = Request(
        "r",
        tokens,
        SamplingParams(max_tokens=1),
        None,
        lora_request=lora,
        cache_salt=kind.salt,
        mm_features=features,
        block_hasher=get_request_block_hasher(BLOCK, algorithm),
    )
    view = request_view(request, AdapterDigests())
    assert len(view.block_hashes) == 4
    return [block_key(block_hash, 0, view.adapter) for block_hash in view.block_hashes]


SALTS = (None, "a", "b", "tenant-a", "cache_salt")
ADAPTERS = (None, "a", "b", "other/a")
IMAGES = (None, ("0123beef", 1), ("4567beef", 1), ("0123beef", 3), ("a", 1))
KINDS = [Kind(*parts) for parts in itertools.product(SALTS, ADAPTERS, IMAGES, (0, 1))]
algorithms = pytest.mark.parametrize("algorithm", [sha256, sha256_cbor])


@algorithms
def test_no_two_kinds_of_requests_share_a_key(adapters: Path, algorithm: Hash) -> None:
    """Among them a salt called like an adapter, an adapter called like another's, images with equal ends, one image at two places."""
    kind_by_key: dict[BlockKey, Kind] = {}
    for kind in KINDS:
        for key in keys_of(kind, adapters, algorithm):
            assert kind_by_key.setdefault(key, kind) == kind
    assert len(kind_by_key) == 4 * len(KINDS)


@algorithms
def test_equal_requests_share_all_keys(adapters: Path, algorithm: Hash) -> None:
    for kind in KINDS[::7]:
        assert keys_of(kind, adapters, algorithm) == keys_of(kind, adapters, algorithm)


@algorithms
def test_a_salt_that_is_an_adapters_name_and_path_meets_neither(adapters: Path, algorithm: Hash) -> None:
    path = str(adapters / "a")
    salts = ["a", path, f"('lora', 'a', '{path}')", f"lora{path}", "lora"]
    salted = {key for salt in salts for key in keys_of(Kind(salt=salt), adapters, algorithm)}
    assert len(salted) == 4 * len(salts)
    assert not salted & set(keys_of(Kind(adapter="a"), adapters, algorithm))
    assert not salted & set(keys_of(Kind(), adapters, algorithm))


def test_the_algorithms_never_meet(adapters: Path) -> None:
    assert not set(keys_of(Kind(), adapters, sha256)) & set(keys_of(Kind(), adapters, sha256_cbor))


def test_an_adapter_is_not_told_apart_by_the_engines_hash_alone(adapters: Path) -> None:
    """The digest of its files is what does it: with the hash alone the same path with other weights would meet."""
    before = keys_of(Kind(adapter="a"), adapters, sha256)
    (adapters / "a" / "new").write_text("WEIGHTS of a")
    (adapters / "a" / "new").rename(adapters / "a" / "adapter_model.safetensors")
    after = keys_of(Kind(adapter="a"), adapters, sha256)
    assert not set(before) & set(after)

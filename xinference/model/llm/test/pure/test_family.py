"""Families read from config.json: arithmetic, length, parsers, refusals. Configs are cut down from those of well-known models."""

import json
from pathlib import Path
from typing import Any

import pytest

from xinference.model.llm.family import FamilyRefused, ModelFamily, read_family
from xinference.model.llm.parsers import reasoning_parser, tool_parser

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
}  # fmt: skip


@pytest.fixture
def read(tmp_path: Path):  # type: ignore[no-untyped-def]
    def make(config: Any = None, template: str | None = None, **changes: Any) -> ModelFamily:
        value = {**LLAMA, **changes} if config is None else config
        text = value if isinstance(value, str) else json.dumps({k: v for k, v in value.items() if v is not ...})
        (tmp_path / "config.json").write_text(text)
        if template is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        return read_family(tmp_path)

    return make


def test_an_8b_llama_needs_128_kib_a_token(read) -> None:  # type: ignore[no-untyped-def]
    family = read()
    assert family.kv_bytes_per_token() == 131072  # 32 layers x 2 x 8 heads x 128 values x 2 bytes
    assert family.kv_bytes_per_token("fp8") == 65536
    assert family.kv_bytes_per_token(dtype="float32") == 262144
    assert family.max_model_len == 131072
    assert family.sharing_refusal() is None
    assert family.generates


def test_without_kv_heads_every_head_keeps_its_own(read) -> None:  # type: ignore[no-untyped-def]
    assert read(num_key_value_heads=...).kv_bytes_per_token() == 4 * 131072


def test_a_named_head_size_wins_over_the_quotient(read) -> None:  # type: ignore[no-untyped-def]
    assert read(head_dim=64).kv_bytes_per_token() == 65536


def test_latent_attention_keeps_one_small_vector_a_layer(read) -> None:  # type: ignore[no-untyped-def]
    family = read(model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=61)
    assert family.kv_bytes_per_token() == 61 * 576 * 2


def test_an_unknown_kv_dtype_is_an_error_not_a_guess(read) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(FamilyRefused, match="int4_per_token_head"):
        read().kv_bytes_per_token("int4_per_token_head")


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"rope_scaling": None}, 131072),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 262144),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, 524288),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        ({"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": ...}, 262144),
        ({"max_position_embeddings": ..., "n_positions": 1024, "rope_scaling": ...}, 1024),
        ({"max_position_embeddings": ..., "rope_scaling": ...}, 2048),
    ],
)
def test_the_longest_request_follows_vllm_s_reading_of_the_config(read, changes: dict[str, Any], length: int) -> None:  # type: ignore[no-untyped-def]
    assert read(**changes).max_model_len == length


@pytest.mark.parametrize(
    ("given", "dtype"), [("torch.float16", "float16"), ("float32", "bfloat16"), (..., "bfloat16"), ("half", "float16")]
)
def test_the_dtype_is_the_one_vllm_will_run(read, given: Any, dtype: str) -> None:  # type: ignore[no-untyped-def]
    assert read(torch_dtype=given).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 4096}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"model_type": "mamba2"}, "recurrent"),
        ({"model_type": "falcon_h1"}, "hybrid"),
        ({"model_type": "unheard_of", "mamba_d_state": 16}, "hybrid"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"vision_config": {"depth": 2}}, "image or audio"),
        ({"text_config": {"sliding_window": 1024}}, "sliding-window attention"),
        ({"architectures": ["BertModel"]}, "does not generate"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not generate"),
    ],
)
def test_models_that_cannot_share_say_why(read, changes: dict[str, Any], words: str) -> None:  # type: ignore[no-untyped-def]
    assert words in str(read(**changes).sharing_refusal())


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 32768, "use_sliding_window": False},
        {"sliding_window": 4096, "layer_types": ["full_attention"] * 32},
    ],
)
def test_a_window_that_no_layer_uses_does_not_matter(read, changes: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    assert read(**changes).sharing_refusal() is None


def test_the_language_part_of_a_multimodal_config_is_what_counts(read) -> None:  # type: ignore[no-untyped-def]
    config = {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {"hidden_size": 1},
        "text_config": {k: v for k, v in LLAMA.items() if k != "architectures"},
    }  # fmt: skip
    family = read(config)
    assert family.num_layers == 32
    assert family.model_type == "llama"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{broken", "not valid JSON"),
        ("[1]", "JSON object"),
        ({**LLAMA, "architectures": []}, "no architecture"),
        ({**LLAMA, "num_hidden_layers": ...}, "lacks num_hidden_layers"),
        ({**LLAMA, "num_hidden_layers": "many"}, "num_hidden_layers must be a positive number"),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads must be a positive number"),
        ({**LLAMA, "num_attention_heads": True}, "num_attention_heads must be a positive number"),
    ],
)
def test_a_broken_config_is_refused_in_words(read, config: Any, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(FamilyRefused, match=words):
        read(config)


def test_a_missing_model_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(FamilyRefused, match="no such model directory"):
        read_family(tmp_path / "nothing")
    with pytest.raises(FamilyRefused, match=r"has no config\.json"):
        read_family(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(FamilyRefused, match="GGUF"):
        read_family(tmp_path)
    with pytest.raises(FamilyRefused, match="the directory that holds"):
        read_family(tmp_path / "model.gguf")


def test_a_template_is_found_wherever_models_keep_it(read, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert not read().chat_template
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "<tool_call>"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read().tool_parser == "hermes"
    (tmp_path / "chat_template.jinja").write_text("[TOOL_CALLS]")
    assert read().tool_parser == "mistral"


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("<tool_call>\n{...}</tool_call>", "hermes"),
        ("<tool_call><function=f><parameter=x>", "qwen3_coder"),
        ("<tool_call>name<arg_key>k</arg_key>", "glm45"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<|eot_id|><|python_tag|>", "llama3_json"),
        ('<|eot_id|> {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("<|channel|>commentary<|call|>", "openai"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_markup_of_a_template_names_the_tool_parser(template: str | None, parser: str | None) -> None:
    assert tool_parser(template) == parser


def test_reasoning_is_parsed_only_where_the_template_marks_it() -> None:
    assert reasoning_parser("<think></think>", "qwen3") == "qwen3"
    assert reasoning_parser("no marks", "qwen3") is None
    assert reasoning_parser("<｜Assistant｜><think></think>", "qwen2") == "deepseek_r1"
    assert reasoning_parser("<think></think>", "qwen2") is None
    assert reasoning_parser(None, "qwen3") is None

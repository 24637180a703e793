"""Makes a tiny model with random weights: a real Qwen2 that vLLM loads in seconds, for tests and for machines without any model.

Seeded and deterministic: the same arguments give the same bytes. Needs torch, safetensors and tokenizers (they come with the engine);
they are imported when a model is made, not when this module is.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, INTERMEDIATE = 128, 4, 4, 2, 32, 500, 256
# Large enough that the next token depends strongly on the whole context: KV from another prompt gives another text.
INITIALIZER_RANGE = 0.5
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer a call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# What the tokenizer learns its words from. Any text would do.
CORPUS = (
    "The river runs north of the old stone house and the garden lies between them in the quiet light of the morning.",
    "A block of tokens is written once and read many times; a prefix that two requests share is computed by one of them.",
    "When the weather turns cold the children carry wood, read long letters, and ask for the same story again and again.",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 3, "alerts": true, "notes": null}}',
    "1 2 3 4 5 6 7 8 9 10 11 12 100 256 512 1024 2026 user assistant system tool What is the capital of France?",
)


class RandomModelRefused(RuntimeError):
    """The libraries that make a model are not installed."""


def make_random_model(path: Path, seed: int = 0, max_model_len: int = 4096, num_layers: int = LAYERS) -> Path:
    """Write a model directory; an existing complete one is left alone.

    Args:
        path: the directory to make.
        seed: of the weights.
        max_model_len: tokens.
        num_layers: attention layers.

    Returns:
        ``path``.

    Raises:
        RandomModelRefused: torch, safetensors or tokenizers is missing.
    """
    if (path / "config.json").is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        _write_tokenizer(work, max_model_len)
        _write_weights(work, seed, num_layers)
        config = _config(max_model_len, num_layers)
        (work / "config.json").write_text(json.dumps(config, indent=1))
        (work / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"], "do_sample": False}))
        os.replace(work, path)
    except OSError:
        if not (path / "config.json").is_file():  # someone else made it meanwhile
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


def _config(max_model_len: int, num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCAB, "max_position_embeddings": max_model_len, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "use_sliding_window": False, "torch_dtype": "bfloat16",
        "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": INITIALIZER_RANGE,
    }  # fmt: skip


def _write_weights(path: Path, seed: int, num_layers: int) -> None:
    # The one door to torch: nothing else in this module needs it, and importing it takes seconds.
    try:
        import torch
        from safetensors.torch import save_file
    except ImportError as error:
        raise RandomModelRefused(f"making a model needs torch and safetensors: {error}") from error
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Any:
        return (torch.randn(*shape, generator=generator) * INITIALIZER_RANGE).to(torch.bfloat16)

    def ones(size: int) -> Any:
        return torch.ones(size, dtype=torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": random(VOCAB, HIDDEN),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = random(rows * HEAD_DIM, HIDDEN)
            tensors[f"{prefix}.self_attn.{name}_proj.bias"] = random(rows * HEAD_DIM)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD_DIM)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}.mlp.{name}.weight"] = random(INTERMEDIATE, HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = random(HIDDEN, INTERMEDIATE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = ones(HIDDEN)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(path: Path, max_model_len: int) -> None:
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise RandomModelRefused(f"making a model needs tokenizers: {error}") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[2], "pad_token": SPECIAL_TOKENS[0], "bos_token": None,
        "model_max_length": max_model_len, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

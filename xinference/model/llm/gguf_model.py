"""Turns a Llama-shaped GGUF file into a model directory that vLLM loads: bf16 safetensors, ``config.json``, tokenizer, chat template.

Run as a process of its own, so that torch and the unpacked weights never enter the server's memory:
``python -m xinference.model.llm.gguf_model FILE DIRECTORY``. Prints one line ``progress FRACTION`` for each part done.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKEN = 3  # token type of special tokens in GGUF

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufRefused(ValueError):
    """The file is not a Llama-shaped model with a byte-level BPE tokenizer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    convert(args.file, args.directory, lambda fraction: print(f"progress {fraction:.3f}", flush=True))


def convert(file: Path, directory: Path, progress: Callable[[float], None]) -> None:
    """Write the model into an existing directory.

    Raises:
        GgufRefused: the file's architecture or tokenizer is another.
    """
    reader = gguf.GGUFReader(file)
    facts = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.")}
    if facts.get("general.architecture") != "llama":
        raise GgufRefused(f"architecture {facts.get('general.architecture')!r}, only llama is supported")
    progress(0.1)
    config = _config(facts, {tensor.name for tensor in reader.tensors})
    _write_weights(reader, config, directory, lambda part: progress(0.1 + 0.7 * part))
    _write_tokenizer(reader, config, directory)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1))
    progress(1.0)


def _config(facts: dict[str, Any], tensors: set[str]) -> dict[str, Any]:
    heads, hidden = facts["llama.attention.head_count"], facts["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": facts["llama.feed_forward_length"], "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads, "num_key_value_heads": facts["llama.attention.head_count_kv"], "head_dim": hidden // heads,
        "vocab_size": facts["llama.vocab_size"], "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9), "rope_theta": facts["llama.rope.freq_base"],
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip


def _write_weights(reader: gguf.GGUFReader, config: dict[str, Any], directory: Path, progress: Callable[[float], None]) -> None:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for i, tensor in enumerate(reader.tensors):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name = _TOP_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, kind = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
            if part in heads:
                values = unpermuted(values, heads[part])
        tensors[name] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
        progress((i + 1) / len(reader.tensors))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Q or K rows in Hugging Face's order, from GGUF's: within a head, GGUF interleaves the two halves that rotary embedding pairs.

    Args:
        rows: float32, shape (heads * head_dim, hidden).
        heads: number of heads in it.
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_tokenizer(reader: gguf.GGUFReader, config: dict[str, Any], directory: Path) -> None:
    def value(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    if value("model") != "gpt2" or value("pre") != "smollm":
        raise GgufRefused(f"tokenizer {value('model')!r}/{value('pre')!r}, only gpt2/smollm is supported")
    tokens, kinds = value("tokens"), value("token_type")
    merges = [tuple(merge.split(" ")) for merge in value("merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"],
        "bos_token": tokens[value("bos_token_id")], "eos_token": tokens[value("eos_token_id")],
        "pad_token": tokens[value("padding_token_id")], "unk_token": tokens[value("unknown_token_id")],
        "clean_up_tokenization_spaces": False, "chat_template": reader.fields["tokenizer.chat_template"].contents(),
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    try:
        main()
    except GgufRefused as error:
        sys.exit(f"GgufRefused: {error}")

"""What a model directory holds, read from its ``config.json``: shape, KV arithmetic, length, template, parsers, and what cannot be shared.

Pure but for reading small JSON files; no model library is imported, so the supervisor can do it too.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xinference.model.llm import sharing_limits
from xinference.model.llm.parsers import reasoning_parser, tool_parser

MAX_JSON_BYTES = 64 << 20
DEFAULT_MAX_MODEL_LEN = 2048  # vLLM's own fallback when a config names no length

_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_KV_DTYPE_BYTES = {**_DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "int8": 1}
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "max_target_positions")
# Rope variants whose configs state the already extended length (vLLM config/model.py, 0.32).
_EXTENDED_ROPES = ("default", "mrope", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


class FamilyRefused(ValueError):
    """The directory is not a model that can be served: missing, unreadable, or incomplete. The message says what to do."""


@dataclass(frozen=True)
class ModelFamily:
    """Facts of one model.

    ``num_kv_heads`` times ``head_dim`` times 2 values are kept per layer and token; models with latent attention keep ``latent_dim`` values
    instead. ``dtype`` is that of the weights. ``max_model_len`` in tokens.
    """

    path: Path
    architecture: str
    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int
    dtype: str
    vocab_size: int
    max_model_len: int
    quantization: str | None
    chat_template: bool
    tool_parser: str | None
    reasoning_parser: str | None
    config: dict[str, Any] = field(repr=False, compare=False, default_factory=dict)

    @property
    def generates(self) -> bool:
        """False for models that only embed, score or classify."""
        return self.architecture.endswith(_GENERATING)

    def kv_bytes_per_token(self, kv_cache_dtype: str = "auto", dtype: str | None = None) -> int:
        """KV bytes of one token in all layers.

        Args:
            kv_cache_dtype: vLLM's argument; "auto" means the model's dtype.
            dtype: dtype the engine runs the model in, if not that of the weights.

        Raises:
            FamilyRefused: a KV dtype whose size is not known here.
        """
        name = (dtype or self.dtype) if kv_cache_dtype == "auto" else kv_cache_dtype
        size = _KV_DTYPE_BYTES.get(name)
        if size is None:
            raise FamilyRefused(f"the size of KV dtype {name!r} is not known; known: {', '.join(sorted(_KV_DTYPE_BYTES))}")
        values = self.latent_dim or 2 * self.num_kv_heads * self.head_dim
        return self.num_layers * values * size

    def sharing_refusal(self) -> str | None:
        """Why replicas of this model must not share their KV cache, or None if they may."""
        if not self.generates:
            return f"{self.architecture} does not generate text, so it has no KV cache worth sharing"
        return sharing_limits.refusal(self.config, self.model_type)


def read_family(path: Path | str) -> ModelFamily:
    """Read a model directory.

    Raises:
        FamilyRefused: it is missing, has no readable ``config.json``, or the config lacks what is needed.
    """
    path = Path(path)
    config = _read_config(path)
    text = _text_config(config)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise FamilyRefused(f"{path / 'config.json'} names no architecture (key 'architectures')")
    num_heads = _count(path, text, "num_attention_heads", "n_head", "num_heads")
    hidden_size = _count(path, text, "hidden_size", "n_embd", "d_model")
    template = read_chat_template(path)
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    return ModelFamily(
        path=path,
        architecture=architectures[0],
        model_type=model_type,
        num_layers=_count(path, text, "num_hidden_layers", "n_layer", "num_layers"),
        num_heads=num_heads,
        num_kv_heads=_optional_count(path, text, "num_key_value_heads", "num_kv_heads", "multi_query_group_num") or num_heads,
        head_dim=_optional_count(path, text, "head_dim") or hidden_size // num_heads,
        latent_dim=(_optional_count(path, text, "kv_lora_rank") or 0) + (_optional_count(path, text, "qk_rope_head_dim") or 0)
        if text.get("kv_lora_rank")
        else 0,
        dtype=_dtype(config, text),
        vocab_size=_count(path, text, "vocab_size"),
        max_model_len=_max_model_len(text, model_type),
        quantization=_quantization(config),
        chat_template=template is not None,
        tool_parser=tool_parser(template),
        reasoning_parser=reasoning_parser(template, model_type),
        config=config,
    )


def read_chat_template(path: Path) -> str | None:
    """The chat template's text from wherever the model keeps it, or None."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        file = path / name
        if not file.is_file():
            continue
        template = _read_json(file).get("chat_template")
        if isinstance(template, list):  # several named templates: the default one is used unless a request asks otherwise
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default") or next(iter(named.values()), None)
        if isinstance(template, str) and template:
            return template
    return None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        hint = " (give the directory that holds config.json)" if path.is_file() else ""
        raise FamilyRefused(f"no such model directory: {path}{hint}")
    file = path / "config.json"
    if not file.is_file():
        kinds = {"gguf": "*.gguf", "adapter": "adapter_config.json"}
        found = next((kind for kind, pattern in kinds.items() if any(path.glob(pattern))), None)
        more = {"gguf": "; GGUF files are not served directly", "adapter": "; this is an adapter, not a model"}.get(found or "", "")
        raise FamilyRefused(f"{path} has no config.json{more}")
    return _read_json(file)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise FamilyRefused(f"{file} is larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise FamilyRefused(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FamilyRefused(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FamilyRefused(f"{file} must hold a JSON object")
    return value


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal config, else the config itself."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), dict):
            return {**{k: v for k, v in config.items() if not isinstance(v, dict)}, **config[key]}
    return config


def _optional_count(path: Path, config: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FamilyRefused(f"{path / 'config.json'}: {name} must be a positive number, not {value!r}")
        return value
    return None


def _count(path: Path, config: dict[str, Any], *names: str) -> int:
    value = _optional_count(path, config, *names)
    if value is None:
        raise FamilyRefused(f"{path / 'config.json'} lacks {names[0]}")
    return value


def _dtype(config: dict[str, Any], text: dict[str, Any]) -> str:
    for source in (text, config):
        name = source.get("dtype") or source.get("torch_dtype")
        if isinstance(name, str) and name.removeprefix("torch.") in _DTYPE_BYTES:
            name = name.removeprefix("torch.")
            # vLLM's dtype=auto runs float32 weights in half precision.
            return "bfloat16" if name in ("float32", "float") else {"half": "float16"}.get(name, name)
    return "bfloat16"


def _max_model_len(text: dict[str, Any], model_type: str) -> int:
    lengths: list[int] = [text[key] for key in _LENGTH_KEYS if isinstance(text.get(key), int) and not isinstance(text[key], bool)]
    if not lengths:
        return DEFAULT_MAX_MODEL_LEN
    length: int = min(lengths)
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(rope, dict) or "gemma3" in model_type:
        return length
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "longrope":
        original = text.get("original_max_position_embeddings")
        return original if isinstance(original, int) else length
    factor = rope.get("factor")
    if kind in _EXTENDED_ROPES or not isinstance(factor, int | float):
        return length
    return int(length * factor)


def _quantization(config: dict[str, Any]) -> str | None:
    value = config.get("quantization_config") or config.get("compression_config")
    return str(value.get("quant_method") or "unknown") if isinstance(value, dict) else None

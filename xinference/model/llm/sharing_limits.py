"""For which models KV sharing is proven, by what their config says. Everything else is refused with the reason. Pure.

A shared block must mean the same in any engine that computed it: full attention in every layer, one KV group, text in, nothing carried
from token to token outside the KV cache.
"""

from typing import Any

_RECURRENT = {
    "mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm", "recurrent_gemma",
}  # fmt: skip
_HYBRID = {
    "jamba", "bamba", "zamba", "zamba2", "falcon_h1", "nemotron_h", "granitemoehybrid", "plamo2", "plamo3", "minimax", "minimax_text_01",
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "lfm2", "lfm2_moe", "kimi_linear", "phi4flash", "olmo_hybrid",
}  # fmt: skip
_RECURRENT_KEYS = (
    "ssm_cfg", "mamba_d_state", "mamba_d_conv", "ssm_state_size", "mamba_num_heads", "linear_num_key_heads", "linear_attn_config",
    "attn_layer_indices", "layers_block_type", "hybrid_override_pattern", "attn_type_list",
)  # fmt: skip
_MEDIA_KEYS = ("vision_config", "audio_config", "visual", "vision_tower", "mm_vision_tower", "speech_config")


def refusal(config: dict[str, Any], model_type: str) -> str | None:
    """Why blocks of this model must not be shared, or None.

    Args:
        config: the whole ``config.json``.
        model_type: of its language model.
    """
    nested = [config[key] for key in ("text_config", "llm_config", "language_config") if isinstance(config.get(key), dict)]
    text = {**config, **nested[0]} if nested else config
    if config.get("is_encoder_decoder"):
        return "encoder-decoder models keep a second cache that is not shared"
    if any(config.get(key) for key in _MEDIA_KEYS):
        return "models with image or audio input are not yet proven to share safely"
    if model_type in _RECURRENT:
        return f"{model_type} is a recurrent model: its state is not made of blocks"
    if model_type in _HYBRID or any(text.get(key) is not None for key in _RECURRENT_KEYS):
        return "hybrid models keep recurrent state beside the KV cache"
    return _window(text)


def _window(text: dict[str, Any]) -> str | None:
    layer_types = text.get("layer_types")
    if isinstance(layer_types, list):
        others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
        if others:
            return f"not all layers have full attention ({', '.join(others)})"
        return None  # newer configs list each layer; a window that no layer uses is a leftover
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return f"sliding-window attention ({text['sliding_window']} tokens)"
    if text.get("attention_chunk_size"):
        return f"chunked attention ({text['attention_chunk_size']} tokens)"
    return None

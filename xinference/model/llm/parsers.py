"""Which of vLLM's tool-call and reasoning parsers fit a model, told by the markup in its chat template. Pure.

The template is the only honest source: it is what taught the model how to write a call. Names are those of vLLM 0.21 to 0.33.
"""

# (markers that must all occur, parser), first match wins: special forms before the common ones they contain.
_TOOL_MARKERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), "deepseek_v31"),
    (("<|channel|>", "<|call|>"), "openai"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|tool_call|>", "<|start_of_role|>"), "granite"),
    (("<tool_call>", "<|start_of_role|>"), "granite4"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),
    (("<tool_call>",), "hermes"),
)
# Llama 3.1 and 3.2 templates do not contain the tag itself in every variant; they all describe the JSON form in these words.
_LLAMA_JSON = ('{"name": function name, "parameters"', "<|eot_id|>")

_REASONING_BY_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "deepseek_v3": "deepseek_r1",
    "glm4_moe": "glm45",
    "gpt_oss": "openai_gptoss",
    "granite": "granite",
    "minimax_m2": "minimax_m2",
    "seed_oss": "seed_oss",
    "kimi_k2": "kimi_k2",
}


def tool_parser(template: str | None) -> str | None:
    """Parser for ``--tool-call-parser``, or None for a model that was not taught to call tools."""
    if template is None:
        return None
    for markers, parser in _TOOL_MARKERS:
        if all(marker in template for marker in markers):
            return parser
    return "llama3_json" if all(marker in template for marker in _LLAMA_JSON) else None


def reasoning_parser(template: str | None, model_type: str) -> str | None:
    """Parser for ``--reasoning-parser``, or None for a model that does not mark its reasoning."""
    if template is None:
        return None
    if model_type == "gpt_oss":
        return "openai_gptoss"
    if "</think>" not in template:
        return None
    # Distilled models carry their teacher's template under a student's model type.
    return _REASONING_BY_TYPE.get(model_type, "deepseek_r1" if "<｜Assistant｜>" in template else None)

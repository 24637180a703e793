"""Whether the model that a request names can do what it asks, as far as that is known before an engine is asked: pure.

An engine that is asked for too much may shorten the answer in silence, or die: both are answered here, with the reason.
"""

from typing import Final

from xinference.api.body import Kind, Prepared
from xinference.api.control import Json
from xinference.errors import ContextLengthExceeded, NotSupported

SEED_ON_CPU: Final = (
    "this model runs on vLLM's CPU engine, which dies of a sampled request with a seed of its own as soon as its prompt is computed in "
    "parts; leave 'seed' out, set 'temperature' to 0, where no seed is needed, or launch the model with enable_chunked_prefill=false"
)


def check_fit(kind: Kind, prepared: Prepared, model: Json) -> None:
    """Check a request against its model.

    A prompt given as text is not counted: only the engine can, and it shortens the answer so that both fit.

    Args:
        model: what the route table says of it.

    Raises:
        NotSupported: a seed for a CPU engine.
        ContextLengthExceeded: a prompt of token ids and the answer asked for are longer than the context together.
    """
    if prepared.seeded and model.get("seed_is_fatal"):
        raise NotSupported(SEED_ON_CPU, param="seed")
    limit, prompt, answer = model.get("max_model_len"), prepared.prompt_tokens, prepared.max_tokens
    # A prompt or an answer that is too long by itself is refused by the engine, in words that tell which of them it is.
    if limit is None or prompt is None or answer is None or max(prompt, answer) > limit or prompt + answer <= limit:
        return
    raise ContextLengthExceeded(
        f"the model's maximum context length is {limit} tokens, but the prompt has {prompt} and 'max_tokens' asks for {answer} more: "
        f"{prompt + answer} in all. Ask for a shorter answer, or send a shorter prompt",
        param=kind.prompt_field,
    )

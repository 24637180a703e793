"""The demonstration: one long prompt computed by one replica, then asked of another, and where its tokens came from.

Figures come from the running system: the accounting of each request, and vLLM's own counter of external hits beside it. A run counts
only if both agree (see ``Demonstration.problems``).
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from xinference.client.completions import delta_text
from xinference.client.sync_client import Client
from xinference.deploy.demo_prompt import long_text
from xinference.errors import XinferenceError

Json = dict[str, Any]
PROMPT_TOKENS: Final = 1500
# More than enough: a sentence has over ten tokens with any tokenizer.
SENTENCES: Final = 200
ANSWER_TOKENS: Final = 16
WARM_UP_PROMPT: Final = "Good morning."
PEER_SOURCES: Final = ("peer_gpu", "peer_cpu")
SAVED_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.05
VLLM_HITS: Final = "vllm:external_prefix_cache_hits_total"


class DemoFailed(XinferenceError):
    """The demonstration could not be carried out."""

    default_code = "demo_failed"


@dataclass(frozen=True)
class Leg:
    """One request to one replica.

    Args:
        ttft_seconds: from sending the request to its first token, as the client saw it.
        sources: prompt tokens by where they came from, as the system accounts them.
        vllm_hits: by how much vLLM's own counter of external hits grew.
    """

    replica_uid: str
    ttft_seconds: float
    prompt_tokens: int
    sources: dict[str, int]
    vllm_hits: int

    @property
    def from_peer(self) -> int:
        """Prompt tokens whose KV another replica had computed."""
        return sum(self.sources.get(source, 0) for source in PEER_SOURCES)

    def problems(self) -> list[str]:
        """What is wrong with this leg's own figures."""
        total = sum(self.sources.values())
        return [] if total == self.prompt_tokens else [f"the sources add up to {total} of {self.prompt_tokens} prompt tokens"]


@dataclass(frozen=True)
class Demonstration:
    """The same prompt on a replica that had to compute it, and on one that did not."""

    cold: Leg
    shared: Leg

    def problems(self) -> list[str]:
        """Why this run proves nothing; empty if it does."""
        found = [f"{leg.replica_uid}: {text}" for leg in (self.cold, self.shared) for text in leg.problems()]
        if self.cold.sources.get("computed") != self.cold.prompt_tokens:
            found.append(f"{self.cold.replica_uid} did not compute the whole prompt, so its time is not that of a cold one")
        if self.shared.from_peer == 0:
            found.append(f"{self.shared.replica_uid} took nothing from the other replica's cache")
        if self.shared.from_peer != self.shared.vllm_hits:
            found.append(f"the accounting says {self.shared.from_peer} tokens, vLLM's own counter says {self.shared.vllm_hits}")
        return found

    def verdict(self) -> str:
        """The last line of the quick start."""
        return f"demo: {self.shared.from_peer} of {self.shared.prompt_tokens} prompt tokens came from the other replica's cache"


def warm_up(client: Client, model_uid: str, replica_uids: list[str]) -> None:
    """One short request each: an engine's very first step is slow for reasons of its own. Shorter than a block, so nothing is cached."""
    for replica_uid in replica_uids:
        client.generate(model_uid, WARM_UP_PROMPT, max_tokens=1, temperature=0, replica_uid=replica_uid)


def make_prompt(client: Client, model_uid: str, seed: int) -> list[int]:
    """Token ids of a long prompt; which text, the seed decides."""
    answer = client.tokenize(model_uid, long_text(seed, SENTENCES))
    tokens: list[int] = answer["tokens"]
    if len(tokens) < PROMPT_TOKENS:
        raise DemoFailed(f"the prompt has {len(tokens)} tokens, {PROMPT_TOKENS} are needed")
    return tokens[:PROMPT_TOKENS]


def ask(client: Client, model_uid: str, replica_uid: str, prompt: list[int]) -> Leg:
    """Send the prompt to one replica and read off what it cost."""
    hits_before = vllm_hits(client.metrics(), model_uid, replica_uid)
    options: Json = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "replica_uid": replica_uid, "debug": True}
    first_token, last_chunk, started = None, {}, time.perf_counter()
    for chunk in client.stream_generate(model_uid, prompt, **options):
        if first_token is None and delta_text(chunk):
            first_token = time.perf_counter()
        last_chunk = chunk
    usage, debug = last_chunk.get("usage"), last_chunk.get("xinference")
    if not usage or not debug or debug.get("sources") is None:
        raise DemoFailed(f"the answer of {replica_uid} does not say where its prompt tokens came from")
    if debug["replica"] != replica_uid:
        raise DemoFailed(f"{replica_uid} was asked, {debug['replica']} answered")
    ttft_seconds = (first_token or time.perf_counter()) - started
    hits = vllm_hits(client.metrics(), model_uid, replica_uid) - hits_before
    return Leg(replica_uid, ttft_seconds, usage["prompt_tokens"], dict(debug["sources"]), hits)


def saved_blocks(client: Client, model_uid: str, replica_uid: str) -> int:
    """How many blocks a replica has saved since its engine started."""
    return int(_status(client, model_uid, replica_uid)["counters"]["saves_blocks"])


def wait_until_saved(client: Client, model_uid: str, replica_uid: str, saved_before: int, prompt_tokens: int) -> None:
    """Wait until a replica has saved the prompt's full blocks: saving goes on for a moment after the answer.

    Raises:
        DemoFailed: they were not saved in time.
    """
    tokens_per_block = _status(client, model_uid, replica_uid)["tiers"]["cpu"]["tokens_per_block"]
    wanted = (prompt_tokens - 1) // tokens_per_block
    deadline = time.monotonic() + SAVED_SECONDS
    while (saved := saved_blocks(client, model_uid, replica_uid) - saved_before) < wanted:
        if time.monotonic() > deadline:
            raise DemoFailed(f"{replica_uid} saved {saved} of {wanted} blocks within {SAVED_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


def _status(client: Client, model_uid: str, replica_uid: str) -> Json:
    return next(found for found in client.xavier(model_uid)["replicas"] if found["replica_uid"] == replica_uid)


def vllm_hits(metrics: str, model_uid: str, replica_uid: str) -> int:
    """vLLM's own count of prompt tokens found outside its engine, from the text of /metrics."""
    total = 0.0
    for line in metrics.splitlines():
        if line.startswith(VLLM_HITS + "{"):
            labels = dict(_labels(line))
            if labels.get("model") == model_uid and labels.get("replica") == replica_uid:
                total += float(line.rpartition("} ")[2].split()[0])
    return int(total)


def _labels(line: str) -> Iterator[tuple[str, str]]:
    yield from re.findall(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"', line)

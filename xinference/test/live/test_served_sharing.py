"""Sharing as a client sees it, on real vLLM: the same words with it as without, and an account for every token."""

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

from xinference.test.live.conftest import CPU_CACHE_BYTES, SHARED, Product, sources_of

BLOCK = 32
VOCABULARY = 400
WAIT_SECONDS = 90.0


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Token ids that no other seed begins with."""
    draw = random.Random(seed)
    return [draw.randrange(5, VOCABULARY) for _ in range(num_tokens)]


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll with a deadline."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS:.0f} s: {what}"
        time.sleep(0.05)
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def saved(product: Product, replica: int, prompt: list[int], ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Ask, and wait until the prompt's full blocks are in the replica's segment: that goes on for a moment after the answer."""
    before = product.status(replica)["counters"]["saves_blocks"]
    answer = ask()
    wanted = (len(prompt) - 1) // BLOCK
    until(lambda: product.status(replica)["counters"]["saves_blocks"] - before >= wanted, f"{wanted} blocks saved")
    return answer


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 1500])
def test_greedy_text_is_the_same_computed_loaded_and_without_sharing(product: Product, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, num_tokens)
    control = text_of(product.ask(prompt))
    computed = saved(product, 0, prompt, lambda: product.ask(prompt, 0))
    loaded = product.ask(prompt, 1)
    assert text_of(computed) == control
    assert text_of(loaded) == control
    assert sources_of(computed)["computed"] == num_tokens
    full_blocks = (num_tokens - 1) // BLOCK
    assert sources_of(loaded)["peer_cpu"] == full_blocks * BLOCK


def test_of_1500_tokens_exactly_46_blocks_come_from_the_peer_as_vllm_counts_them_too(product: Product) -> None:
    prompt = prompt_of(4601, 1500)
    saved(product, 1, prompt, lambda: product.ask(prompt, 1))

    def external_hits() -> float:
        name = "vllm:external_prefix_cache_hits_total{"
        lines = [line for line in product.client.metrics().splitlines() if line.startswith(name) and product.replicas[0] in line]
        return float(lines[0].rsplit(" ", 1)[1])

    before = external_hits()
    sources = sources_of(product.ask(prompt, 0))
    assert (sources["peer_cpu"], sources["computed"]) == (46 * BLOCK, 28)
    assert external_hits() - before == 46 * BLOCK


def test_a_repeat_of_the_whole_prompt_is_served_from_the_engines_own_blocks(product: Product) -> None:
    prompt = prompt_of(71, 6 * BLOCK)
    first = product.ask(prompt, 0)
    again = product.ask(prompt, 0)
    assert text_of(first) == text_of(again)
    assert sources_of(again)["local"] == 5 * BLOCK


def test_salts_do_not_meet_and_equal_salts_do(product: Product) -> None:
    prompt = prompt_of(72, 10 * BLOCK)
    saved(product, 0, prompt, lambda: product.ask(prompt, 0, cache_salt="tenant a"))
    assert sources_of(product.ask(prompt, 1, cache_salt="tenant b"))["computed"] == 10 * BLOCK
    assert sources_of(product.ask(prompt, 1))["computed"] == 10 * BLOCK
    assert sources_of(product.ask(prompt, 1, cache_salt="tenant a"))["peer_cpu"] == 9 * BLOCK


def test_tools_named_and_required_are_called(product: Product) -> None:
    client = OpenAI(base_url=f"{product.server.endpoint}/v1", api_key="none", max_retries=0)
    parameters = {"type": "object", "properties": {"days": {"type": "integer", "enum": [1, 2, 3]}}, "required": ["days"]}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": parameters}}]
    messages: Any = [{"role": "user", "content": "What is the weather for 2 days?"}]
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice in (named, "required"):
        answer = client.chat.completions.create(
            model=SHARED, messages=messages, tools=tools, tool_choice=choice, temperature=0, max_tokens=100
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.function.name == "get_weather"  # type: ignore[union-attr]


def test_a_budget_is_never_exceeded_under_pressure(product: Product) -> None:
    before = product.status(0)["counters"]["evictions"]
    seed = 9000
    while product.status(0)["counters"]["evictions"] == before:
        assert seed < 9100, "no eviction although far more was computed than the budget holds"
        product.ask(prompt_of(seed, 1900), 0, max_tokens=1)
        tier = product.status(0)["tiers"]["cpu"]
        assert tier["budget_bytes"] == CPU_CACHE_BYTES
        assert tier["file_bytes"] + tier["book_bytes"] <= CPU_CACHE_BYTES
        assert tier["used_bytes"] <= tier["capacity_blocks"] * tier["block_bytes"] <= tier["file_bytes"]
        for path in os.listdir(product.server.environment["XINFERENCE_SHM_DIR"]):
            full = os.path.join(product.server.environment["XINFERENCE_SHM_DIR"], path)
            assert os.stat(full).st_blocks * 512 <= CPU_CACHE_BYTES
        seed += 1


def test_a_clear_leaves_nothing_to_hit_and_no_bytes(product: Product) -> None:
    prompt = prompt_of(73, 10 * BLOCK)
    saved(product, 0, prompt, lambda: product.ask(prompt, 0))
    cleared = product.client.clear(SHARED)
    assert cleared["status"] == "cleared"
    assert cleared["bytes_freed"] > 0
    assert [product.status(replica)["tiers"]["cpu"]["used_bytes"] for replica in (0, 1)] == [0, 0]
    for replica in (1, 0):
        sources = sources_of(product.ask(prompt_of(73, 10 * BLOCK), replica))
        assert sources["cpu_tier"] == sources["local"] == 0
        assert sources["computed"] + sources["peer_cpu"] == 10 * BLOCK
    product.client.clear(SHARED)
    assert sources_of(product.ask(prompt, 1))["computed"] == 10 * BLOCK


def test_a_killed_replica_adopts_its_segment_and_the_other_never_fails(product: Product) -> None:
    prompt = prompt_of(74, 12 * BLOCK)
    control = text_of(product.ask(prompt))
    saved(product, 0, prompt, lambda: product.ask(prompt, 0))
    victim = next(found for found in product.client.replicas(SHARED) if found["replica_uid"] == product.replicas[0])
    os.kill(victim["pid"], signal.SIGKILL)

    def back() -> bool:
        others = [prompt_of(8000 + number, 3 * BLOCK) for number in range(2)]
        for other in others:
            assert text_of(product.ask(other, 1)) == text_of(product.ask(other))
        now = next(found for found in product.client.replicas(SHARED) if found["replica_uid"] == product.replicas[0])
        return now["state"] == "ready" and now["incarnation"] != victim["incarnation"]

    until(back, "the killed replica is ready again")
    answer = product.ask(prompt, 0)
    assert text_of(answer) == control
    assert sources_of(answer)["cpu_tier"] == 11 * BLOCK
    assert product.status(0)["counters"]["adopted_blocks"] > 0

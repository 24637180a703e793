"""What counts as a proof in the demonstration, and what does not."""

import dataclasses

from xinference.deploy.demo import Demonstration, Leg, vllm_hits
from xinference.deploy.demo_prompt import long_text

COLD = Leg("m-0", 1.2, 1500, {"peer_cpu": 0, "computed": 1500}, vllm_hits=0)
SHARED = Leg("m-1", 0.1, 1500, {"peer_cpu": 1472, "computed": 28}, vllm_hits=1472)
METRICS = """# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total{model="m",replica="m-0",engine="0"} 64.0
vllm:external_prefix_cache_hits_total{model="m",replica="m-1",engine="0"} 1.472e+03
vllm:external_prefix_cache_hits_created{model="m",replica="m-1",engine="0"} 1.7e+09
vllm:external_prefix_cache_hits_total{model="n",replica="m-1",engine="0"} 7.0
"""


def problems(cold: Leg = COLD, shared: Leg = SHARED) -> list[str]:
    return Demonstration(cold, shared).problems()


def test_a_run_whose_figures_agree_proves_the_sharing() -> None:
    assert problems() == []
    assert Demonstration(COLD, SHARED).verdict() == "demo: 1472 of 1500 prompt tokens came from the other replica's cache"


def test_a_run_without_a_single_shared_token_proves_nothing() -> None:
    nothing = Leg("m-1", 1.2, 1500, {"computed": 1500}, vllm_hits=0)
    assert problems(shared=nothing) == ["m-1 took nothing from the other replica's cache"]


def test_tokens_from_the_replicas_own_tier_are_not_the_other_replicas() -> None:
    own = Leg("m-1", 0.1, 1500, {"cpu_tier": 1472, "computed": 28}, vllm_hits=1472)
    assert len(problems(shared=own)) == 2


def test_a_disagreement_with_vllms_counter_is_a_problem() -> None:
    found = problems(shared=dataclasses.replace(SHARED, vllm_hits=1440))
    assert found == ["the accounting says 1472 tokens, vLLM's own counter says 1440"]


def test_a_first_request_that_was_not_cold_is_a_problem() -> None:
    warm = Leg("m-0", 0.1, 1500, {"local": 32, "computed": 1468}, vllm_hits=0)
    assert "did not compute the whole prompt" in problems(cold=warm)[0]


def test_sources_that_do_not_add_up_are_a_problem() -> None:
    short = dataclasses.replace(SHARED, sources={"peer_cpu": 1472, "computed": 27})
    assert problems(shared=short) == ["m-1: the sources add up to 1499 of 1500 prompt tokens"]


def test_vllms_counter_is_read_for_one_replica_of_one_model() -> None:
    assert vllm_hits(METRICS, "m", "m-1") == 1472
    assert vllm_hits(METRICS, "m", "m-2") == 0


def test_the_prompt_is_decided_by_its_seed_from_the_first_words_on() -> None:
    assert long_text(7, 200) == long_text(7, 200)
    assert long_text(7, 200)[:24] != long_text(8, 200)[:24]
    assert len(long_text(7, 200).split()) > 1500

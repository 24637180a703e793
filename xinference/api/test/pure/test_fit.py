"""What is refused because of the model, before an engine is asked."""

import json
from typing import Any

import pytest

from xinference.api.body import CHAT, COMPLETIONS, prepare
from xinference.api.fit import check_fit
from xinference.errors import ContextLengthExceeded, InvalidRequest, NotSupported
from xinference.settings import Limits

MESSAGES = [{"role": "user", "content": "x"}]


def check(model: dict[str, Any], **fields: Any) -> None:
    kind = CHAT if "messages" in fields else COMPLETIONS
    check_fit(kind, prepare(kind, json.dumps({"model": "m", **fields}).encode(), "0" * 32, Limits()), model)


@pytest.mark.parametrize("fields", [{"seed": 7}, {"seed": 0}, {"seed": 7, "temperature": 0.5}, {"seed": 7, "temperature": None}])
def test_a_seed_that_would_kill_the_engine_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(NotSupported, match="enable_chunked_prefill") as caught:
        check({"seed_is_fatal": True}, messages=MESSAGES, **fields)
    assert (caught.value.param, caught.value.status) == ("seed", 400)


@pytest.mark.parametrize(
    ("fatal", "fields"), [(False, {"seed": 7}), (True, {"seed": None}), (True, {"seed": 7, "temperature": 0}), (True, {"temperature": 1})]
)
def test_a_seed_that_does_no_harm_passes(fatal: bool, fields: dict[str, Any]) -> None:
    check({"seed_is_fatal": fatal}, messages=MESSAGES, **fields)


@pytest.mark.parametrize("prompt", [[1] * 7, [[1], [1] * 7]])
def test_a_prompt_of_tokens_and_its_answer_must_fit_the_context_together(prompt: Any) -> None:
    check({"max_model_len": 10}, prompt=prompt, max_tokens=3)
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 10 tokens, but the prompt has 7") as caught:
        check({"max_model_len": 10}, prompt=prompt, max_tokens=4)
    assert caught.value.param == "prompt"


def test_what_is_too_long_by_itself_is_left_to_the_engines_own_words() -> None:
    check({"max_model_len": 10}, prompt=[1], max_tokens=11)
    check({"max_model_len": 10}, prompt=[1] * 11, max_tokens=1)


TRUNCATED = {"prompt": [1] * 9, "max_tokens": 9, "truncate_prompt_tokens": 1}


@pytest.mark.parametrize("fields", [{"prompt": "text", "max_tokens": 10}, {"prompt": [1] * 9}, TRUNCATED])
def test_what_is_not_known_before_an_engine_is_asked_passes(fields: dict[str, Any]) -> None:
    check({"max_model_len": 10}, **fields)


def test_an_answer_of_no_tokens_is_refused_unless_the_prompt_is_echoed() -> None:
    check({}, prompt="x", max_tokens=0, echo=True)
    with pytest.raises(InvalidRequest) as caught:
        check({}, messages=MESSAGES, max_tokens=0)
    assert caught.value.param == "max_tokens"

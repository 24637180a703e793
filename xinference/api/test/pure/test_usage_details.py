"""Usage figures of an engine that are not what they should be."""

import pytest

from xinference.api.usage import correct


@pytest.mark.parametrize("details", [5, "many", [1, 2], None, ["ab"]])
def test_details_that_are_no_object_are_none(details: object) -> None:
    corrected = correct({"prompt_tokens": 3, "prompt_tokens_details": details}, None, expected=False)
    assert corrected.usage == {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}

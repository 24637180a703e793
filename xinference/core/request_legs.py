"""One account of a request out of the records of its legs. Pure.

An engine keeps one record for each prompt and each choice of a body, and all of them carry the body's one identity: with 2 prompts and
``n`` = 3 there are six. A prompt counts once, as what its first choice found: the others find what that one has just computed, which
tells of no cache that was there before.
"""

from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]

# What is not taken from a cache of any kind.
NOT_CACHED = ("handed_over", "computed")
# The first of these that any leg is in, is the state of the whole.
_STATES = ("running", "failed", "aborted", "finished")
_FIRST, _LAST = ("queued", "scheduled", "load_started", "first_token"), ("loaded", "finished")


def cached_tokens(sources: Json) -> int:
    """Prompt tokens that were not computed for the request. ``sources`` is tokens by source."""
    return sum(tokens for source, tokens in sources.items() if source not in NOT_CACHED)


def merge(legs: Sequence[Json], num_choices: int = 1) -> Json:
    """The whole request's record; with ``legs`` in it when there are several, so that it can be merged anew once ``n`` is known.

    Args:
        legs: at least one record, in the order in which the engine wrote them.
        num_choices: the body's ``n``: so many legs belong to each prompt.
    """
    if len(legs) == 1:
        return legs[0]
    prompts = _first_choices(legs, num_choices)
    sources = {source: sum(leg["sources"][source] for leg in prompts) for source in legs[0]["sources"]}
    return {
        **legs[0],
        "state": next(state for state in _STATES if any(leg["state"] == state for leg in legs)),
        "prompt_tokens": _sum(prompts, "prompt_tokens"),
        "output_tokens": _sum(legs, "output_tokens"),
        "sources": sources,
        "cached_tokens": cached_tokens(sources),
        "pre_clear_tokens": _sum(prompts, "pre_clear_tokens"),
        "recomputed_tokens": _sum(legs, "recomputed_tokens"),
        "times": _times(legs),
        "legs": list(legs),
    }


def _first_choices(legs: Sequence[Json], num_choices: int) -> list[Json]:
    """One leg of each prompt. The choices of a prompt have its length and arrive one after the other."""
    by_length: dict[int, list[Json]] = {}
    for leg in sorted(legs, key=lambda leg: leg["times"]["queued"] or 0.0):
        by_length.setdefault(leg["prompt_tokens"], []).append(leg)
    groups = (some[start : start + num_choices] for some in by_length.values() for start in range(0, len(some), num_choices))
    return [min(group, key=lambda leg: (leg["times"]["scheduled"] or float("inf"), cached_tokens(leg["sources"]))) for group in groups]


def _sum(legs: Iterable[Json], name: str) -> int:
    return sum(leg[name] for leg in legs)


def _times(legs: Sequence[Json]) -> Json:
    """The first leg to begin and the last to end; a request has not ended while one of its legs has not."""
    times: Json = dict.fromkeys(legs[0]["times"])
    for names, choose in ((_FIRST, min), (_LAST, max)):
        for name in names:
            found = [leg["times"][name] for leg in legs if leg["times"][name] is not None]
            complete = name != "finished" or len(found) == len(legs)
            times[name] = choose(found) if found and complete else None
    return times

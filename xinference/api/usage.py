"""Usage figures as the accounting has them, and the object that x-xinference-debug asks for. Pure.

The engine's own cached_tokens stays too high after a load that failed in part, and says nothing of where tokens came from; the record
that the replica keeps of each request says what really happened. The engine's figure stands in when there is no such record in time.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Json = dict[str, Any]


class Figure(StrEnum):
    """Where a cached_tokens figure came from; a label in metrics."""

    RECORD = "record"
    """the request's accounting record"""
    ENGINE = "engine"
    """the engine's own figure: the model does not share its cache, so that there is no record"""
    MISSING = "missing"
    """the engine's own figure: no record arrived in time"""
    MISMATCH = "mismatch"
    """the engine's own figure: the record counts another number of prompt tokens"""


@dataclass(frozen=True)
class Corrected:
    """A usage object with the right cached_tokens.

    Args:
        usage: to send.
        figure: where its cached_tokens came from.
        record: the accounting record, if it was used.
    """

    usage: Json
    figure: Figure
    record: Json | None


def correct(usage: Json, record: Json | None, expected: bool) -> Corrected:
    """Set ``prompt_tokens_details.cached_tokens``, always to a number.

    Args:
        usage: as the replica gave it; not changed.
        record: the request's accounting record, or None.
        expected: whether there should be one.
    """
    given = usage.get("prompt_tokens_details")
    details = dict(given) if isinstance(given, dict) else {}
    if record is None:
        figure = Figure.MISSING if expected else Figure.ENGINE
    elif record.get("prompt_tokens") != usage.get("prompt_tokens"):
        figure, record = Figure.MISMATCH, None
    else:
        figure = Figure.RECORD
    if record is not None:
        details["cached_tokens"] = record["cached_tokens"]
    elif details.get("cached_tokens") is None:
        # An engine that reports no figure has told of no hit; clients add these numbers up and must not meet a null.
        details["cached_tokens"] = 0
    return Corrected({**usage, "prompt_tokens_details": details}, figure, record)


def time_to_first_token(record: Json | None, measured_seconds: float | None) -> float | None:
    """Seconds to the first token of an answer that came in one piece, which shows nobody when its first token was there.

    Args:
        record: the accounting record, which knows: from the engine's queue to the first token.
        measured_seconds: what stands in without one, the API's own time to the answer's first byte.
    """
    times = record.get("times", {}) if record is not None else {}
    queued, first_token = times.get("queued"), times.get("first_token")
    if queued is None or first_token is None or first_token < queued:
        return measured_seconds
    return float(first_token - queued)


def debug_object(replica_uid: str, record: Json | None, ttft_seconds: float | None) -> Json:
    """The ``xinference`` object of a response. Sources are null where no record says them."""
    return {
        "replica": replica_uid,
        "sources": record["sources"] if record is not None else None,
        "recomputed_tokens": record["recomputed_tokens"] if record is not None else None,
        "ttft_ms": round(ttft_seconds * 1000, 3) if ttft_seconds is not None else None,
    }

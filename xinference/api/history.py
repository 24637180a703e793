"""The recent requests as this API saw them, whether or not their model keeps accounting records, under the ids that clients see.

    opened ──> running ── first_event ──> running ── ended(outcome) ──> finished | aborted | failed
                                            └─ settled(usage): the replica's own figures

A ring in memory: the oldest makes room. What a replica accounted for a request is asked for when somebody reads, and merged in.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from xinference.api.control import Json
from xinference.core.request_legs import merge

OK: Final = "ok"
CLIENT_GONE: Final = "client_disconnected"
SLOW_READER: Final = "slow_reader"
ABORTED: Final = "request_aborted"
_ABORTS: Final = frozenset({CLIENT_GONE, SLOW_READER, ABORTED})


@dataclass(slots=True)
class Past:
    """One request.

    Args:
        request_id: the x-request-id of its answer.
        request_hex: 32 hex digits under which the replica accounts for it.
        num_choices: the body's ``n``.
        replica_uid: the replica asked last; None until one was chosen.
        received, first_token, finished: unix seconds; None for what has not happened.
        error: code of the error it ended with.
        prompt_tokens, output_tokens, cached_tokens: as the replica's answer said; None if it did not.
    """

    request_id: str
    request_hex: str
    model_uid: str
    endpoint: str
    num_choices: int
    received: float
    replica_uid: str | None = None
    state: str = "running"
    first_token: float | None = None
    finished: float | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None

    def first_event(self) -> None:
        self.first_token = time.time()

    def settled(self, usage: Json) -> None:
        """Note the usage figure of the replica."""
        self.prompt_tokens, self.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def ended(self, outcome: str) -> None:
        """Note the end: ``ok``, how the client left, or an error's code."""
        self.finished = time.time()
        self.state = "finished" if outcome == OK else "aborted" if outcome in _ABORTS else "failed"
        self.error = None if outcome == OK else outcome


class History:
    """The ring. One event loop only.

    Args:
        size: requests kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_hex: OrderedDict[str, Past] = OrderedDict()

    def __iter__(self) -> Iterator[Past]:
        """Newest first."""
        return reversed(self._by_hex.values())

    def add(self, past: Past) -> bool:
        """Keep a request; returns whether the oldest had to go for it."""
        self._by_hex[past.request_hex] = past
        full = len(self._by_hex) > self._size
        if full:
            self._by_hex.popitem(last=False)
        return full

    def find(self, request_id: str) -> Past | None:
        """A request by the id that its client saw, or by the one that replicas account under. Of several with one id, the newest."""
        return next((past for past in self if past.request_id == request_id), self._by_hex.get(request_id))


def combined(past: Past, record: Json | None) -> Json:
    """What the API knows of a request and what its replica accounted for it, if that is known."""
    times: Json = {"received": past.received, "queued": None, "scheduled": None, "load_started": None, "loaded": None}
    found: Json = {
        "prompt_tokens": past.prompt_tokens,
        "output_tokens": past.output_tokens,
        "sources": None,
        "cached_tokens": past.cached_tokens,
        "pre_clear_tokens": None,
        "recomputed_tokens": None,
    }
    if record is not None:
        record = merge(record.get("legs") or [record], past.num_choices)
        found = {name: record.get(name) for name in found}
        times |= record["times"]
    # The client's view wins: an engine has finished before its client has got the answer, or an abort reaches it later.
    times |= {"first_token": past.first_token or times.get("first_token"), "finished": past.finished}
    return {
        "request_id": past.request_id,
        "accounting_id": past.request_hex,
        "model_uid": past.model_uid,
        "replica_uid": past.replica_uid,
        "endpoint": past.endpoint,
        "state": past.state,
        "error": past.error,
        **found,
        "times": times,
    }


def listing(pasts: Iterable[Past], records: Iterable[Json], limit: int) -> list[Json]:
    """Requests newest first: those of the API with their records, and records of requests that this API process knows nothing of.

    Args:
        pasts: newest first.
    """
    by_hex = {record["request_id"]: record for record in records}
    rows = [combined(past, by_hex.pop(past.request_hex, None)) for past in pasts]
    rows += [{"accounting_id": request_hex, "error": None, **record} for request_hex, record in by_hex.items()]
    rows.sort(key=lambda row: row["times"].get("received") or row["times"].get("queued") or 0.0, reverse=True)
    return rows[:limit]

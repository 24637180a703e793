"""One load for many: who loads a missing prefix, who waits for that load, who goes on alone.

A *leader* has allocated blocks and is loading into them. *Followers* miss the same block, and answer "ask again" until the leader's blocks
are in place and have become local hits. Waiting is not free (the engine repeats its own lookup at each attempt), so few may wait, and none
longer than one load may take: a follower's patience starts with the first leader it waits for and is never renewed.

Nothing here depends on how often anybody asks: deadlines follow from when the load began.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["lead", "wait", "alone"]

# No load is late before this: its outcome is seen at the end of a step, and one step of a busy CPU engine takes a tenth of a second.
PATIENCE_FLOOR_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class _Load:
    """One load under way, and who waits for it."""

    request_id: str
    deadline: float
    followers: set[str] = field(default_factory=set)


class LoadBoard:
    """Loads under way, by the first block they bring. Holds one entry for each request between its first wait or lead and ``done``.

    Args:
        followers_max: requests that may wait for one load.
        patience_factor: a load is late after this many times its expected duration, but not before PATIENCE_FLOOR_SECONDS.
    """

    def __init__(self, followers_max: int, patience_factor: float) -> None:
        self._followers_max = followers_max
        self._patience_factor = patience_factor
        self._load_by_key: dict[Hashable, _Load] = {}
        self._key_by_leader: dict[str, Hashable] = {}
        self._key_by_follower: dict[str, Hashable] = {}
        self._deadline_by_follower: dict[str, float] = {}

    def lead(self, key: Hashable, request_id: str, expected_seconds: float, now: float) -> None:
        """A request began to load the block ``key`` and what follows it. Another one that does so already is no longer waited for."""
        self.done(request_id)
        before = self._load_by_key.get(key)
        if before is not None:
            self.done(before.request_id)
        patience = max(PATIENCE_FLOOR_SECONDS, self._patience_factor * expected_seconds)
        self._load_by_key[key] = _Load(request_id, now + patience)
        self._key_by_leader[request_id] = key

    def verdict(self, key: Hashable, request_id: str, now: float) -> Verdict:
        """What a request that misses the block ``key`` should do now. Asking again at the same time gives the same answer.

        Returns:
            "lead" when nobody else loads it, or whoever does is late; "wait" while a load is under way and this request is among its few
            followers, which it becomes by this call; "alone" when they are too many, or this request has waited long enough.
        """
        load = self._load_by_key.get(key)
        if load is None or load.request_id == request_id:
            return "lead"
        if now > self._deadline_by_follower.get(request_id, now):
            self._stop_following(request_id)
            return "alone"
        if now > load.deadline:
            return "lead"
        if request_id in load.followers:
            return "wait"
        if len(load.followers) >= self._followers_max:
            return "alone"
        self._stop_following(request_id)
        load.followers.add(request_id)
        self._key_by_follower[request_id] = key
        self._deadline_by_follower.setdefault(request_id, load.deadline)
        return "wait"

    def done(self, request_id: str) -> None:
        """A request's load ended or its own wait did (it got its blocks, or is gone). Nobody waits for it, its patience is forgotten."""
        key = self._key_by_leader.pop(request_id, None)
        if key is not None:
            for follower in self._load_by_key.pop(key).followers:
                del self._key_by_follower[follower]
        self._stop_following(request_id)
        self._deadline_by_follower.pop(request_id, None)

    def _stop_following(self, request_id: str) -> None:
        key = self._key_by_follower.pop(request_id, None)
        if key is not None:
            self._load_by_key[key].followers.discard(request_id)

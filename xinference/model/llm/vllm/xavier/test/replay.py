"""Request traces replayed through the real placement book and doorkeeper, and through plain LRU with as many places.

A trace is a list of requests, a request a list of content ids, one a block, equal ids meaning equal content after an equal prefix. There
is no time: each request looks up, then saves, before the next one comes, and goes to the next replica in turn. Replicas that share find
what the others keep, and do not keep again what one of them keeps. The owner of a block does not know that another replica was served by
it, except in the view "told", which the product does not have: it shows what telling owners would be worth.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Protocol

from xinference.model.llm.vllm.xavier.policy.admission import Doorkeeper
from xinference.model.llm.vllm.xavier.policy.placement import PlacementBook

View = Literal["isolated", "shared", "told"]


class ReplayedCache(Protocol):
    """One replica's cache, by content id."""

    def holds(self, content: int) -> bool:
        """Whether a block is kept."""

    def serve(self, contents: Sequence[int]) -> None:
        """Kept blocks of one prefix served a request."""

    def save(self, parent: int | None, contents: Sequence[int]) -> bool:
        """Keep a run of new blocks after a kept one; False if not all of it found room."""


class LruCache:
    """The yardstick: least recently used first, tails before heads, every new block admitted."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._order: OrderedDict[int, None] = OrderedDict()
        self._served: Sequence[int] = ()

    def holds(self, content: int) -> bool:
        return content in self._order

    def serve(self, contents: Sequence[int]) -> None:
        self._served = contents
        for content in reversed(contents):
            if content in self._order:
                self._order.move_to_end(content)

    def save(self, parent: int | None, contents: Sequence[int]) -> bool:
        kept = contents[: self._num_places]
        while len(self._order) + len(kept) > self._num_places:
            self._order.popitem(last=False)
        for content in reversed(kept):
            self._order[content] = None
        self.serve(self._served)  # heads newer than tails
        return len(kept) == len(contents)


class BookedCache:
    """The real policies."""

    def __init__(self, num_places: int) -> None:
        self.book = PlacementBook(num_places)
        self._doorkeeper = Doorkeeper(num_places)
        self._place_by_content: dict[int, int] = {}
        self._content_by_place: dict[int, int] = {}

    def holds(self, content: int) -> bool:
        return content in self._place_by_content

    def serve(self, contents: Sequence[int]) -> None:
        self.book.touch([self._place_by_content[content] for content in contents])

    def save(self, parent: int | None, contents: Sequence[int]) -> bool:
        keys = [_key(content) for content in contents]
        num_seen = self._doorkeeper.num_seen(keys)
        self._doorkeeper.note(keys)
        got = self.book.reserve(None if parent is None else self._place_by_content[parent], len(contents), num_seen)
        for place in got.evicted:
            del self._place_by_content[self._content_by_place.pop(place)]
        for place, content in zip(got.places, contents, strict=False):
            self.book.commit(place)
            self._place_by_content[content] = place
            self._content_by_place[place] = content
        return got.refused is None


@dataclass(frozen=True, slots=True)
class Replayed:
    """Blocks asked for and blocks found over a whole trace."""

    num_blocks: int
    num_hits: int

    @property
    def hit_percent(self) -> float:
        return 100 * self.num_hits / self.num_blocks


def replay(trace: Sequence[Sequence[int]], make: Callable[[], ReplayedCache], num_replicas: int, view: View = "isolated") -> Replayed:
    """Run a trace from empty caches."""
    caches = [make() for _ in range(num_replicas)]
    num_hits = 0
    for number, request in enumerate(trace):
        own = caches[number % num_replicas]
        others = [] if view == "isolated" else [cache for cache in caches if cache is not own]
        hits = 0
        while hits < len(request) and (own.holds(request[hits]) or _held_by(others, request[hits])):
            hits += 1
        num_hits += hits
        for cache in (own, *others) if view == "told" else (own,):
            cache.serve([content for content in request[:hits] if cache.holds(content)])
        _save_rest(own, others, request, hits)
    return Replayed(sum(map(len, trace)), num_hits)


def _save_rest(own: ReplayedCache, others: Sequence[ReplayedCache], request: Sequence[int], start: int) -> None:
    """Save what nobody keeps, run by run, until one finds no room."""
    position = start
    while position < len(request):
        if own.holds(request[position]) or _held_by(others, request[position]):
            position += 1
            continue
        stop = position + 1
        while stop < len(request) and not own.holds(request[stop]) and not _held_by(others, request[stop]):
            stop += 1
        before = request[position - 1] if position else None
        parent = before if before is not None and own.holds(before) else None
        if not own.save(parent, request[position:stop]):
            return
        position = stop


def _held_by(caches: Sequence[ReplayedCache], content: int) -> bool:
    return any(cache.holds(content) for cache in caches)


def _key(content: int) -> tuple[int, int]:
    digest = blake2b(content.to_bytes(8, "little"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")

"""Whole streams of requests through the real policies: what is hot survives a flood, and recency is not lost."""

import random

import pytest

from xinference.model.llm.vllm.xavier.test.replay import BookedCache, LruCache, View, replay


def conversations(seed: int, num_requests: int, open_at_once: int) -> list[list[int]]:
    """Turns of chats that begin with one of a few system prompts; each turn repeats all before it and adds to it."""
    draw = random.Random(seed)
    fresh = iter(range(1000, 10_000_000))
    prompts = [[10 * number + block for block in range(8)] for number in range(4)]
    chats: list[list[int]] = []
    trace = []
    for _ in range(num_requests):
        if len(chats) < open_at_once or draw.random() < 0.3:
            chats.append(list(draw.choice(prompts)))
            chats = chats[-open_at_once:]
        chat = draw.choice(chats)
        chat.extend(next(fresh) for _ in range(draw.randint(1, 6)))
        trace.append(list(chat))
    return trace


def flooded(seed: int, num_requests: int) -> list[list[int]]:
    """Conversations, and between them twice as many long prompts that never come again."""
    fresh = iter(range(20_000_000, 90_000_000))
    trace = []
    for request in conversations(seed, num_requests, open_at_once=3):
        trace.append(request)
        trace.extend([next(fresh) for _ in range(40)] for _ in range(2))
    return trace


def hit_percents(trace: list[list[int]], num_places: int, num_replicas: int = 1, view: View = "isolated") -> tuple[float, float]:
    """Plain LRU, then ours."""
    lru = replay(trace, lambda: LruCache(num_places), num_replicas, view)
    ours = replay(trace, lambda: BookedCache(num_places), num_replicas, view)
    return lru.hit_percent, ours.hit_percent


@pytest.mark.parametrize("num_places", [64, 128, 256])
def test_content_that_comes_again_survives_a_flood_that_drowns_it_under_lru(num_places: int) -> None:
    lru, ours = hit_percents(flooded(1, 400), num_places)
    assert ours > lru + 2


@pytest.mark.parametrize("num_places", [64, 256, 1024])
def test_plain_conversations_lose_next_to_nothing_against_lru(num_places: int) -> None:
    lru, ours = hit_percents(conversations(2, 1500, open_at_once=12), num_places)
    assert ours > lru - 1


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_replicas_that_look_at_each_other_find_more_than_isolated_ones(num_replicas: int) -> None:
    trace = conversations(3, 1500, open_at_once=12)
    assert hit_percents(trace, 128, num_replicas, "shared")[1] > hit_percents(trace, 128, num_replicas)[1] + 5


def test_the_books_balance_all_along_a_trace() -> None:
    caches: list[BookedCache] = []

    def make() -> BookedCache:
        caches.append(BookedCache(96))
        return caches[-1]

    trace = conversations(4, 300, open_at_once=6)
    for length in range(0, 300, 30):
        caches.clear()
        replay(trace[: length + 1], make, 3, "shared")
        for cache in caches:
            cache.book.check()
            assert cache.book.counts().reserved == 0

"""Streams of news: events, logs, cache statistics."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import PlainTextResponse, Response

from xinference.api.administration import FINAL_STAGES
from xinference.api.config import ApiConfig
from xinference.api.control import ClusterClient
from xinference.api.feed import Feed
from xinference.api.routing import key_use, scoped_router, state_of
from xinference.api.sse import json_event, text_event
from xinference.errors import InvalidRequest, ModelNotFound

# States of a model after which an event of FINAL_STAGES is sure to come.
UNDER_WAY: Final = frozenset({"launching", "terminating"})
MAX_SEQ: Final = 2**53 - 1  # what every JSON reader can tell from its neighbours

router: Final[APIRouter] = scoped_router()
After = Annotated[int, Query(ge=0, le=MAX_SEQ, description="sequence number of the last event seen")]


def _fed(request: Request, news: AsyncIterator[bytes]) -> Feed:
    """A stream of news that ends when its reader's key is revoked."""
    feed = Feed(state_of(request).gateway, news)
    key_use(request).on_revoked(feed.end)
    return feed


@router.get("/v1/models/{uid:path}/events", summary="What happens to a model, as server-sent events", response_class=Response)
async def model_events(request: Request, uid: str, after: After = 0, follow: bool = False) -> Response:
    api = state_of(request)
    resume = request.headers.get("last-event-id")
    seen = after if not resume else max(after, _sequence_number(resume))
    return _fed(request, event_news(api.cluster, api.config, uid, seen, follow))


def _sequence_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_SEQ)) and int(text) <= MAX_SEQ):
        raise InvalidRequest(f"'last-event-id': give the id of an event, a number from 0 to {MAX_SEQ}", "last-event-id")
    return int(text)


async def event_news(cluster: ClusterClient, config: ApiConfig, uid: str, after: int, follow: bool) -> AsyncIterator[bytes]:
    """A model's events after a sequence number; ends with the launch unless ``follow``."""
    while True:
        # Asked before the events are: a launch that ends in between has its last event among them.
        over = not follow and await _is_over(cluster, uid)
        found = await cluster.events(uid, after, 0.0 if over else config.event_poll_seconds)
        for event in found:
            after = event["seq"]
            yield json_event(event, after)
            if event["stage"] in FINAL_STAGES and not follow:
                return
        if not found:
            if over:
                return
            yield b""


async def _is_over(cluster: ClusterClient, uid: str) -> bool:
    """Whether no event is to come that would end a stream: a reader may have seen the last one, or ask for what never comes."""
    try:
        table = await cluster.route_table(uid)
    except ModelNotFound:
        return True  # terminated; its history is kept for a while
    return table["model"]["state"] not in UNDER_WAY


@router.get("/v1/models/{uid:path}/logs", summary="The engines' log lines, as text or as server-sent events", response_class=Response)
async def model_logs(
    request: Request, uid: str, replica: str | None = None, tail: Annotated[int, Query(ge=0, le=100_000)] = 200, follow: bool = False
) -> Response:
    api = state_of(request)
    if follow:
        return _fed(request, log_news(api.cluster, api.config, uid, replica, tail))
    found = await api.cluster.logs(uid, replica, tail, None)
    return PlainTextResponse(found["text"])


async def log_news(cluster: ClusterClient, config: ApiConfig, uid: str, replica: str | None, tail: int) -> AsyncIterator[bytes]:
    """The last lines, then those that follow."""
    after: int | None = None
    while True:
        found = await cluster.logs(uid, replica, tail, after)
        after = found["next"]
        yield text_event(found["text"]) if found["text"] else b""
        await asyncio.sleep(config.log_poll_seconds)


@router.get("/v1/models/{uid:path}/xavier/stream", summary="Cache statistics once a second, as server-sent events", response_class=Response)
async def cache_stream(request: Request, uid: str) -> Response:
    api = state_of(request)
    return _fed(request, cache_news(api.cluster, api.config, uid))


async def cache_news(cluster: ClusterClient, config: ApiConfig, uid: str) -> AsyncIterator[bytes]:
    """The state of a model's shared cache, again and again."""
    while True:
        yield json_event(await cluster.xavier_status(uid))
        await asyncio.sleep(config.xavier_stream_seconds)

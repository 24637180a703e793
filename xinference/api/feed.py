"""Streams of news for people and their tools: a model's events, its log, its cache statistics."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from xinference.api.answer import Answer, SlowReader
from xinference.api.gateway import Gateway
from xinference.api.watch import client_gone
from xinference.errors import XinferenceError


class Feed(Response):
    """Sends what an iterator yields, as server-sent events.

    Args:
        news: whole events; an empty value means that there was nothing new for a while. Its first value is awaited before the status
            is sent, so that an error that comes first becomes a status.
    """

    def __init__(self, gateway: Gateway, news: AsyncIterator[bytes]) -> None:
        self._gateway = gateway
        self._news = news
        self._ended: asyncio.Future[XinferenceError] = asyncio.get_running_loop().create_future()
        self.background = None

    def end(self, error: XinferenceError) -> None:
        """End the stream from outside; the client gets the error."""
        if not self._ended.done():
            self._ended.set_result(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(scope, send, self._gateway.limits.slow_reader_bytes)
        with self._gateway.subscribed(self):
            work = asyncio.create_task(self._work(answer))
            gone = asyncio.create_task(client_gone(receive))
            try:
                reasons: set[asyncio.Future[Any]] = {work, gone, self._ended}
                await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
                elif self._ended.done():
                    raise self._ended.result()
            except SlowReader:
                self._gateway.metrics.refused.labels("slow_reader_bytes").inc()
                answer.cut()
            except XinferenceError as error:
                if not answer.started:
                    raise
                await answer.fail(error)
            finally:
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)

    async def _work(self, answer: Answer) -> None:
        async for events in self._news:
            if events:
                await answer.events(events)
            else:
                await answer.keep_alive()
        await answer.close()

"""The asynchronous face of the client: the same verbs, awaited."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Self

import httpx2

from xinference.client import calls
from xinference.client.calls import Call, Json
from xinference.client.completions import chat_call, generate_call
from xinference.client.connection import ANSWER_SECONDS, Connection
from xinference.client.errors import AnswerTimeout, ServerUnreachable
from xinference.client.launching import launch_body
from xinference.client.reading import (
    CompletionStream,
    EventFollower,
    check_status,
    connection_error,
    launch_outcome,
    read_answer,
    read_text,
)
from xinference.client.verbs import Verbs


class AsyncClient(Verbs):
    """Administers models over REST. Arguments as for ``Client``."""

    def __init__(
        self,
        endpoint: str | None = None,
        api_key: str | None = None,
        answer_seconds: float = ANSWER_SECONDS,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(Connection.of(endpoint, api_key, answer_seconds))
        self._http = httpx2.AsyncClient(headers=self._connection.headers, transport=transport, trust_env=not self._connection.is_local)

    async def close(self) -> None:
        """Close the connections. A closed client cannot be used again."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def launch(self, wait_ready: bool = False, **fields: Any) -> str:
        """Launch a model; returns its uid. As ``Client.launch``."""
        answer: Json = await self._send(calls.launch(launch_body(fields), dry_run=False))
        if wait_ready:
            await self.wait(answer["model_uid"])
        return str(answer["model_uid"])

    async def wait(self, model_uid: str, on_event: Callable[[Json], None] | None = None) -> Json:
        """Follow a launch to its end; returns the ready model. As ``Client.wait``."""
        last: Json = {}
        async with aclosing(self.events(model_uid)) as events:
            async for last in events:
                if on_event is not None:
                    on_event(last)
        launch_outcome(model_uid, last)
        return dict(await self.model(model_uid))

    async def events(self, model_uid: str, after: int = 0, follow: bool = False) -> AsyncGenerator[Json, None]:
        """A model's events. As ``Client.events``; leave it early only inside ``contextlib.aclosing``."""
        follower = EventFollower(after, follow)
        while not follower.over:
            cause = None
            try:
                async with aclosing(self._stream(calls.events(model_uid, follower.after, follow))) as stream:
                    async for event in stream:
                        yield follower.read(event)
            except (ServerUnreachable, AnswerTimeout) as error:
                cause = error
            if not follower.over:
                await asyncio.sleep(follower.broken(cause))

    async def follow_logs(self, model_uid: str, replica_uid: str | None = None, tail: int = 200) -> AsyncGenerator[str, None]:
        """Pieces of an engine's log as they are written, without end."""
        async with aclosing(self._stream(calls.logs(model_uid, replica_uid, tail, follow=True))) as stream:
            async for event in stream:
                yield event.data

    def stream_chat(self, model_uid: str, messages: list[Json], **options: Any) -> AsyncGenerator[Json, None]:
        """The chunks of a chat completion. Closing the iterator aborts the request."""
        return self._completion(chat_call(model_uid, messages, options | {"stream": True}))

    def stream_generate(self, model_uid: str, prompt: str | list[int], **options: Any) -> AsyncGenerator[Json, None]:
        """The chunks of a text completion. Closing the iterator aborts the request."""
        return self._completion(generate_call(model_uid, prompt, options | {"stream": True}))

    async def _send(self, call: Call) -> Any:
        return read_answer(call, await self._answer(call))

    async def _text(self, call: Call) -> str:
        return read_text(call, await self._answer(call))

    async def _answer(self, call: Call) -> httpx2.Response:
        try:
            response = await self._http.request(**self._connection.request(call))
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise connection_error(error, self.endpoint) from error
        check_status(response)
        return response

    async def _stream(self, call: Call) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        """Server-sent events of one answer; closing the iterator closes the connection."""
        try:
            async with self._http.stream(**self._connection.stream_request(call)) as response:
                if not response.is_success:
                    await response.aread()
                check_status(response)
                async for event in httpx2.EventSource(response):
                    yield event
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise connection_error(error, self.endpoint) from error

    async def _completion(self, call: Call) -> AsyncGenerator[Json, None]:
        stream = CompletionStream()
        async with aclosing(self._stream(call)) as events:
            async for event in events:
                chunk = stream.read(event)
                if chunk is not None:
                    yield chunk
        stream.close()

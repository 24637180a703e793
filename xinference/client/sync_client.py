"""The synchronous face of the client.

For inference use the openai client with ``base_url=f"{endpoint}/v1"``; ``chat`` and ``generate`` here are what the command line needs.
"""

import time
from collections.abc import Callable, Generator, Iterator
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


class Client(Verbs):
    """Administers models over REST.

    Args:
        endpoint: address of the server; default XINFERENCE_ENDPOINT, then http://127.0.0.1:9997.
        api_key: default XINFERENCE_API_KEY.
        answer_seconds: how long one answer may take.
        transport: replaces the network.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        api_key: str | None = None,
        answer_seconds: float = ANSWER_SECONDS,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        super().__init__(Connection.of(endpoint, api_key, answer_seconds))
        self._http = httpx2.Client(headers=self._connection.headers, transport=transport, trust_env=not self._connection.is_local)

    def close(self) -> None:
        """Close the connections. A closed client cannot be used again."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(self, wait_ready: bool = False, **fields: Any) -> str:
        """Launch a model; returns its uid. Fields are those of a launch specification, upstream's spellings included.

        Args:
            wait_ready: return only once it serves, and raise if it does not come to that.
        """
        answer: Json = self._send(calls.launch(launch_body(fields), dry_run=False))
        if wait_ready:
            self.wait(answer["model_uid"])
        return str(answer["model_uid"])

    def wait(self, model_uid: str, on_event: Callable[[Json], None] | None = None) -> Json:
        """Follow a launch to its end; returns the ready model.

        Raises:
            LaunchFailed, LaunchCancelled: it did not become ready.
        """
        last: Json = {}
        for last in self.events(model_uid):
            if on_event is not None:
                on_event(last)
        launch_outcome(model_uid, last)
        return dict(self.model(model_uid))

    def events(self, model_uid: str, after: int = 0, follow: bool = False) -> Iterator[Json]:
        """A model's events after a sequence number: until its launch ends, or without end if ``follow``.

        Survives broken connections: resumes behind the last event seen.
        """
        follower = EventFollower(after, follow)
        while not follower.over:
            cause = None
            try:
                for event in self._stream(calls.events(model_uid, follower.after, follow)):
                    yield follower.read(event)
            except (ServerUnreachable, AnswerTimeout) as error:
                cause = error
            if not follower.over:
                time.sleep(follower.broken(cause))

    def follow_logs(self, model_uid: str, replica_uid: str | None = None, tail: int = 200) -> Iterator[str]:
        """Pieces of an engine's log as they are written, without end."""
        for event in self._stream(calls.logs(model_uid, replica_uid, tail, follow=True)):
            yield event.data

    def stream_chat(self, model_uid: str, messages: list[Json], **options: Any) -> Generator[Json, None, None]:
        """The chunks of a chat completion. Closing the iterator aborts the request."""
        return self._completion(chat_call(model_uid, messages, options | {"stream": True}))

    def stream_generate(self, model_uid: str, prompt: str | list[int], **options: Any) -> Generator[Json, None, None]:
        """The chunks of a text completion. Closing the iterator aborts the request."""
        return self._completion(generate_call(model_uid, prompt, options | {"stream": True}))

    def _send(self, call: Call) -> Any:
        return read_answer(call, self._answer(call))

    def _text(self, call: Call) -> str:
        return read_text(call, self._answer(call))

    def _answer(self, call: Call) -> httpx2.Response:
        try:
            response = self._http.request(**self._connection.request(call))
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise connection_error(error, self.endpoint) from error
        check_status(response)
        return response

    def _stream(self, call: Call) -> Iterator[httpx2.ServerSentEvent]:
        """Server-sent events of one answer; closing the iterator closes the connection."""
        try:
            with self._http.stream(**self._connection.stream_request(call)) as response:
                if not response.is_success:
                    response.read()
                check_status(response)
                yield from httpx2.EventSource(response)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise connection_error(error, self.endpoint) from error

    def _completion(self, call: Call) -> Generator[Json, None, None]:
        stream = CompletionStream()
        for event in self._stream(call):
            chunk = stream.read(event)
            if chunk is not None:
                yield chunk
        stream.close()

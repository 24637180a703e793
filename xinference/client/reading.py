"""What answers and streams mean, written once for both faces. Pure: bytes and events in, values or errors out."""

import json
from typing import Any, Final

import httpx2

from xinference.client.calls import Call, Json
from xinference.client.errors import AnswerTimeout, ServerUnreachable, StreamBroken, UnexpectedAnswer, error_from_answer, error_from_wire
from xinference.errors import LaunchCancelled, LaunchFailed, XinferenceError

REQUEST_ID_HEADER: Final = "x-request-id"
FINAL_STAGES: Final = frozenset({"ready", "failed", "terminated", "cancelled"})
RECONNECTS: Final = 5
RECONNECT_SECONDS: Final = 1.0


def check_status(response: httpx2.Response) -> None:
    """Raise the error that an answer, read to its end, reports; return when it reports none."""
    if response.is_redirect:
        target = response.headers.get("location", "")
        raise UnexpectedAnswer(f"the server redirects to {target or 'nowhere'}; this API does not, so name its own address as endpoint")
    if response.is_error:
        raise error_from_answer(response.status_code, response.content, response.headers.get(REQUEST_ID_HEADER))


def read_answer(call: Call, response: httpx2.Response) -> Any:
    """The JSON value of a finished answer.

    Raises:
        UnexpectedAnswer: the answer is not of this API.
    """
    try:
        answer = response.json()
    except (ValueError, RecursionError):
        raise UnexpectedAnswer(f"{call.method} {call.path} was not answered with JSON; is this an Xinference server?") from None
    fields = call.needs if call.field is None else (call.field,)
    for name in fields:
        if not isinstance(answer, dict) or name not in answer:
            raise UnexpectedAnswer(f"{call.method} {call.path}: the answer has no field '{name}'; is this an Xinference server?")
    if call.field is None:
        return answer
    found = answer[call.field]
    if call.field == "data" and not (isinstance(found, list) and all(isinstance(row, dict) for row in found)):
        raise UnexpectedAnswer(f"{call.method} {call.path}: 'data' is not a list of objects; is this an Xinference server?")
    return found


def read_text(call: Call, response: httpx2.Response) -> str:
    """The text of a finished answer.

    Raises:
        UnexpectedAnswer: the answer is not of this API.
    """
    if not response.headers.get("content-type", "").startswith("text/plain"):
        raise UnexpectedAnswer(f"{call.method} {call.path} was not answered with plain text; is this an Xinference server?")
    return str(response.text)


def connection_error(error: httpx2.HTTPError | httpx2.InvalidURL, endpoint: str) -> XinferenceError:
    """What a failed connection is called towards users."""
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return ServerUnreachable(f"no server answers at {endpoint}; start one with `xinference-local`, or name another with --endpoint")
    if isinstance(error, httpx2.TimeoutException):
        return AnswerTimeout(f"{endpoint} did not answer in time")
    if isinstance(error, httpx2.SSEError):
        return UnexpectedAnswer(f"{endpoint}: {error}")
    if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return UnexpectedAnswer(f"'{endpoint}' is not an address of a server; it looks like http://127.0.0.1:9997")
    return ServerUnreachable(f"the connection to {endpoint} broke: {error or type(error).__name__}")


def read_event(event: httpx2.ServerSentEvent) -> Json:
    """The object of one event.

    Raises:
        XinferenceError: the event is an error event.
        UnexpectedAnswer: the event's data is not a JSON object.
    """
    try:
        decoded = json.loads(event.data)
    except (ValueError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        raise UnexpectedAnswer("the stream holds an event that is not a JSON object")
    error = decoded.get("error")
    if isinstance(error, dict):
        raise error_from_wire(error, 200)
    return decoded


class CompletionStream:
    """Reads a streamed completion, and tells a finished one from one that was cut.

    A cut stream looks like a short answer unless somebody insists on its last event.
    """

    def __init__(self) -> None:
        self.done = False

    def read(self, event: httpx2.ServerSentEvent) -> Json | None:
        """The chunk of one event; None for the event that ends the stream."""
        if event.data.strip() == "[DONE]":
            self.done = True
            return None
        return read_event(event)

    def close(self) -> None:
        """To be called when no further event comes.

        Raises:
            StreamBroken: the stream ended without its last event.
        """
        if not self.done:
            raise StreamBroken("the stream ended before the answer was complete")


class EventFollower:
    """Follows a model's events over broken connections: knows where to resume, when it is over, and when to give up."""

    def __init__(self, after: int = 0, follow: bool = False) -> None:
        self.after = after
        self.over = False
        self._follow = follow
        self._failures = 0

    def read(self, event: httpx2.ServerSentEvent) -> Json:
        """One event; remembers its place."""
        found = read_event(event)
        self.after = max(self.after, int(found.get("seq", self.after)))
        self._failures = 0
        self.over = not self._follow and found.get("stage") in FINAL_STAGES
        return found

    def broken(self, cause: XinferenceError | None) -> float:
        """The stream ended too early; returns how long to wait before resuming.

        Raises:
            XinferenceError: the cause, once it has happened RECONNECTS times without an event in between.
        """
        self._failures += 1
        if self._failures > RECONNECTS:
            raise cause or StreamBroken("the server keeps ending the event stream")
        return RECONNECT_SECONDS


def launch_outcome(model_uid: str, last_event: Json) -> None:
    """Turn the last event of a launch into success or the error it stands for.

    Raises:
        LaunchCancelled, LaunchFailed: the launch ended without a ready model.
    """
    stage, message = last_event.get("stage"), last_event.get("message") or ""
    if stage == "cancelled":
        raise LaunchCancelled(f"the launch of '{model_uid}' was cancelled")
    if stage == "failed":
        raise LaunchFailed(message or f"the launch of '{model_uid}' failed; `xinference logs {model_uid}` may say why")
    if stage == "terminated":
        raise LaunchFailed(f"'{model_uid}' was terminated while it was starting")

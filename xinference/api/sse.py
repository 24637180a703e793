"""Server-sent events of a replica, rewritten for the client: pure, incremental, and nearly free for an ordinary chunk.

    replica's bytes ── feed() ──> bytes to send on
                          ├─ usage     the final usage chunk, held back
                          ├─ error     an error event, held back
                          └─ done      "[DONE]" was seen, held back

What is held back is the caller's to send, corrected. Comments are dropped: the caller keeps the connection alive itself.
Everything else passes byte by byte. What ``feed`` returns always ends at the end of an event, so that a comment or an error event may
be sent between any two of its results.
"""

from typing import Any, Final

import msgspec

Json = dict[str, Any]

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
# An event without any of these passes unread. A quotation mark inside a JSON string is always escaped, so that text of the model can
# never look like one of these keys; a string that merely equals one of them costs a closer look, nothing else.
_MARKS: Final = (b'"usage":', b'"error"', b"[DONE]", b"\n:", b"\r")


class EventTooLarge(ValueError):
    """One event exceeds the limit: the replica does not speak this protocol."""


def data_event(payload: bytes) -> bytes:
    """One event with this data, which must not hold a line break."""
    return b"data: " + payload + b"\n\n"


def json_event(value: Any, event_id: int | None = None) -> bytes:
    """One event with a JSON value, and an id from which a client can resume."""
    head = b"" if event_id is None else b"id: %d\n" % event_id
    return head + data_event(msgspec.json.encode(value))


def text_event(text: str) -> bytes:
    """One event with text of any number of lines."""
    return b"".join(b"data: " + line.encode() + b"\n" for line in text.splitlines()) + b"\n"


class StreamRewriter:
    """Reads one replica stream.

    Args:
        max_event_bytes: largest event.
    """

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._tail = b""
        self.done = False
        self.usage: Json | None = None
        self.error: Json | None = None

    def feed(self, data: bytes) -> bytes:
        """Take what has arrived; returns what goes to the client now, maybe nothing.

        Raises:
            EventTooLarge: an event does not end within the limit.
        """
        if not self._tail and data.endswith(b"\n\n") and _is_plain(data):
            return data
        data = self._tail + data
        if b"\r" in data:
            # A CR at the very end may be half of a line end.
            held = b"\r" if data.endswith(b"\r") else b""
            data = data.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *events, self._tail = data.split(b"\n\n")
        if len(self._tail) > self._max_event_bytes:
            raise EventTooLarge(f"an event of more than {self._max_event_bytes} bytes")
        return b"".join(event + b"\n\n" for event in events if self._passes(event))

    def _passes(self, event: bytes) -> bool:
        """Whether an event goes to the client as it is; keeps it if it does not."""
        lines = [line for line in event.split(b"\n") if line and not line.startswith(b":")]
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        if not lines:
            return False
        if data == b"[DONE]":
            self.done = True
            return False
        if b'"usage":' not in data and b'"error"' not in data:
            return True
        return self._keep(data)

    def _keep(self, data: bytes) -> bool:
        try:
            chunk = msgspec.json.decode(data)
        except msgspec.DecodeError:
            return True
        if not isinstance(chunk, dict):
            return True
        error = chunk.get("error")
        if error is not None and "choices" not in chunk:
            self.error = error if isinstance(error, dict) else {"message": str(error)}
            return False
        if chunk.get("usage") is not None and not chunk.get("choices"):
            self.usage = chunk
            return False
        return True


def _is_plain(data: bytes) -> bool:
    return not data.startswith((b":", b"\n")) and not any(mark in data for mark in _MARKS)

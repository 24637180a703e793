"""What an engine prints: cut into lines, rid of secrets, searched for the cause of a failure. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence

MAX_LINE_BYTES = 8192
REDACTED = "[redacted]"
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
# Values shorter than this are words that occur by chance ("1", "true"); hiding them would only garble the log.
MIN_SECRET_CHARS = 6

_PATTERNS = (
    re.compile(r"(?i)(\bauthorization\b['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)?\s*)[^\s'\",]+"),
    re.compile(r"(?i)(\bbearer\s+)[A-Za-z0-9._~+/=-]{6,}"),
    re.compile(r"(?i)(\b[a-z_-]*(?:api[_-]?key|token|secret|password|passwd)['\"]?\s*[:=]\s*['\"]?)[A-Za-z0-9._~+/=-]{6,}"),
    re.compile(r"()\bhf_[A-Za-z0-9]{16,}"),
    re.compile(r"()\b(?:sk|xin)-[A-Za-z0-9_-]{16,}"),
    re.compile(r"(://[^/\s:@]+:)[^@\s/]+(?=@)"),
)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# vLLM prefixes each line of a child process: "(EngineCore pid=12) ERROR 11-29 16:00:00 [core.py:10] text"
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\S+\s+\S+\s+\[[^\]]*\]\s*)?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Refused|Exit|Interrupt|TooSmall)\b(?::\s*|$)")
# Lines that say themselves that nothing is wrong, and lines that say something is.
_QUIET = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:[\d:,. T-]+)?\[?(?:DEBUG|INFO)\b")
_LOUD = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|Traceback|[Ff]atal|[Ee]rror:|[Ee]xception\b)")
# Lines that only say that something else failed.
_SECOND_HAND = ("Engine core initialization failed", "See root cause above", "See stack trace", "Engine process failed to start")


class Redactor:
    """Replaces secrets by ``[redacted]``.

    Args:
        secrets: exact values to hide, in addition to what looks like a key, token or password.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self.secrets = sorted({s for s in secrets if len(s) >= MIN_SECRET_CHARS}, key=len, reverse=True)

    @classmethod
    def for_environment(cls, env: Mapping[str, str]) -> "Redactor":
        """Hides the values of all variables whose name says that they are secret."""
        return cls(value for name, value in env.items() if SECRET_NAME.search(name))

    def __call__(self, line: str) -> str:
        for secret in self.secrets:
            line = line.replace(secret, REDACTED)
        for pattern in _PATTERNS:
            line = pattern.sub(rf"\g<1>{REDACTED}", line)
        return line


class LineCutter:
    """Turns chunks of bytes into lines; a line over ``MAX_LINE_BYTES`` is cut there and the rest of it is dropped and counted."""

    def __init__(self) -> None:
        self._rest = b""
        self._dropping = False
        self.dropped_bytes = 0

    def feed(self, chunk: bytes) -> list[str]:
        """The lines completed by ``chunk``; carriage returns of progress bars end a line too."""
        *complete, rest = (self._rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        lines = []
        for raw in complete:
            if self._dropping:
                self.dropped_bytes += len(raw)
                self._dropping = False
            elif raw:
                lines.append(self._text(raw))
        if self._dropping:
            self.dropped_bytes += len(rest)
            rest = b""
        elif len(rest) > MAX_LINE_BYTES:
            lines.append(self._text(rest))
            self._dropping = True
            rest = b""
        self._rest = rest
        return lines

    def end(self) -> list[str]:
        """The last line, if it has no line end."""
        rest, self._rest = self._rest, b""
        return [self._text(rest)] if rest else []

    def _text(self, raw: bytes) -> str:
        if len(raw) > MAX_LINE_BYTES:
            self.dropped_bytes += len(raw) - MAX_LINE_BYTES
            raw = raw[:MAX_LINE_BYTES]
        return _ANSI.sub("", raw.decode(errors="replace"))


def without_prefix(line: str) -> str:
    """A log line without the engine's process name, level, time and source position."""
    return _PREFIX.sub("", line)


def cause_of(lines: Sequence[str], killed: bool = False) -> str:
    """The line that most likely says why the engine failed, or "" if there is nothing to go by.

    Args:
        killed: a signal ended it. Then its last words, if they tell of no error, have nothing to do with its end.

    The root cause is the first exception line of the last burst, not the last one: an engine whose core fails reports the core's
    exception first, then the API server's "initialization failed" on top of it.
    """
    texts = [without_prefix(line).strip() for line in lines]
    exceptions = [t for t in texts if _EXCEPTION.match(t) and not any(phrase in t for phrase in _SECOND_HAND)]
    if exceptions:
        return exceptions[-1]
    telling = [
        text for line, text in zip(lines, texts, strict=True) if text and not _QUIET.match(line) and (not killed or _LOUD.search(line))
    ]
    return telling[-1] if telling else ""

"""Text of one choice as it grows: decoding, stop strings, and the piece that may be shown so far."""

from dataclasses import dataclass

from xinference.model.llm.fake.network import Candidate
from xinference.model.llm.fake.request import Output
from xinference.model.llm.fake.vocabulary import Decoder


@dataclass(frozen=True)
class Piece:
    """What is new in a choice. ``token`` is None when only the end is news."""

    text: str
    token: int | None
    candidates: tuple[Candidate, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    cached_tokens: int


class Transcript:
    """One choice.

    Args:
        stop: strings that end the text.
        keep_stop: leave the stop string in the text.
    """

    def __init__(self, stop: tuple[str, ...], keep_stop: bool) -> None:
        self._stop = stop
        self._keep_stop = keep_stop
        self._decoder = Decoder()
        self._held_back = max((len(s) - 1 for s in stop), default=0)
        self._text = ""
        self._shown = 0
        self.num_tokens = 0
        self.finished = False

    def push(self, output: Output) -> Piece:
        """Take news from the engine. After a piece with ``finish_reason`` nothing more may be pushed."""
        if output.token is not None:
            self.num_tokens += 1
            self._text += self._decoder.push(output.token)
        reason, stop_reason = output.finish_reason, output.stop_token
        if reason is not None:
            self._text += self._decoder.end()
        end = len(self._text)
        found = self._find_stop()
        if found is not None:
            position, string = found
            reason, stop_reason = "stop", string  # type: ignore[assignment]
            end = position + len(string) if self._keep_stop else position
        elif reason is None:
            end = max(self._shown, end - self._held_back)
        text, self._shown = self._text[self._shown : end], max(self._shown, end)
        self.finished = reason is not None
        return Piece(text, output.token, output.candidates, reason, stop_reason, output.cached_tokens)

    def _find_stop(self) -> tuple[int, str] | None:
        found = [(self._text.find(s), s) for s in self._stop if s in self._text]
        return min(found) if found else None

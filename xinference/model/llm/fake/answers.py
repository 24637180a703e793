"""Bodies and stream chunks of answers, with the fields of vLLM's."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from xinference.model.llm.fake.calls import Call
from xinference.model.llm.fake.network import Candidate
from xinference.model.llm.fake.transcript import Piece
from xinference.model.llm.fake.vocabulary import decode

FINGERPRINT = "fake"


def usage(call: Call, num_output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    prompt = sum(len(p) for p in call.prompts)
    details = {"cached_tokens": cached_tokens, "created_cache_tokens": 0 if call.chat else None, "multimodal_tokens": None}
    return {
        "prompt_tokens": prompt, "total_tokens": prompt + num_output_tokens, "completion_tokens": num_output_tokens,
        "prompt_tokens_details": details, "completion_tokens_details": None,
    }  # fmt: skip


def sse(data: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class Answer:
    """Builds the answer to one call: a whole body from collected pieces, or chunk after chunk."""

    def __init__(self, call: Call, request_id: str) -> None:
        self._call = call
        self._created = int(time.time())
        self.id = f"{'chatcmpl' if call.chat else 'cmpl'}-{request_id}"
        self._tool_ids = [[f"chatcmpl-tool-{uuid.uuid4().hex[:16]}" for _ in call.tools] for _ in range(self.num_choices)]
        self._told = [0] * self.num_choices  # characters of tool arguments already sent, by choice
        self._offset = [0] * self.num_choices  # text offset of the next token's logprobs, by choice

    @property
    def num_choices(self) -> int:
        return len(self._call.prompts) * self._call.n

    # ---- whole bodies

    def body(self, choices: Sequence[Sequence[Piece]], num_output_tokens: int, cached_tokens: int) -> dict[str, Any]:
        build = self._chat_choice if self._call.chat else self._completion_choice
        return {
            "id": self.id, "object": "chat.completion" if self._call.chat else "text_completion", "created": self._created,
            "model": self._call.model, "choices": [build(i, pieces) for i, pieces in enumerate(choices)],
            "service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage(self._call, num_output_tokens, cached_tokens),
            "kv_transfer_params": None, "metrics": None,
            **({"prompt_token_ids": list(self._call.prompts[0])} if self._call.chat and self._call.return_token_ids else {}),
        }  # fmt: skip

    def _chat_choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        call, text = self._call, "".join(p.text for p in pieces)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None}
        message |= {"function_call": None, "reasoning": None}
        if call.tools:
            message["content"] = "" if call.named_tool else None
            message["tool_calls"] = [
                {"id": self._tool_ids[index][i], "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, name, arguments in _split(call, 0, text)
            ]
        logprobs = None
        if call.logprobs is not None:
            logprobs = {"content": [_chat_logprob(p.candidates, call.logprobs) for p in pieces if p.token is not None]}
        return {
            "index": index, "message": message, "logprobs": logprobs, "finish_reason": self._reason(pieces[-1]),
            "stop_reason": pieces[-1].stop_reason, "token_ids": self._token_ids(pieces),
        }  # fmt: skip

    def _completion_choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        call = self._call
        text = self.echo(index) + ("" if call.suppress_output else "".join(p.text for p in pieces))
        logprobs = None
        if call.logprobs is not None:
            logprobs = self._empty_logprobs()
            if call.echo:
                self._add_prompt_logprobs(index, logprobs)
            for piece in () if call.suppress_output else pieces:
                self._add_logprob(index, logprobs, piece)
        return {
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": self._reason(pieces[-1]),
            "stop_reason": pieces[-1].stop_reason, "token_ids": self._token_ids(pieces), "prompt_logprobs": None,
            "prompt_token_ids": list(call.prompts[index // call.n]) if call.return_token_ids else None,
        }  # fmt: skip

    def echo(self, index: int) -> str:
        """The prompt's text, if the client wants it back."""
        return decode(self._call.prompts[index // self._call.n]) if self._call.echo else ""

    # ---- chunks

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """A chat's opening chunk; completions have none."""
        if not self._call.chat:
            return None
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return {**self._chunk([choice]), "prompt_token_ids": list(self._call.prompts[0]) if self._call.return_token_ids else None}

    def chunks(self, index: int, piece: Piece, first: bool) -> list[dict[str, Any]]:
        """The chunks for one piece of a choice, ``first`` or not; none when there is nothing to show."""
        if not self._call.chat:
            return [self._completion_chunk(index, piece, first)]
        deltas: list[dict[str, Any]] = [{"content": piece.text} if piece.text else {}]
        if self._call.tools:
            deltas = self._tool_deltas(index, piece)
        if not deltas and piece.finish_reason is not None:
            deltas = [{}]
        chunks = [self._chunk([{**self._choice(index, piece, last=delta is deltas[-1]), "delta": delta}]) for delta in deltas]
        if self._call.logprobs is not None and piece.token is not None and chunks:
            chunks[0]["choices"][0]["logprobs"] = {"content": [_chat_logprob(piece.candidates, self._call.logprobs)]}
        return chunks

    def _choice(self, index: int, piece: Piece, last: bool) -> dict[str, Any]:
        """What all chunks' choices have; the last chunk of a piece carries its end."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": self._reason(piece) if last else None}
        if piece.finish_reason is not None and last:
            choice["stop_reason"] = piece.stop_reason
        if self._call.return_token_ids:
            choice["token_ids"] = self._token_ids([piece])
        return choice

    def _completion_chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        call = self._call
        choice = self._choice(index, piece, last=True)
        choice["text"] = (self.echo(index) if first else "") + ("" if call.suppress_output else piece.text)
        if first and (call.echo or call.return_token_ids):
            choice["prompt_token_ids"] = list(call.prompts[index // call.n])
        if call.logprobs is not None:
            choice["logprobs"] = self._empty_logprobs()
            if first and call.echo:
                self._add_prompt_logprobs(index, choice["logprobs"])
            self._add_logprob(index, choice["logprobs"], piece)
        return self._chunk([choice])

    def usage_chunk(self, num_output_tokens: int, cached_tokens: int) -> dict[str, Any]:
        counts = usage(self._call, num_output_tokens, cached_tokens)
        counts["prompt_tokens_details"] = {k: v for k, v in counts["prompt_tokens_details"].items() if v is not None}
        del counts["completion_tokens_details"]  # nulls are left out of this chunk
        return {**self._chunk([]), "usage": counts, "system_fingerprint": FINGERPRINT}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._call.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._call.model, "choices": choices}

    def _tool_deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """New characters of tool arguments; before a call's first ones its name, in a delta of its own."""
        start = self._told[index]
        self._told[index] += len(piece.text)
        deltas = []
        for i, name, arguments in _split(self._call, start, piece.text):
            if start <= sum(len(t.arguments) for t in self._call.tools[:i]):
                deltas.append({"id": self._tool_ids[index][i], "type": "function", "index": i, "function": {"name": name}})
            deltas.append({"index": i, "function": {"arguments": arguments}})
        return [{"content": None, "tool_calls": [delta]} for delta in deltas]

    # ---- details

    def _reason(self, piece: Piece) -> str | None:
        return "tool_calls" if self._call.tools and not self._call.named_tool and piece.finish_reason == "stop" else piece.finish_reason

    def _token_ids(self, pieces: Sequence[Piece]) -> list[int] | None:
        return [p.token for p in pieces if p.token is not None] if self._call.return_token_ids else None

    def _empty_logprobs(self) -> dict[str, list[Any]]:
        return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}

    def _add_logprob(self, index: int, lists: dict[str, list[Any]], piece: Piece) -> None:
        if piece.token is None:
            return
        best, more = piece.candidates[0], piece.candidates[: 1 + (self._call.logprobs or 0)]
        self._append(index, lists, decode([best.token]), best.logprob, {decode([c.token]): c.logprob for c in more})

    def _add_prompt_logprobs(self, index: int, lists: dict[str, list[Any]]) -> None:
        for position, token in enumerate(self._call.prompts[index // self._call.n]):
            text = decode([token])
            value = None if position == 0 else -1.0 - token % 7 / 10
            self._append(index, lists, text, value, None if value is None else {text: value})

    def _append(self, index: int, lists: dict[str, list[Any]], text: str, value: float | None, top: dict[str, float] | None) -> None:
        lists["text_offset"].append(self._offset[index])
        lists["token_logprobs"].append(value)
        lists["tokens"].append(text)
        lists["top_logprobs"].append(top)
        self._offset[index] += len(text)


def _chat_logprob(candidates: Sequence[Candidate], count: int) -> dict[str, Any]:
    def shown(candidate: Candidate) -> dict[str, Any]:
        text = decode([candidate.token])
        return {"token": text, "logprob": candidate.logprob, "bytes": list(text.encode())}

    return {**shown(candidates[0]), "top_logprobs": [shown(c) for c in candidates[:count]]}


def _split(call: Call, start: int, text: str) -> list[tuple[int, str, str]]:
    """The parts of ``text`` (which begins ``start`` characters into all arguments) by tool call: (index, name, part)."""
    parts, begin = [], 0
    for i, tool in enumerate(call.tools):
        end = begin + len(tool.arguments)
        low, high = max(begin, start), min(end, start + len(text))
        if low < high:
            parts.append((i, tool.name, text[low - start : high - start]))
        begin = end
    return parts

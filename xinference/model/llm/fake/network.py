"""The fake's "network": what a token leaves in the KV cache, and which token follows from a KV cache.

The KV entry of a token depends on the token, its position and the entry before it; the next token depends on *all* entries. So one wrong
byte anywhere in a request's blocks changes its text, and a cached block gives the same text as a computed one only if its bytes are right.
"""

import hashlib
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from xinference.model.llm.fake.vocabulary import FIRST_WORD, MESSAGE_END, VOCAB_SIZE

SLOT_BYTES = 32  # KV bytes of one token
_BEFORE_FIRST = bytes(SLOT_BYTES)
NUM_CANDIDATES = 20  # most alternatives that logprobs can show
_NUM_WORDS = VOCAB_SIZE - FIRST_WORD


@dataclass(frozen=True)
class Candidate:
    token: int
    logprob: float


def entry(previous: bytes | memoryview | None, token: int, position: int) -> bytes:
    """The ``SLOT_BYTES`` that a token leaves in the cache; ``previous`` is the entry of the token before it, None for the first."""
    seed = struct.pack("<QQ", token & 0xFFFFFFFFFFFFFFFF, position)
    return hashlib.blake2b(seed, key=bytes(previous or _BEFORE_FIRST), digest_size=SLOT_BYTES).digest()


def attend(entries: Iterable[bytes | memoryview]) -> bytes:
    """The state after all entries of a request, in order, in pieces of any size."""
    state = hashlib.blake2b(digest_size=SLOT_BYTES)
    for piece in entries:
        state.update(piece)
    return state.digest()


def candidates(state: bytes, count: int, eos_every: int, choice: int = 0) -> list[Candidate]:
    """The ``count`` most likely next tokens, most likely first. ``choice`` tells sampled sequences of one prompt apart."""
    digest = hashlib.blake2b(state, digest_size=64, salt=struct.pack("<Q", choice)).digest()
    numbers = struct.unpack("<32H", digest)
    ends = eos_every > 0 and numbers[31] % eos_every == 0
    first = FIRST_WORD + numbers[0] % _NUM_WORDS
    tokens = [MESSAGE_END] if ends else []
    tokens += [FIRST_WORD + (first - FIRST_WORD + i * 7) % _NUM_WORDS for i in range(count)]
    share = 0.5 + (numbers[1] % 256) / 600
    return [Candidate(token, math.log(share * (1 - share) ** rank)) for rank, token in enumerate(tokens[:count])]


def continuation(prompt: list[int], count: int, eos_every: int, choice: int = 0) -> list[int]:
    """What the fake must answer to a prompt: the reference, without any cache. Ends after the end token."""
    tokens = list(prompt)
    entries: list[bytes] = []
    for _ in range(count):
        for position in range(len(entries), len(tokens)):
            entries.append(entry(entries[-1] if entries else None, tokens[position], position))
        token = candidates(attend(entries), 1, eos_every, choice)[0].token
        tokens.append(token)
        if token == MESSAGE_END:
            break
    return tokens[len(prompt) :]

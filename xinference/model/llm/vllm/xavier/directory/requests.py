"""The ring of per-request accounting records in a segment.

A record is written when a request's accounting is fixed (its first token) and updated until the request ends. The owner writes under
the engine's lock; another process finds records by the request's 128 bits, or reads what changed since it last looked. A record
commits to its words with a check word, so one that is being written is skipped, not misread.

Times are microseconds of CLOCK_MONOTONIC, which all processes of a host share; 0 means "has not happened".
"""

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

SOURCES = ("local", "peer_gpu", "gpu_tier", "cpu_tier", "peer_cpu", "remote", "handed_over", "computed")
STATES = ("running", "first_token", "finished", "aborted", "failed")
TIMES = ("queued_us", "scheduled_us", "load_started_us", "loaded_us", "first_token_us", "finished_us")

REQUEST_ID_BYTES = 16
RECORD_WORDS = 32
_MASK = (1 << 64) - 1
_IMPOSSIBLE = 1 << 63  # updates: more than a writer makes in any number of years
_WORDS = Struct("@32Q")
_ID = Struct("<2Q")

# Word 0 is the check word, then:
UPDATE, ID0, ID1, STATE, PROMPT, OUTPUT, PRE_CLEAR, RECOMPUTED, FIRST_SOURCE = range(1, 10)
FIRST_TIME = FIRST_SOURCE + len(SOURCES)
END = FIRST_TIME + len(TIMES)
ENTRY_FORMAT = f"requests:{END}:{','.join(SOURCES)}:{','.join(STATES)}:{','.join(TIMES)}"


@dataclass(frozen=True)
class RequestEntry:
    """One request's account.

    Args:
        request: the request's 16 bytes, as the API drew them.
        state: one of STATES.
        prompt_tokens: length of the prompt.
        sources: prompt tokens by source, in the order of SOURCES; they sum to prompt_tokens once prefill has completed.
        pre_clear_tokens: of the local ones, those computed before the last clear.
        recomputed_tokens: computed again after a later preemption; outside the sum.
        output_tokens: tokens sampled so far.
        queued_us, scheduled_us, load_started_us, loaded_us, first_token_us, finished_us: when it happened, 0 if it has not.
    """

    request: bytes
    state: str
    prompt_tokens: int
    sources: tuple[int, ...] = (0,) * len(SOURCES)
    pre_clear_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    queued_us: int = 0
    scheduled_us: int = 0
    load_started_us: int = 0
    loaded_us: int = 0
    first_token_us: int = 0
    finished_us: int = 0

    def __post_init__(self) -> None:
        if len(self.request) != REQUEST_ID_BYTES:
            raise ValueError(f"a request id has {REQUEST_ID_BYTES} bytes, not {len(self.request)}")
        if self.state not in STATES:
            raise ValueError(f"unknown request state: {self.state}")
        if len(self.sources) != len(SOURCES):
            raise ValueError(f"token sources are {len(SOURCES)} numbers, not {len(self.sources)}")


class RequestRing:
    """The owner's side. Not thread safe: callers hold the engine's lock.

    Args:
        words: a view of u64 words, RECORD_WORDS for each record.
        cursor: a view of two u64 words: updates made, records written.
    """

    def __init__(self, words: memoryview, cursor: memoryview) -> None:
        self._words = words
        self._cursor = cursor
        self._num_records = len(words) // RECORD_WORDS

    def adopt(self) -> None:
        """Go on where a predecessor ended; anew, if it left numbers that no writer reaches: then every record is in doubt."""
        if max(self._cursor[0], self._cursor[1]) >= _IMPOSSIBLE:
            for base in range(0, len(self._words), RECORD_WORDS):
                self._words[base] = 0
            self._cursor[0] = self._cursor[1] = 0

    def write(self, entry: RequestEntry) -> int:
        """Add a record, over the oldest one when the ring is full. Returns the slot to pass to ``update``."""
        slot = self._cursor[1]
        self._store(slot, entry)
        self._cursor[1] = slot + 1
        return int(slot)

    def update(self, slot: int, entry: RequestEntry) -> int:
        """Replace the record in ``slot``; written anew if the ring has gone round meanwhile. Returns the slot it is in now."""
        if slot + self._num_records < self._cursor[1]:
            return self.write(entry)
        self._store(slot, entry)
        return slot

    def _store(self, slot: int, entry: RequestEntry) -> None:
        update = self._cursor[0] + 1
        values = _pack(entry, update)
        base = slot % self._num_records * RECORD_WORDS
        for offset in range(1, END):
            self._words[base + offset] = values[offset] & _MASK
        self._words[base] = _check(values)
        self._cursor[0] = update


class RequestLog:
    """A reader's side; may run in any process.

    Args:
        words, cursor: read-only views of what RequestRing writes.
    """

    def __init__(self, words: memoryview, cursor: memoryview) -> None:
        self._words = words
        self._cursor = cursor
        self._num_records = len(words) // RECORD_WORDS

    def since(self, update: int) -> tuple[list[RequestEntry], int]:
        """Records changed after ``update``, oldest change first, and the number to pass next time.

        A record that was being written is not lost: its number is above the one returned, or its writer died.
        """
        latest = int(self._cursor[0])
        if latest == update:
            return [], update
        found = [(number, entry) for number, entry in self._read(range(self._num_records)) if update < number <= latest]
        return [entry for _, entry in sorted(found, key=lambda pair: pair[0])], latest

    def find(self, request: bytes) -> list[RequestEntry]:
        """All records of a request (one a leg), oldest change first."""
        id0, id1 = _ID.unpack(request)
        words = self._words
        slots = (s for s in range(self._num_records) if words[s * RECORD_WORDS + ID0] == id0 and words[s * RECORD_WORDS + ID1] == id1)
        found = [(number, entry) for number, entry in self._read(slots) if entry.request == request]
        return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]

    def _read(self, slots: Iterable[int]) -> Iterable[tuple[int, RequestEntry]]:
        for slot in slots:
            values = _WORDS.unpack_from(self._words, slot * RECORD_WORDS * 8)
            if values[0] and values[0] == _check(values) and values[STATE] < len(STATES):
                yield values[UPDATE], _unpack(values)


def _pack(entry: RequestEntry, update: int) -> tuple[int, ...]:
    id0, id1 = _ID.unpack(entry.request)
    return (
        0,
        update,
        id0,
        id1,
        STATES.index(entry.state),
        entry.prompt_tokens,
        entry.output_tokens,
        entry.pre_clear_tokens,
        entry.recomputed_tokens,
        *entry.sources,
        *(getattr(entry, name) for name in TIMES),
    )


def _unpack(values: tuple[int, ...]) -> RequestEntry:
    return RequestEntry(
        request=_ID.pack(values[ID0], values[ID1]),
        state=STATES[values[STATE]],
        prompt_tokens=values[PROMPT],
        sources=values[FIRST_SOURCE:FIRST_TIME],
        pre_clear_tokens=values[PRE_CLEAR],
        recomputed_tokens=values[RECOMPUTED],
        output_tokens=values[OUTPUT],
        **dict(zip(TIMES, values[FIRST_TIME:END], strict=True)),
    )


def _check(values: tuple[int, ...]) -> int:
    """The same kind of check word as a block's record has (layout.record_check); never 0, the word of a record never written."""
    return hash(values[1:END]) & _MASK or 1

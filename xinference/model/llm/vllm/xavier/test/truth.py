"""What must be true of a few replicas that share their blocks, whatever happens: the model against which random schedules are held.

The model knows, for each key, the bytes that a correct engine computes for it (digests of all tokens up to each slot), and nothing of
records, books or locks. So whatever can be read anywhere is compared with it, in the files of the living and of the dead alike.
"""

import os
from collections.abc import Iterable

from xinference.model.llm.vllm.xavier.block.key import BlockKey, block_key
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES
from xinference.model.llm.vllm.xavier.test.mini_blocks import BLOCK, Request, digests_of, oldest_epoch, require
from xinference.model.llm.vllm.xavier.test.truth_replica import Replica

_LOCAL, _COMPUTED = SOURCES.index("local"), SOURCES.index("computed")


class Truth:
    """The bytes of every key, and one look at each file that a replica of the schedule ever had."""

    def __init__(self) -> None:
        self._digests: dict[BlockKey, bytes] = {}
        self._readers: dict[str, SegmentReader] = {}
        self._seen: dict[str, bytes] = {}  # as it was when it was last looked at

    def learn(self, request: Request) -> None:
        """What the request's full blocks must hold."""
        for index in range(len(request.hashes) - 1, -1, -1):
            key = block_key(request.hashes[index], 0, request.adapter)
            if key in self._digests:
                break  # and so is all before it
            slots = range(index * BLOCK, (index + 1) * BLOCK)
            self._digests[key] = b"".join(request.slot(position) for position in slots)

    def check_file(self, path: str) -> None:
        """Whatever validates has the bytes of its key, written in its own epoch or later, and its key in one place only."""
        reader = self._reader(path)
        if reader is None:
            return
        start = reader.geometry.records_offset
        content = bytes(reader._file[start : reader.geometry.slab_offset + reader.geometry.slab_bytes])
        if content == self._seen.get(path):
            return
        self._seen[path] = content
        slab, size = reader.slab_view(), reader.geometry.place_bytes
        seen: set[tuple[BlockKey, int]] = set()
        for place in range(reader.geometry.num_places):
            record = reader._table.record(place)
            if record is None:
                continue
            raw = bytes(slab[place * size : (place + 1) * size])
            require(self._digests.get(record.key) == digests_of(raw), f"place {place} of {path} holds other bytes than its key's")
            require(oldest_epoch(raw) >= record.epoch, f"place {place} of {path} holds bytes of before its epoch {record.epoch}")
            require((record.key, record.epoch) not in seen, f"{record.key} is in two places of {path}")
            seen.add((record.key, record.epoch))

    def forget(self, path: str) -> None:
        """This name may mean another file from now on."""
        self._seen.pop(path, None)
        reader = self._readers.pop(path, None)
        if reader is not None:
            reader.close()

    def _reader(self, path: str) -> SegmentReader | None:
        if path not in self._readers and os.path.exists(path):
            self._readers[path] = SegmentReader.open(path, expected_incarnation=None)
        return self._readers.get(path)

    def close(self) -> None:
        """Let all files go."""
        for path in list(self._readers):
            self.forget(path)


def check_replica(replica: Replica) -> None:
    """Books, budget, chains, and what an idle engine may still hold; at any moment at which its lock is free."""
    replica.check_held()
    state = replica.engine.state
    require(not state.corrupted, "the books were found corrupt")
    found = replica.counter("hook_errors") - replica.errors_before
    require(found <= replica.expected_errors, f"{found} errors in hooks, {replica.expected_errors} were made to happen")
    books = books_of(replica)
    if books == replica.books:
        return
    replica.books = books
    state.tier.check()
    counts = state.tier._book.counts()
    require(counts.free >= 0 and counts.used + counts.reserved <= state.segment.geometry.num_places, "more places than there are")
    require(counts.reserved <= sum(state.open_saves.values()), f"{counts.reserved} reserved, but on their way are {state.open_saves}")
    check_chains(replica)


def books_of(replica: Replica) -> tuple[object, ...]:
    """All that its books consist of: what has not changed need not be checked again."""
    state = replica.engine.state
    segment, table, order = state.segment, state.tier._book._table, state.tier._book._order
    arrays = (table.parent, table.children, table.pins, order._older, order._newer)
    words = bytes(segment._file[segment.geometry.hints_offset : segment.geometry.slab_offset])
    filling = tuple(state.tier._filling.items()), tuple(state.tier._key_by_filling.items())
    return bytes(table.flags), *(array.tobytes() for array in arrays), bytes(order._reused), words, filling, dict(state.open_saves)


def check_chains(replica: Replica) -> None:
    """A stored block's parent is stored, or it begins a fragment."""
    segment = replica.engine.state.segment
    for place in range(segment.geometry.num_places):
        record = segment._table.record(place)
        if record is not None and record.epoch == segment.epoch and record.parent is not None:
            require(segment.place_of(record.parent) is not None, f"place {place} is stored without the block before it")


def check_idle(replica: Replica) -> None:
    """Nothing is under way: nothing is held, and all that went wrong was made to."""
    replica.check()
    require(not replica.requests, f"still there: {replica.requests.keys()}")
    counts = replica.engine.state.tier._book.counts()
    require(counts.reserved == counts.pinned == counts.withdrawn == 0, f"an idle replica holds places: {counts}")
    found = replica.counter("hook_errors") - replica.errors_before
    require(found == replica.expected_errors, f"{found} errors in hooks, {replica.expected_errors} were made to happen")
    segment = replica.engine.state.segment
    file_bytes = os.stat(segment.path).st_blocks * 512
    require(file_bytes + segment.geometry.book_bytes <= replica.config.cpu_cache_bytes, "the budget is exceeded")


def check_accounts(replica: Replica, ended: Iterable[tuple[Request, str]]) -> None:
    """Every request that ended has its record, and the record says where its tokens came from."""
    for request, status in ended:
        entry = replica.account(request.request_id)
        require(entry.state == status, f"{request.request_id} {status}, but its record says {entry.state}")
        require(entry.prompt_tokens == request.num_prompt == sum(entry.sources), f"the record does not add up: {entry}")
        require(min(entry.sources) >= 0, f"a source below nothing: {entry}")
        if request.text:
            external = entry.prompt_tokens - entry.sources[_LOCAL] - entry.sources[_COMPUTED]
            expected = (request.local_tokens, request.external_tokens)
            require((entry.sources[_LOCAL], external) == expected, f"expected {expected} local and loaded tokens: {entry}")
            require(entry.output_tokens == len(request.text), f"{len(request.text)} tokens came out: {entry}")

"""Taking over the records that a dead owner left: what validates is kept, everything else is withdrawn, the index is rebuilt.

Bytes need no checksum: after SIGKILL the pages are as the owner left them, in the order in which it stored them, and a valid check word
says that the bytes were complete. Generations are never reset, so a reader that was copying when the owner died still notices reuse.
"""

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory.layout import record_check
from xinference.model.llm.vllm.xavier.directory.records import OwnedRecordTable

# Records are sorted in runs and merged: one list of a million numbers would take more than the books it is there for.
_MIN_RUN_RECORDS, _MAX_RUNS = 1024, 32


class AdoptedPlace(NamedTuple):
    """A valid block found at start: where it lies, what it is, and the block before it in its chain."""

    place: int
    key: BlockKey
    parent: BlockKey | None


class AdoptedPlaces(Sequence[AdoptedPlace]):
    """The blocks that a segment held when it was opened, oldest publish first, so a parent comes before its children.

    Made on demand from the records (a million objects would be hundreds of megabytes): read it before changing the segment.
    """

    def __init__(self, table: OwnedRecordTable, places: "array[int]") -> None:
        self._table = table
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> AdoptedPlace: ...
    @overload
    def __getitem__(self, index: slice) -> "AdoptedPlaces": ...
    def __getitem__(self, index: int | slice) -> "AdoptedPlace | AdoptedPlaces":
        if isinstance(index, slice):
            return AdoptedPlaces(self._table, self._places[index])
        place = self._places[index]
        record = self._table.record(place)
        if record is None:
            raise LookupError(f"place {place} was withdrawn after it was adopted")
        return AdoptedPlace(place, record.key, record.parent)

    def __iter__(self) -> Iterator[AdoptedPlace]:
        return (self[index] for index in range(len(self)))


class Adoption(NamedTuple):
    """What a take-over found: the places kept, in order of publishing, and the highest publish order seen."""

    places: "array[int]"
    last_order: int


def adopt_records(table: OwnedRecordTable, num_places: int, epoch: int) -> Adoption:
    """Keep the valid records of this epoch, withdraw all others, and rebuild the index.

    Of two places with one key the newer is kept. Some five microseconds a block and a dozen bytes: at start, before anybody waits for a
    step, but within the bytes that are set aside for books.
    """
    table.clear_hints()
    bits = num_places.bit_length()
    places = array("I")
    last_order = 0
    for entry in heapq.merge(*_valid_by_order(table, bits, epoch), reverse=True):
        place = entry & ((1 << bits) - 1)
        key = table.key(place)
        slot = table.free_hint(key.k0, epoch)
        if slot is None or table.find(key, epoch) is not None:
            _withdraw(table, place)
        else:
            table.put_hint(slot, place, key.k0)
            places.append(place)
            last_order = max(last_order, entry >> bits)
    places.reverse()
    return Adoption(places, last_order)


def _valid_by_order(table: OwnedRecordTable, bits: int, epoch: int) -> "list[array[int]]":
    """The valid records as order << bits | place, in runs that are each sorted from newest to oldest; all others are withdrawn."""
    runs: list[array[int]] = []
    run: list[int] = []
    newest = (1 << (64 - bits)) - 1
    run_records = max(_MIN_RUN_RECORDS, (1 << bits) // _MAX_RUNS)
    for place, (k0, k1, generation, check, written, p0, p1, flags) in enumerate(table.all_words()):
        if written == epoch and check == record_check(place, k0, k1, generation, epoch, p0, p1, flags):
            run.append(min(flags >> 1, newest) << bits | place)
            if len(run) == run_records:
                runs.append(array("Q", sorted(run, reverse=True)))
                run.clear()
        elif k0 | k1 | generation | check:
            _withdraw(table, place)
    return [*runs, array("Q", sorted(run, reverse=True))]


def _withdraw(table: OwnedRecordTable, place: int) -> None:
    """Make a record invalid, also one that was invalid only because its generation had lost what the next one gives back."""
    table.withdraw(place)
    if table.record(place) is not None:
        table.withdraw(place)

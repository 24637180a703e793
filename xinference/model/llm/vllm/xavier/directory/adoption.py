"""Taking over the records that a dead owner left: what validates is kept, everything else is withdrawn, the index is rebuilt.

Bytes need no checksum: after SIGKILL the pages are as the owner left them, in the order in which it stored them, and a valid check word
says that the bytes were complete. Generations are never reset, so a reader that was copying when the owner died still notices reuse.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory.records import OwnedRecordTable


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

    Of two places with one key the newer is kept. One pass of about a microsecond a place.
    """
    table.clear_hints()
    newest: list[int] = []  # order << 32 | place: sorted without a key function, 1e6 of them in well under a second
    last_order = 0
    for place in range(num_places):
        record = table.record(place)
        if record is None or record.epoch != epoch:
            if not table.untouched(place):
                table.withdraw(place)
            continue
        last_order = max(last_order, record.order)
        newest.append(record.order << 32 | place)
    newest.sort()
    places = array("I")
    for entry in reversed(newest):
        place = entry & 0xFFFFFFFF
        record = table.record(place)
        slot = None if record is None else table.free_hint(record.key.k0, epoch)
        if record is None or slot is None or table.find(record.key, epoch) is not None:
            table.withdraw(place)
        else:
            table.put_hint(slot, place, record.key.k0)
            places.append(place)
    places.reverse()
    return Adoption(places, last_order)

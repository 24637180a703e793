"""Which content was asked for before, in a flat table of tags that forgets by itself.

A place is worth more to content that is asked for again than to content that came once. The doorkeeper remembers that a key was asked
for, without remembering the key: one 16-bit tag in a table whose slots are chosen by the key. New keys overwrite old ones, which is the
ageing: after as many keys as the table has slots, two thirds of the older ones are forgotten. A wrong "seen" (one in 65,536 askings)
costs a better place in the order, nothing else.
"""

from array import array
from collections.abc import Sequence

# Content is remembered for about as many new blocks as this many slabs hold: longer than its bytes, so that what was evicted before it
# was asked for again is recognised when it is.
DOORKEEPER_TAGS_PER_PLACE = 4

DOORKEEPER_BYTES_PER_PLACE = 2 * DOORKEEPER_TAGS_PER_PLACE


class Doorkeeper:
    """Remembers keys, each two 64-bit words that are already hashes."""

    __slots__ = ("_tags",)

    def __init__(self, num_places: int) -> None:
        """Remember nothing yet. Raises ValueError if there is no place to guard."""
        if num_places < 1:
            raise ValueError(f"a doorkeeper needs at least one place, got {num_places}")
        self._tags = array("H", bytes(DOORKEEPER_BYTES_PER_PLACE * num_places))

    def nbytes(self) -> int:
        """Bytes of the table: DOORKEEPER_BYTES_PER_PLACE for each place."""
        return self._tags.itemsize * len(self._tags)

    def num_seen(self, keys: Sequence[tuple[int, int]]) -> int:
        """Count the leading keys that were noted before. Changes nothing."""
        tags = self._tags
        slots = len(tags)
        for index, (k0, k1) in enumerate(keys):
            if tags[k0 % slots] != (k1 & 0xFFFF or 1):
                return index
        return len(keys)

    def note(self, keys: Sequence[tuple[int, int]]) -> None:
        """Remember keys that a request asked for. Once a request: its second offer of a refused block is not a second asking."""
        tags = self._tags
        slots = len(tags)
        for k0, k1 in keys:
            tags[k0 % slots] = k1 & 0xFFFF or 1  # never 0, the empty slot

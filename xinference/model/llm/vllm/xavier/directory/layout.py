"""The layout of a segment: which word means what, and the arithmetic of the check word.

    region     granule           content
    header     4 KiB             words, see Word; what changes often lies on lines of its own
    counters   4 KiB             one u64 per counter
    requests   256 B a record    a ring of per-request accounting records
    hints      64 B a bucket     eight words (high half of k0) << 32 | (place + 1); 0 = free
    records    64 B a place      k0, k1, generation, check, epoch, parent k0, parent k1, order << 1 | has_parent
    slab       place_bytes each  the blocks' bytes, page aligned

The check word commits to the other seven words of its record and to the place, so a torn or half-written record is recognised, and
bumping the generation alone withdraws it. A hint may be wrong, torn or lost: it can only cause a miss.

Every word that another process reads is stored with one aligned 8-byte store (``memoryview.cast("Q")``), never with
``struct.pack_into``, which zeroes its target first. Loads may use native ``Struct("@8Q")``, which copies word by word.
"""

import platform
from enum import IntEnum
from hashlib import blake2b
from struct import Struct

from xinference.model.llm.vllm.xavier.directory.counters import COUNTERS
from xinference.model.llm.vllm.xavier.directory.requests import ENTRY_FORMAT
from xinference.model.llm.vllm.xavier.errors import PlatformRefused

PAGE_BYTES = 4096
WORD_BYTES = 8
LINE_BYTES = 64
LINE_WORDS = 8
HEADER_BYTES = PAGE_BYTES
COUNTER_BYTES = PAGE_BYTES
RECORD_BYTES = LINE_BYTES
REQUEST_BYTES = 256
MAX_PLACES = (1 << 32) - 2  # a hint holds place + 1 in 32 bits
MASK = (1 << 64) - 1

# Header words that list the incarnations of the peers whose segments the owner has mapped; 0 ends the list.
ATTACHED_FIRST = 64
MAX_ATTACHED = 64

MAGIC = int.from_bytes(b"xavierS1", "little")
LINE = Struct("@8Q")


class Word(IntEnum):
    """Words of the header, by index. Static ones are written before the file gets its name; the others by the owner while it lives."""

    MAGIC = 0
    LAYOUT = 1
    NUM_PLACES = 2
    PLACE_BYTES = 3
    REQUEST_RECORDS = 4
    NUM_BUCKETS = 5
    FILE_BYTES = 6
    BOOK_BYTES = 7
    COUNTERS_OFFSET = 8
    REQUESTS_OFFSET = 9
    HINTS_OFFSET = 10
    RECORDS_OFFSET = 11
    SLAB_OFFSET = 12
    STATIC_CHECK = 13
    PID = 16
    START_TICKS = 17
    INCARNATION = 18
    STATE = 19
    ADOPTIONS = 20
    EPOCH = 24
    EPOCH_CONFIRMED = 25
    USED_PLACES = 32
    USED_BYTES = 33
    HEARTBEAT_US = 40
    REQUEST_UPDATES = 48
    REQUESTS_WRITTEN = 49


class State(IntEnum):
    """What the owner is doing. Records are valid in every state: the check word alone decides."""

    ADOPTING = 1
    OPEN = 2
    CLOSED = 3


def record_check(place: int, k0: int, k1: int, generation: int, epoch: int, parent0: int, parent1: int, flags: int) -> int:
    """The check word of a record that is valid with these words.

    Python's hash of numbers in a tuple: the same in every process of one Python (the seed matters for text alone), and five times as fast
    as eight multiplications, of which every probe of a lookup would pay one set. ``layout_word`` holds a sample of it, so files of a
    Python that hashes otherwise are not read.
    """
    return hash((k0, k1, place, generation, epoch, parent0, parent1, flags)) & MASK


def layout_word() -> int:
    """Identifies this layout, its check words, the counters' names and the request record's format: a file of any other is not read."""
    sample = record_check(1, 1 << 63, 1 << 62, 4, 5, 6, 7, 8)
    text = f"2|{sample:x}|{'|'.join(spec.name for spec in COUNTERS)}|{ENTRY_FORMAT}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def refuse_unordered_machine() -> None:
    """Refuse machines on which a reader may see stores in another order than the owner made them.

    Raises:
        PlatformRefused: this is not x86-64.
    """
    machine = platform.machine()
    if machine.lower() not in ("x86_64", "amd64"):
        raise PlatformRefused(
            f"sharing KV blocks needs x86-64: on {machine} other processes may see stores in another order than they were made, "
            "and a block's bytes could be read before they are complete"
        )

"""What a mover is: the one thing that knows how an engine's KV memory looks.

A *place* in a slab holds one engine block as one packed run of ``block_bytes`` bytes. What lies where inside the run is the mover's own
affair; it is the same for every replica of one namespace, because the namespace covers the engine's layout.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class BlockCopy(NamedTuple):
    """One engine block and one place of a slab; the mover's verb says which is read and which is written."""

    block: int
    place: int


class Mover(Protocol):
    """Copies engine blocks to and from slabs, in whole blocks, several at a time.

    A mover keeps no books. ``save`` and ``load`` return when the bytes are in place; one whose copies run on a device waits for them, and
    is called by the copier thread alone. Its caller makes sure that nobody else writes the target meanwhile, and that the
    source is either held or validated after the copy. Both verbs raise ``ValueError`` before they move anything when a block or a place
    does not exist.
    """

    @property
    def loads_within_step(self) -> bool:
        """Whether ``load`` may be called by the step thread: it waits for no device, so a load can be part of a step."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine, the null block included."""

    def open_slab(self, view: memoryview, place_bytes: int) -> Any:
        """Wrap a slab once, so that no copy pays for it again. A slab opened over a read-only view can only be loaded from.

        Args:
            view: the whole slab; the result keeps it alive.
            place_bytes: bytes from one place to the next, at least ``block_bytes``.
        """

    def mark(self) -> Any:
        """A mark behind everything that the engine's device was told so far. Called by the step thread; waits for nothing."""

    def follow(self, mark: Any) -> None:
        """Copies from now on begin when what lies before ``mark`` is done. Called by the copier thread; waits for nothing itself."""

    def save(self, slab: Any, copies: Sequence[BlockCopy]) -> None:
        """Engine block -> place, for every copy. ``slab`` came from ``open_slab``."""

    def load(self, slab: Any, copies: Sequence[BlockCopy]) -> None:
        """Place -> engine block, for every copy. ``slab`` came from ``open_slab``."""


def refuse_outside(copies: Sequence[BlockCopy], num_blocks: int, num_places: int) -> None:
    """Refuse a batch that names memory which does not exist.

    Raises:
        ValueError: a block is not one of the engine's, or a place not one of the slab's.
    """
    for block, place in copies:
        if not 0 <= block < num_blocks:
            raise ValueError(f"block {block} is not one of {num_blocks}")
        if not 0 <= place < num_places:
            raise ValueError(f"place {place} is not one of {num_places}")


def num_places_of(slab_bytes: int, place_bytes: int, block_bytes: int) -> int:
    """Places in a slab.

    Raises:
        ValueError: a block does not fit into a place.
    """
    if place_bytes < block_bytes:
        raise ValueError(f"a place of {place_bytes} bytes cannot hold a block of {block_bytes}")
    return slab_bytes // place_bytes

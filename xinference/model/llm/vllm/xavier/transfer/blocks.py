"""Who an engine block belongs to, as two numbers per block: a generation and the epoch in which it was handed out."""

from array import array
from collections.abc import Iterable


class EngineBlocks:
    """Generations of the engine's blocks.

    Written by the step thread only, in ``build_connector_meta``: *before* the step is dispatched that may overwrite the block. The copier
    reads a generation again after each copy; a changed one means that the bytes it copied may be of two owners.

    Args:
        num_blocks: blocks of the engine, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self._generations = array("Q", bytes(8 * num_blocks))
        # A block's bytes are as old as its oldest write, which is not before it was handed out.
        self._epochs = array("Q", bytes(8 * num_blocks))

    def __len__(self) -> int:
        return len(self._generations)

    def hand_out(self, block_ids: Iterable[int], epoch: int) -> None:
        """Note that these blocks get a new owner in the step that is about to be dispatched."""
        for block in block_ids:
            self._generations[block] += 1
            self._epochs[block] = epoch

    def generation(self, block: int) -> int:
        """The block's generation now."""
        return self._generations[block]

    def epoch(self, block: int) -> int:
        """The epoch in which the block was last handed out: nothing in it is older."""
        return self._epochs[block]

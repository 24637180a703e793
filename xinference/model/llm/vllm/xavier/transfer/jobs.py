"""What the step thread asks the mover's side to do, and where the outcome is written.

A job is handed over by reference: both halves of the connector live in one process. Its ``pieces`` are never changed afterwards. The
outcome fields are written by whoever carries the job out, before ``done`` becomes true, and read by the step thread only after that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xinference.model.llm.vllm.xavier.block.key import BlockKey

OWN_SLAB = ""
UNPINNED = -1


class SavePiece(NamedTuple):
    """One engine block on its way into a reserved place.

    ``generation`` is that of the engine block when it was named: another one after the copy means that the bytes may be of two owners.
    """

    request_id: str
    block: int
    generation: int
    place: int
    key: BlockKey
    parent: BlockKey | None


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks that are full after the step which carries the job, and the epoch in which they were named."""

    epoch: int
    pieces: Sequence[SavePiece]


class LoadPiece(NamedTuple):
    """One block of a request to be filled.

    ``peer`` says in whose slab the block was found: a peer's uid or ``OWN_SLAB``. Only a ``place`` that is not UNPINNED is certain: it is
    in the own slab and pinned until the load ends. Anything else is found again by the copier, and looked for elsewhere if it is gone.
    """

    block: int
    key: BlockKey
    peer: str
    place: int


@dataclass(slots=True)
class LoadJob:
    """One request's load.

    Args:
        request_id: the engine's id of the request.
        epoch: the epoch in which the hit was found; nothing older may be served.
        pieces: in chain order.
        asynchronous: made by the copier beside the steps, not within one.
        cancelled: set by the step thread when the request ended; the copier then copies nothing more.
        failed_blocks: engine blocks that did not get their bytes.
        moved: where a block came from, if it was not where its piece said.
        started, ended: when the copies were made, in seconds of CLOCK_MONOTONIC.
        done: all of the outcome is written.
    """

    request_id: str
    epoch: int
    pieces: Sequence[LoadPiece]
    asynchronous: bool
    cancelled: bool = False
    failed_blocks: set[int] = field(default_factory=set)
    moved: dict[int, str] = field(default_factory=dict)
    started: float = 0.0
    ended: float = 0.0
    done: bool = False

    def peer_of(self, piece: LoadPiece) -> str:
        """Whose slab the block really came from."""
        return self.moved.get(piece.block, piece.peer) if self.moved else piece.peer

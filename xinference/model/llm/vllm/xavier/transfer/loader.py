"""Loads, as copies: grouped by slab, cut to bounded transfers, validated where the owner may change the bytes meanwhile.

Used by the worker half within a step, for pinned places of the own slab, and by the copier beside the steps, for everything else.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.policy.batching import Batch, Piece, cut_batches
from xinference.model.llm.vllm.xavier.transfer.jobs import OWN_SLAB, UNPINNED, LoadJob, LoadPiece
from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy
from xinference.model.llm.vllm.xavier.transfer.state import TransferState


class Loader:
    """Carries load jobs out, in the thread that calls.

    Args:
        config: batch sizes.
        state: what the threads of the engine share.
        clock: seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, config: XavierConfig, state: TransferState, clock: Callable[[], float]) -> None:
        self._config = config
        self._state = state
        self._clock = clock

    def run(self, jobs: Sequence[LoadJob], mark: Any = None) -> None:
        """One step's loads together. Whatever happens, each of them ends.

        Args:
            mark: the mover's, behind everything that may still write to the loads' blocks; None for loads within a step.
        """
        started = self._clock()
        try:
            if mark is not None:
                self._state.mover.follow(mark)
            self._copy(jobs)
        except Exception as error:
            self._state.report("a load", error)
            for job in jobs:
                job.failed_blocks.update(piece.block for piece in job.pieces)
        ended = self._clock()
        for job in jobs:
            self._state.end_load(job, started, ended)

    def _copy(self, jobs: Sequence[LoadJob]) -> None:
        """From where each block was found; what is not there any more is looked for in all other slabs.

        A peer's chain may have a gap that another replica fills, and a search in halves does not see it.
        """
        pieces = [piece for job in jobs if not job.cancelled for piece in job.pieces]
        missing = self._load((piece.peer, piece) for piece in pieces)
        if not missing:
            return
        job_by_block = {piece.block: job for job in jobs for piece in job.pieces}
        for other in (OWN_SLAB, *(peer.replica_uid for peer in self._state.peers.attached)):
            still_missing = self._load((other, piece) for piece in missing if piece.peer != other)
            still_missing += [piece for piece in missing if piece.peer == other]
            for piece in set(missing).difference(still_missing):
                job_by_block[piece.block].moved[piece.block] = other
            missing = still_missing
        for piece in missing:
            job_by_block[piece.block].failed_blocks.add(piece.block)

    def _load(self, wanted: Iterable[tuple[str, LoadPiece]]) -> list[LoadPiece]:
        """Copy each piece from the slab beside it; the pieces whose slab does not have them."""
        piece_by_block: dict[int, LoadPiece] = {}
        pieces = []
        for slab, piece in wanted:
            pieces.append(Piece(slab, piece.key, piece.block))
            piece_by_block[piece.block] = piece
        config = self._config
        missing: list[LoadPiece] = []
        for batch in cut_batches(pieces, config.batch_max_blocks, config.batch_max_bytes, self._state.mover.block_bytes):
            started = self._clock()
            try:
                load = self._load_own if batch.source == OWN_SLAB else self._load_peers
                failed = load(batch, piece_by_block)
            except Exception as error:
                self._state.report("a load", error)
                failed = {block for read in batch.reads for block in read.blocks}
            self._state.note_batch(batch.num_blocks - len(failed), self._clock() - started)
            missing.extend(piece_by_block[block] for block in failed)
        return missing

    def _load_own(self, batch: Batch, piece_by_block: Mapping[int, LoadPiece]) -> set[int]:
        """Pinned places cannot change meanwhile, so nothing is validated; what is not pinned yet is pinned for the copy."""
        state = self._state
        copies: list[BlockCopy] = []
        pinned: list[int] = []
        failed: set[int] = set()
        with state.lock:
            for _, blocks in batch.reads:
                piece = piece_by_block[blocks[0]]
                found = [piece.place] if piece.place != UNPINNED else state.tier.pin((piece.key,))
                if not found:
                    failed.update(blocks)
                elif piece.place == UNPINNED:
                    pinned.extend(found)
                copies.extend(BlockCopy(block, place) for place in found for block in blocks)
        try:
            state.mover.load(state.slab, copies)
        finally:
            if pinned:
                with state.lock:
                    state.tier.unpin(pinned)
        return failed

    def _load_peers(self, batch: Batch, piece_by_block: Mapping[int, LoadPiece]) -> set[int]:
        """Find, copy, look again: only what is unchanged after the copy counts."""
        state = self._state
        peer = state.peers.get(batch.source)
        failed = {block for read in batch.reads for block in read.blocks}
        if peer is None:
            return failed
        epoch = state.epoch.current
        found = []
        for _, blocks in batch.reads:
            place = peer.reader.find(piece_by_block[blocks[0]].key, epoch)
            if place is not None:
                found.append((blocks, place))
        state.mover.load(peer.slab, [BlockCopy(block, place.place) for blocks, place in found for block in blocks])
        for blocks, place in found:
            if peer.reader.still(place.place, place.generation):
                failed.difference_update(blocks)
        return failed

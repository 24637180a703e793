"""Which blocks of a step are worth saving, and into which places.

A block is a candidate once it is full and its hash is known. Of a chain only what neither the own tier nor a peer keeps is reserved, from
the front: the first refusal ends it for this request, since nothing may be kept beyond a gap. What was refused is looked at again when
another request finds it in the engine's own cache.
"""

from xinference.model.llm.vllm.xavier.config import FILLING_MAX_BLOCKS
from xinference.model.llm.vllm.xavier.connector.engine import Engine
from xinference.model.llm.vllm.xavier.connector.lookup import Lookup
from xinference.model.llm.vllm.xavier.connector.requests import RequestState, Tail
from xinference.model.llm.vllm.xavier.store.tier import ReserveRequest
from xinference.model.llm.vllm.xavier.transfer.jobs import SaveJob, SavePiece

NULL_BLOCK = 0


class SavePlanner:
    """Names the saves of one step.

    Args:
        engine: what both halves share.
        lookup: where stored blocks are found.
    """

    def __init__(self, engine: Engine, lookup: Lookup) -> None:
        self._engine = engine
        self._state = engine.state
        self._lookup = lookup

    def plan(self, requests: list[tuple[RequestState, int]]) -> SaveJob | None:
        """Reserve places for what became full: (request, blocks full after this step) for each request. The caller holds the lock."""
        room = 0 if self._engine.copier.closing else FILLING_MAX_BLOCKS - sum(self._state.open_saves.values())
        pieces: list[SavePiece] = []
        for request, full in requests:
            pieces.extend(self._plan_one(request, full, room - len(pieces)))
        if not pieces:
            return None
        epoch = self._state.epoch.current
        self._state.open_save(epoch, len(pieces))
        return SaveJob(epoch, pieces)

    def _plan_one(self, request: RequestState, full: int, room: int) -> list[SavePiece]:
        pieces: list[SavePiece] = []
        while request.examined < full:
            if request.tail is Tail.DROPPED:
                self._drop(request, full, "drops_parent")
            elif not self._skip_stored(request, full):
                stop = self._end_of_own_epoch(request, full)
                left = room - len(pieces)
                if stop == request.examined:
                    self._drop(request, full, "drops_epoch")
                elif left > 0:
                    pieces.extend(self._reserve(request, min(stop, request.examined + left), full))
                elif self._engine.copier.closing:
                    self._drop(request, full, "drops_closing")
                else:
                    break  # not given up: the queue drains, and the bytes stay where they are while the request runs
        return pieces

    def _skip_stored(self, request: RequestState, full: int) -> bool:
        """Pass over what is kept already. False if the next block is kept nowhere."""
        start = request.examined
        if request.stored_start <= start < request.stored_stop:
            request.examined, request.tail = request.stored_stop, request.stored_tail
            return True
        end = self._state.tier.prefix(request.chain, start, full)
        if end > start:
            request.examined, request.tail = end, Tail.OWN
            return True
        end = self._lookup.peer_end(request.chain, start, full)
        if end > start:
            self._state.count("drops_peer_has", end - start)
            request.examined, request.tail = end, Tail.ELSEWHERE
            return True
        return False

    def _reserve(self, request: RequestState, stop: int, full: int) -> list[SavePiece]:
        chain, blocks = request.chain, self._state.blocks
        start = request.examined
        # A prefix that a peer keeps is not kept again: what follows it begins a chain of its own here.
        parent = chain.parent(start) if request.tail is Tail.OWN else None
        keys = chain.part(start, stop)
        reserved = self._state.tier.reserve(ReserveRequest(parent, keys))
        pieces = []
        for offset, place in enumerate(reserved.places, reserved.first):
            block = request.block_ids[start + offset]
            before = keys[offset - 1] if offset else parent
            pieces.append(SavePiece(request.request_id, block, blocks.generation(block), place, keys[offset], before))
        request.examined, request.tail = start + reserved.first + len(pieces), Tail.OWN
        if reserved.refused is not None:  # the tier has counted it up to ``stop``
            request.examined = stop
            self._drop(request, full, "drops_parent")
        return pieces

    def _end_of_own_epoch(self, request: RequestState, full: int) -> int:
        """Blocks from ``examined`` up to here were written in the present epoch."""
        shared = self._state
        for index in range(request.examined, full):
            block = request.block_ids[index]
            if block == NULL_BLOCK or shared.blocks.epoch(block) != shared.epoch.current:
                return index
        return full

    def _drop(self, request: RequestState, full: int, reason: str) -> None:
        self._state.count(reason, full - request.examined)
        request.examined, request.tail = full, Tail.DROPPED

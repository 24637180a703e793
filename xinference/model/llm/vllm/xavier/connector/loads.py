"""Loads from the question to the outcome: offered, committed, carried out elsewhere, settled. Counted once, when settled."""

from collections.abc import Sequence

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.connector.engine import Engine
from xinference.model.llm.vllm.xavier.connector.metadata import RequestView
from xinference.model.llm.vllm.xavier.connector.offers import Offers
from xinference.model.llm.vllm.xavier.connector.requests import Offer, RequestState, Tail
from xinference.model.llm.vllm.xavier.directory.counters import latency_bucket
from xinference.model.llm.vllm.xavier.policy.leaders import LoadBoard
from xinference.model.llm.vllm.xavier.transfer.jobs import OWN_SLAB, UNPINNED, LoadJob, LoadPiece


class Loads:
    """The loads of one engine, as the step thread sees them.

    Args:
        engine: what both halves share.
        offers: what may be offered.
    """

    def __init__(self, engine: Engine, offers: Offers) -> None:
        self._engine = engine
        self._shared = engine.state
        self._offers = offers
        config = engine.config
        self._board = LoadBoard(config.followers_max, config.leader_patience_factor)
        self._leaders: set[str] = set()
        # The engine acts on an answer before it asks the next question, so this is what it does when an allocation fails.
        self.last_answer_asynchronous = False
        self._new: list[LoadJob] = []
        self._synchronous: list[RequestState] = []
        # First blocks of this schedule's synchronous loads, as (index, key): the engine takes them for its own before they are filled.
        self._unwritten: list[tuple[int, BlockKey]] = []

    def builds_on_unwritten(self, state: RequestState) -> bool:
        """Whether the engine's own hit reaches into blocks that a synchronous load of this very schedule is to fill.

        Would the load fail, only the request that made it knows what to compute again. So others wait until the step is over.
        """
        if not self._unwritten:
            return False
        stop = min(state.asked_local_tokens // self._engine.tokens_per_block, len(state.chain))
        return any(index < stop and state.chain[index] == key for index, key in self._unwritten)

    def answer(self, state: RequestState, view: RequestView, step: int, now: float) -> tuple[int | None, bool]:
        """The engine's question. Only ``state`` remembers it."""
        size = self._engine.tokens_per_block
        start = state.asked_local_tokens // size
        if self._leaders and not state.barred and start < len(state.chain) and self._waits(state, start, now):
            state.offer = None
            return None, False
        offer = state.offer = self._offers.find(state, view, state.asked_local_tokens, step)
        if offer is None:
            return 0, False
        self.last_answer_asynchronous = offer.asynchronous
        return (offer.stop - offer.start) * size, offer.asynchronous

    def _waits(self, state: RequestState, start: int, now: float) -> bool:
        """Whether another request is loading the block that this one misses first, and this one is to wait for it."""
        verdict = self._board.verdict(state.chain[start], state.request_id, now)
        waits = verdict == "wait"
        if waits != state.waiting:
            state.waiting = waits
            with self._shared.lock:
                self._shared.count("followers_waited" if waits else "followers_gave_up")
        return waits

    def commit(self, state: RequestState, block_ids: Sequence[int], num_external_tokens: int, now: float) -> None:
        """Blocks were allocated: pin what is the own slab's and make the job. The lock is held."""
        self._leave_board(state)
        state.stored_start = state.stored_stop = 0
        if state.refusal:
            self._shared.count(state.refusal)
            state.refusal = ""
        offer, state.offer = state.offer, None
        if not num_external_tokens:
            return
        if offer is None or num_external_tokens != (offer.stop - offer.start) * self._engine.tokens_per_block:
            self.fail_all(state, block_ids, num_external_tokens, offer is not None and offer.asynchronous, now)
            return
        pieces = self._pieces(state, offer, block_ids)
        state.stored_start, state.stored_stop = offer.start, offer.stop
        state.stored_tail = Tail.OWN if offer.hits[-1].peer == OWN_SLAB else Tail.ELSEWHERE
        self._open(state, LoadJob(state.request_id, self._shared.epoch.current, pieces, offer.asynchronous), now)
        if offer.asynchronous:
            self._board.lead(state.chain[offer.start], state.request_id, offer.expected_seconds, now)
            self._leaders.add(state.request_id)

    def fail_all(self, state: RequestState, block_ids: Sequence[int], num_external_tokens: int, asynchronous: bool, now: float) -> None:
        """The engine counts on tokens that cannot be loaded: a load in which every block has failed already. The lock is held."""
        size = self._engine.tokens_per_block
        start = state.asked_local_tokens // size
        stop = -(-(state.asked_local_tokens + num_external_tokens) // size)
        job = LoadJob(state.request_id, self._shared.epoch.current, (), asynchronous, failed_blocks=set(block_ids[start:stop]))
        state.stored_start = state.stored_stop = start
        self._open(state, job, now)

    def _open(self, state: RequestState, job: LoadJob, now: float) -> None:
        state.load = self._shared.open_loads[state.request_id] = job
        state.load_started_at = now
        self._new.append(job)
        if not job.asynchronous:
            self._synchronous.append(state)
            if state.stored_start < len(state.chain):
                self._unwritten.append((state.stored_start, state.chain[state.stored_start]))

    def _pieces(self, state: RequestState, offer: Offer, block_ids: Sequence[int]) -> list[LoadPiece]:
        pieces: list[LoadPiece] = []
        for hit in offer.hits:
            keys = state.chain.part(hit.start, hit.stop)
            pinned = self._shared.tier.pin(keys) if hit.peer == OWN_SLAB else []
            places = pinned + [UNPINNED] * (len(keys) - len(pinned))
            blocks = block_ids[hit.start : hit.stop]
            pieces.extend(LoadPiece(block, key, hit.peer, place) for block, key, place in zip(blocks, keys, places, strict=True))
        return pieces

    def take(self) -> tuple[list[LoadJob], list[LoadJob]]:
        """New jobs since the last step: synchronous and asynchronous ones."""
        if not self._new:
            return [], []
        new, self._new = self._new, []
        self._unwritten.clear()
        return [job for job in new if not job.asynchronous], [job for job in new if job.asynchronous]

    def take_synchronous(self) -> list[RequestState]:
        """Requests whose synchronous load has ended."""
        if not self._synchronous:
            return []
        ended = [state for state in self._synchronous if state.load is None or state.load.done]
        self._synchronous = [state for state in self._synchronous if state.load is not None and not state.load.done]
        return ended

    def promoted(self, state: RequestState) -> None:
        """The engine goes on with a request whose asynchronous load was reported: its followers find a local hit from now on."""
        self._leave_board(state)

    def closed(self, request_id: str) -> None:
        """A load was reported as finished: its engine blocks are the engine's again. The lock is held."""
        self._shared.open_loads.pop(request_id, None)

    def settle(self, state: RequestState, now: float) -> int | None:
        """Count what a load brought; the index of the first block that failed, or None if all are good. The lock is held."""
        job = state.load
        if job is None or not job.done:
            return None
        state.load = None
        self._shared.open_loads.pop(state.request_id, None)
        state.loaded_at = job.ended
        failed = job.failed_blocks
        num_good = sum(piece.block not in failed for piece in job.pieces)
        self._shared.count("loads_async" if job.asynchronous else "loads_sync")
        seconds = max(0.0, job.ended - state.load_started_at)
        self._shared.count(latency_bucket("load", seconds))
        self._shared.count("load_wait_ns", int(seconds * 1e9))
        self._shared.count("load_blocks", num_good)
        self._shared.count("load_bytes", num_good * self._shared.mover.block_bytes)
        num_usable = next((index for index, piece in enumerate(job.pieces) if piece.block in failed), len(job.pieces))
        self._note_sources(state, job, num_usable)
        if not failed:
            return None
        state.barred = True
        self._leave_board(state)
        self._shared.count("failed_loads")
        self._shared.count("invalid_blocks", len(failed))
        state.stored_stop = state.stored_start + num_usable
        return state.stored_stop

    def _note_sources(self, state: RequestState, job: LoadJob, num_usable: int) -> None:
        own = [job.peer_of(piece) == OWN_SLAB for piece in job.pieces[:num_usable]]
        size, num_own = self._engine.tokens_per_block, sum(own)
        if not state.completed:
            state.external_tokens = {"cpu_tier": num_own * size, "peer_cpu": (num_usable - num_own) * size}
        if num_own:
            last = state.stored_start + max(index for index, is_own in enumerate(own) if is_own)
            self._engine.copier.submit_touch(state.chain.__getitem__, last)

    def abandon(self, state: RequestState) -> None:
        """The request ended. A load that is under way is cut short, and still reported once. The lock is held."""
        self._leave_board(state)
        if state.load is not None:
            state.load.cancelled = True

    def _leave_board(self, state: RequestState) -> None:
        self._board.done(state.request_id)
        self._leaders.discard(state.request_id)
        state.waiting = False

"""The scheduler half: answers the engine's scheduler, names what the worker half has to copy, and keeps the accounts.

Life of a request, as the engine calls: ``matched_tokens`` (any number of times, changes nothing that others see), ``allocated`` (the
commit: places are pinned, a leader is named), ``build`` (every step: generations, saves), ``output`` (loads that ended), ``finished``.
Everything here runs on the step thread. No torch, no vllm, no clock: ``now`` is CLOCK_MONOTONIC in seconds.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from xinference.model.llm.vllm.xavier.connector.accounting import Accounts
from xinference.model.llm.vllm.xavier.connector.engine import Engine
from xinference.model.llm.vllm.xavier.connector.loads import Loads
from xinference.model.llm.vllm.xavier.connector.lookup import Lookup
from xinference.model.llm.vllm.xavier.connector.metadata import EMPTY, RequestView, Scheduled, StepMeta, StepView
from xinference.model.llm.vllm.xavier.connector.offers import Offers
from xinference.model.llm.vllm.xavier.connector.requests import Phase, RequestState
from xinference.model.llm.vllm.xavier.connector.saving import SavePlanner
from xinference.model.llm.vllm.xavier.transfer.jobs import SaveJob

# A request whose first token was not reported this many steps after its prefill was dispatched is taken to have it.
SILENT_STEPS = 3
# Steps in which nothing happens are counted together: a counter in shared memory and the lock around it cost more than such a step.
COUNT_STEPS = 16


class LocalCache(Protocol):
    """The engine's own prefix cache, as far as a clear concerns it."""

    def idle(self) -> bool:
        """Whether no block is in use, so that it may be reset."""

    def reset(self) -> bool:
        """Forget all cached prefixes. False if the engine refused."""

    def forget(self, blocks: Iterable[int]) -> None:
        """Give these blocks to no other request; whoever uses them keeps them."""


class XavierScheduler:
    """One engine's scheduler half.

    Args:
        engine: what both halves share.
        local_cache: the engine's own prefix cache, once known.
        steps_in_flight: steps that may be dispatched before the outcome of the first is reported: 2 with asynchronous scheduling.

    ``wake_at`` maps a running request to the number of computed tokens at which a step of it matters next; a step below it that brings no
    new blocks may be left out of the ``StepView``.
    """

    def __init__(self, engine: Engine, local_cache: LocalCache | None = None, steps_in_flight: int = 1) -> None:
        self._engine = engine
        self._shared = engine.state
        lookup = Lookup(engine)
        self._loads = Loads(engine, Offers(engine, lookup, failures_undone=steps_in_flight == 1))
        self._saves = SavePlanner(engine, lookup)
        self._accounts = Accounts(engine)
        self._requests: dict[str, RequestState] = {}
        self._completing: list[RequestState] = []
        self._fresh_blocks: list[int] = []
        self._step = self._uncounted_steps = 0
        self._steps_in_flight = steps_in_flight
        self._local_epoch = engine.state.epoch.current
        self._built_at = self._output_at = 0.0
        self._built_tokens = 0
        self.local_cache = local_cache
        self.wake_at: dict[str, int] = {}

    # ---- admission

    def arrived(self, request: RequestView, now: float) -> None:
        """A request entered the engine's queue. Versions that do not say so are served by the first question."""
        self._request(request, now)
        self._reset_local_cache()

    def matched_tokens(self, request: RequestView, num_computed_tokens: int, now: float) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the engine's own hit, and whether beside the steps; (None, False): ask again next step."""
        state = self._request(request, now)
        if state.phase is Phase.RUNNING:
            self._preempt(state, now)
        elif state.phase is Phase.LOADING:
            self._settle_load(state, now)  # asked again, so nothing of it was usable
            state.phase = Phase.WAITING
        state.asked_local_tokens = num_computed_tokens
        if self._loads.builds_on_unwritten(state):
            state.offer = None
            return None, False
        if self._shared.corrupted:
            state.offer = None
            return 0, False
        return self._loads.answer(state, request, self._step, now)

    def allocated(self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int, now: float) -> None:
        """The engine gave the request these blocks (its whole table) and will have ``num_external_tokens`` loaded."""
        state = self._request(request, now)
        if state.phase is Phase.LOADING:
            self._promote(state, now)
            num_known = len(state.block_ids)
        else:
            num_known = state.asked_local_tokens // self._engine.tokens_per_block
            self._admit(state, block_ids, num_external_tokens, now)
        state.block_ids = list(block_ids)
        state.admitted = True
        self._fresh_blocks.extend(block_ids[num_known:])
        self.wake_at[state.request_id] = 0

    def allocation_failed(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int, now: float) -> None:
        """``allocated`` raised. The engine counts on the external tokens all the same, so they are reported as a load that failed."""
        state = self._requests.get(request_id)
        if state is None or not num_external_tokens or state.load is not None:
            return
        with self._shared.lock:
            self._loads.fail_all(state, block_ids, num_external_tokens, self._loads.last_answer_asynchronous, now)
        state.phase = Phase.LOADING if self._loads.last_answer_asynchronous else Phase.RUNNING

    def _promote(self, state: RequestState, now: float) -> None:
        """The engine goes on with a request whose asynchronous load was reported."""
        self._settle_load(state, now)
        self._loads.promoted(state)
        state.phase = Phase.RUNNING

    def _admit(self, state: RequestState, block_ids: Sequence[int], num_external_tokens: int, now: float) -> None:
        local = state.asked_local_tokens
        state.computed_tokens = local + num_external_tokens
        state.examined = 0
        if not state.completed:
            state.local_tokens, state.external_tokens = local, {}
            state.pre_clear_tokens = self._pre_clear_tokens(block_ids, local)
            state.scheduled_at = now
        with self._shared.lock:
            self._loads.commit(state, block_ids, num_external_tokens, now)
        state.phase = Phase.LOADING if state.load is not None and state.load.asynchronous else Phase.RUNNING

    def _pre_clear_tokens(self, block_ids: Sequence[int], local_tokens: int) -> int:
        if self._local_epoch == self._shared.epoch.current:
            return 0
        size, blocks, epoch = self._engine.tokens_per_block, self._shared.blocks, self._shared.epoch.current
        return sum(size for block in block_ids[: local_tokens // size] if blocks.epoch(block) < epoch)

    # ---- every step

    def build(self, step: StepView, now: float) -> StepMeta:
        """What the worker half has to do in this step; ``EMPTY`` when nothing."""
        self._step += 1
        self._uncounted_steps += 1
        self._built_at, self._built_tokens = now, step.num_tokens
        for request_id in step.preempted:
            if (state := self._requests.get(request_id)) is not None and state.phase is Phase.RUNNING:
                self._preempt(state, now)
        shared = self._shared
        candidates: list[tuple[RequestState, int]] = []
        for scheduled in step.scheduled:
            state = self._requests.get(scheduled[0])
            if state is not None:
                full = self._progress(state, scheduled, now)
                if full > state.examined and not state.tainted:
                    candidates.append((state, full))
        if not (candidates or self._fresh_blocks or self._completing or shared.epoch.needs_step or self._uncounted_steps >= COUNT_STEPS):
            return self._meta(None)
        with shared.lock:
            shared.epoch.promised = False
            shared.epoch.apply()
            shared.count("steps", self._uncounted_steps)
            shared.blocks.hand_out(self._fresh_blocks, shared.epoch.current)
            self._fresh_blocks.clear()
            saves = self._saves.plan(candidates) if candidates and not shared.corrupted else None
            self._complete(self._step - SILENT_STEPS, now)
        self._uncounted_steps = 0
        for state, full in candidates:
            self._set_wake(state, full)
        self._reset_local_cache()
        return self._meta(saves)

    def rescue(self) -> StepMeta:
        """``build`` raised. The step is dispatched all the same: its loads are started, and no save under way may count any more."""
        with self._shared.lock:
            self._shared.epoch.promised = False
            self._shared.blocks.hand_out(range(len(self._shared.blocks)), self._shared.epoch.current)
            self._fresh_blocks.clear()
        return self._meta(None)

    def _meta(self, saves: SaveJob | None) -> StepMeta:
        sync_loads, async_loads = self._loads.take()
        return StepMeta(sync_loads, async_loads, saves) if saves or sync_loads or async_loads else EMPTY

    def _progress(self, state: RequestState, scheduled: Scheduled, now: float) -> int:
        """Note what this step computes; blocks whose hash is known and that are full after it."""
        _, after, new_blocks = scheduled
        if state.phase is Phase.LOADING:
            self._promote(state, now)
            state.admitted = True
        if new_blocks:
            more = new_blocks[len(state.block_ids) :] if state.admitted else new_blocks
            state.block_ids.extend(more)
            self._fresh_blocks.extend(more)
        state.admitted = False
        before, state.computed_tokens = state.computed_tokens, after
        if state.high_water_tokens > before:
            state.recomputed_tokens += min(after, state.high_water_tokens) - before
        if not state.completed and not state.completing_step and after >= state.num_prompt_tokens:
            state.completing_step = self._step
            self._completing.append(state)
        full = after // self._engine.tokens_per_block
        known = min(full, len(state.chain), len(state.block_ids))
        self._set_wake(state, full if known == full else known - 1)
        return known

    def _set_wake(self, state: RequestState, full: int) -> None:
        """The next step that matters: any while prefill or recomputing goes on or a save is still due, else the end of the next block."""
        running = (state.completed or state.completing_step) and state.computed_tokens >= state.high_water_tokens
        due = state.examined < min(full, len(state.chain)) and not state.tainted
        self.wake_at[state.request_id] = 0 if not running or due else (full + 1) * self._engine.tokens_per_block

    # ---- outcomes

    def output(self, finished_loads: Iterable[str], invalid_blocks: Iterable[int], now: float) -> None:
        """A step's outcome: asynchronous loads that were reported finished, and engine blocks reported invalid."""
        for request_id in finished_loads:
            with self._shared.lock:
                self._loads.closed(request_id)
            state = self._requests.get(request_id)
            if state is not None and state.phase is Phase.LOADING:
                self._settle_load(state, now)
        for state in self._loads.take_synchronous():
            self._settle_load(state, now)
        if self._completing:
            with self._shared.lock:
                self._complete(self._step - self._steps_in_flight + 1, now)
        self._note_speed(now)

    def _settle_load(self, state: RequestState, now: float) -> None:
        """Take over a load's outcome, once: what it brought, and where it failed."""
        job = state.load
        with self._shared.lock:
            good_stop = self._loads.settle(state, now)
        if job is None or good_stop is None:
            return
        if not job.asynchronous and self.local_cache is not None:
            # The engine took these blocks for its own when it scheduled them. An abort now would leave them free, and found.
            self.local_cache.forget({*job.failed_blocks, *state.block_ids[good_stop:]})
        # The engine goes back to the first bad block; a step that was under way computed on it, so none of its blocks may be kept.
        state.computed_tokens = good_stop * self._engine.tokens_per_block
        state.tainted = state.phase is Phase.RUNNING
        if state.completing_step:
            state.completing_step = 0
            self._completing.remove(state)

    def _complete(self, upto_step: int, now: float) -> None:
        """Fix the accounts of prefills that were dispatched in steps up to this one. The lock is held."""
        while self._completing and self._completing[0].completing_step <= upto_step:
            self._accounts.complete(self._completing.pop(0), now)

    def _note_speed(self, now: float) -> None:
        if self._built_tokens >= 2 * self._engine.tokens_per_block:
            seconds = now - max(self._built_at, self._output_at)
            self._shared.rates.observe_prefill(self._built_tokens, seconds)
        self._output_at, self._built_tokens = now, 0

    # ---- ends

    def finished(self, request_id: str, status: str, now: float, request: RequestView | None = None) -> None:
        """A request ended: ``finished``, ``aborted`` or ``failed``. Its blocks may be handed out again from the next step on.

        Args:
            request: its last state; without it a request that was never asked about leaves no record.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            if request is None:
                return
            state = RequestState.of(request, now)
        self.wake_at.pop(request_id, None)
        output_tokens = max(0, request.num_tokens - state.num_prompt_tokens) if request is not None else 0
        self._settle_load(state, now)  # a synchronous one of the step that is just ending
        with self._shared.lock:
            if state.completing_step:
                self._completing.remove(state)
                if status != "aborted" or output_tokens:
                    self._accounts.complete(state, now)
            self._loads.abandon(state)
            self._accounts.end(state, status, output_tokens, now)

    def _preempt(self, state: RequestState, now: float) -> None:
        """Its blocks are gone; it will be asked about again like a new one."""
        self._settle_load(state, now)
        if state.completing_step:
            self._completing.remove(state)
            with self._shared.lock:
                self._accounts.complete(state, now)
        if state.completed:
            state.high_water_tokens = max(state.high_water_tokens, state.computed_tokens)
        state.phase = Phase.WAITING
        state.block_ids = []
        state.computed_tokens = 0
        state.offer = None
        self.wake_at.pop(state.request_id, None)

    # ---- common

    def _request(self, view: RequestView, now: float) -> RequestState:
        state = self._requests.get(view.request_id)
        if state is None:
            state = self._requests[view.request_id] = RequestState.of(view, now)
        return state

    def _reset_local_cache(self) -> None:
        """After a clear, as soon as no block is in use: what the engine itself has cached is older than the clear."""
        epoch = self._shared.epoch.current
        cache = self.local_cache
        if self._local_epoch != epoch and cache is not None and cache.idle() and cache.reset():
            self._local_epoch = epoch

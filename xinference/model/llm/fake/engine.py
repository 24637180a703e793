"""The fake engine's loop: schedule, compute, report; on the server's event loop, one step at a time."""

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from xinference.model.llm.fake import network
from xinference.model.llm.fake.blocks import BlockPool, hash_root
from xinference.model.llm.fake.config import FakeConfig, Faults
from xinference.model.llm.fake.request import Output, Sequence, Status
from xinference.model.llm.fake.scheduler import Scheduler, Work
from xinference.model.llm.fake.sharing import Sharing
from xinference.model.llm.fake.vocabulary import MESSAGE_END

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.001  # pause between steps that compute nothing, as vLLM's core loop makes


class EngineFailed(Exception):
    """The engine core is dead, or the request failed inside it."""


class FakeEngine:
    """Sequences in, tokens out.

    Args:
        config: sizes, limits, initial faults.
        sharing: makes the connector, given the engine's KV memory.
    """

    def __init__(self, config: FakeConfig, sharing: Callable[[BlockPool], Sharing]) -> None:
        self.config = config
        self.faults = config.faults
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.sharing = sharing(self.pool)
        self.scheduler = Scheduler(config, self.pool, hash_root(config.hash_seed), self.sharing)
        self.sequences: dict[str, Sequence] = {}
        self.finished: Counter[str] = Counter()
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._tokens_at_fault = 0
        self._work = asyncio.Event()

    def set_faults(self, faults: Faults) -> None:
        self.faults = faults
        self._tokens_at_fault = self.num_output_tokens
        if faults.dead:
            for request_id in list(self.sequences):
                self.abort(request_id, "error")
        self._work.set()

    async def generate(self, request: Sequence) -> AsyncGenerator[Output, None]:
        """Run a sequence; closing the iterator early aborts it.

        Raises:
            EngineFailed: the engine is dead, or a fault ended the request.
        """
        if self.faults.dead:
            raise EngineFailed("EngineCore encountered an issue. See stack trace (above) for the root cause.")
        self.sequences[request.request_id] = request
        self.scheduler.add(request, time.monotonic())
        self._work.set()
        try:
            while True:
                output = await request.outputs.get()
                if output.finish_reason == "error":
                    raise EngineFailed("Internal server error")
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.abort(request.request_id)

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """End a sequence; False if it had ended already."""
        request = self.sequences.pop(request_id, None)
        if request is None or request.status is Status.FINISHED:
            return False
        self.scheduler.finish(request, reason, time.monotonic())
        self.finished[reason] += 1
        request.outputs.put_nowait(Output(None, (), reason))
        self._work.set()
        return True

    async def run(self) -> None:
        """Step until cancelled. An error in here is a dead engine, as in vLLM."""
        try:
            while True:
                if self.faults.freeze or self.faults.hang:
                    self._work.clear()
                    await self._work.wait()
                    continue
                computed = await self._step()
                if not self._busy():
                    self._work.clear()
                    await self._idle()
                elif not computed:
                    await asyncio.sleep(IDLE_SECONDS)
        except Exception:
            logger.exception("the fake engine's loop failed")
            os.kill(os.getpid(), signal.SIGKILL)

    def _busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self.scheduler.loading)

    async def _idle(self) -> None:
        """One more step after the last request, in which connectors publish; then sleep until there is work."""
        await self._step()
        if not self._busy():
            await self._work.wait()

    async def _step(self) -> bool:
        works = self.scheduler.schedule(time.monotonic())
        self.num_steps += 1
        self.sharing.before_forward()
        await self._pause(works)
        tokens = self._forward(works)
        loads, invalid = self.sharing.after_forward()
        affected = self.scheduler.invalidate(invalid) if invalid else set()
        for work, state in tokens:
            if work.request.request_id not in affected and work.request.status is Status.RUNNING:
                self.scheduler.computed(work)
                if state is not None:
                    self._take_token(work.request, state)
        self.sharing.output(loads, invalid, time.monotonic())
        self.scheduler.promote(loads)
        return bool(works)

    async def _pause(self, works: list[Work]) -> None:
        prefill = sum(w.stop - w.start for w in works if w.stop < len(w.request.tokens) or w.stop - w.start > 1)
        decode = any(w.stop - w.start == 1 for w in works)
        seconds = (prefill * self.faults.prefill_ms_per_token + (self.faults.decode_ms if decode else 0.0)) / 1000
        await asyncio.sleep(seconds)

    def _forward(self, works: list[Work]) -> list[tuple[Work, bytes | None]]:
        """Write the entries of each work's positions; the state after the last one where a token is due."""
        results: list[tuple[Work, bytes | None]] = []
        for work in works:
            request = work.request
            if request.status is not Status.RUNNING:  # aborted during the pause; its blocks may be someone else's
                continue
            previous = self._slot(request, work.start - 1) if work.start else None
            for position in range(work.start, work.stop):
                slot = self._slot(request, position)
                slot[:] = network.entry(previous, request.tokens[position], position)
                previous = slot
            due = work.stop == len(request.tokens)
            results.append((work, network.attend(self._entries(request, work.stop)) if due else None))
        return results

    def _slot(self, request: Sequence, position: int) -> memoryview:
        block = self.pool.block(request.block_ids[position // self.pool.block_size])
        start = position % self.pool.block_size * network.SLOT_BYTES
        return block[start : start + network.SLOT_BYTES]

    def _entries(self, request: Sequence, count: int) -> list[memoryview]:
        whole, rest = divmod(count, self.pool.block_size)
        pieces = [self.pool.block(block_id) for block_id in request.block_ids[:whole]]
        if rest:
            pieces.append(self.pool.block(request.block_ids[whole])[: rest * network.SLOT_BYTES])
        return pieces

    def _take_token(self, request: Sequence, state: bytes) -> None:
        """Choose the next token, tell the reader, end the sequence where it ends."""
        sampling = request.sampling
        now = time.monotonic()
        if request.num_output_tokens == 0:
            self.num_prompt_tokens += request.num_prompt_tokens
        options = self._options(request, state)
        token = options[0].token
        self.scheduler.append(request, token)
        self.num_output_tokens += 1
        self._maybe_die()
        reason: str | None = None
        stop_token = None
        if self.faults.error_after_tokens and request.num_output_tokens >= self.faults.error_after_tokens:
            reason = "error"
        elif (token == MESSAGE_END and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            reason = "stop"
            stop_token = token if token in sampling.stop_token_ids else None
        elif request.num_output_tokens >= sampling.max_tokens or len(request.tokens) >= self.config.max_model_len:
            reason = "length"
        if reason is not None:
            self.scheduler.finish(request, reason, now)
            self.sequences.pop(request.request_id, None)
            self.finished[reason] += 1
        request.outputs.put_nowait(Output(token, tuple(options), reason, stop_token, request.num_cached or 0))

    def _options(self, request: Sequence, state: bytes) -> list[network.Candidate]:
        sampling = request.sampling
        eos_every = 0 if sampling.ignore_eos or sampling.forced else self.config.eos_every
        options = network.candidates(state, sampling.num_candidates, eos_every, sampling.choice)
        if sampling.forced:
            index = request.num_output_tokens
            forced = sampling.forced[index] if index < len(sampling.forced) else MESSAGE_END
            options[0] = network.Candidate(forced, options[0].logprob)
        return options

    def _maybe_die(self) -> None:
        limit = self.faults.die_after_tokens
        if limit and self.num_output_tokens - self._tokens_at_fault >= limit:
            os.kill(os.getpid(), signal.SIGKILL)

"""The worker half: starts a step's copies and reports what ended. No waiting, no policy."""

import time
from collections import deque
from collections.abc import Sequence

from xinference.model.llm.vllm.xavier.connector.engine import Engine
from xinference.model.llm.vllm.xavier.connector.metadata import EMPTY, StepMeta
from xinference.model.llm.vllm.xavier.transfer.jobs import LoadJob, SaveJob
from xinference.model.llm.vllm.xavier.transfer.loader import Loader

# Such requests that are remembered; the scheduler half names no more saves of them once it has heard of the failure.
TAINTED_MAX = 256


class XavierWorker:
    """One engine's worker half.

    Args:
        engine: what both halves share.

    Called once a step, in this order: ``start_loads``, ``after_forward``, ``take_finished``, ``take_invalid``.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loader = Loader(engine.config, engine.state, engine.clock)
        self._outstanding: dict[str, LoadJob] = {}
        self._failed: list[LoadJob] = []
        self._invalid: set[int] = set()
        # Requests whose synchronous load failed: this step computes on wrong bytes, and so does one that is dispatched already.
        self._tainted: deque[str] = deque(maxlen=TAINTED_MAX)
        self._submitted: StepMeta = EMPTY

    def start_loads(self, meta: StepMeta) -> None:
        """Synchronous loads now, so that the forward pass finds the bytes; asynchronous ones go to the copier."""
        if meta is EMPTY:
            return
        if meta.sync_loads:
            started = time.perf_counter_ns()
            self._loader.run(meta.sync_loads)
            self._engine.state.hook_copy_ns += time.perf_counter_ns() - started
            for job in meta.sync_loads:
                if job.failed_blocks:
                    self._invalid |= job.failed_blocks
                    self._tainted.append(job.request_id)
        if meta.async_loads:
            for job in meta.async_loads:
                self._outstanding[job.request_id] = job
            self._engine.copier.submit_loads(meta.async_loads)

    def fail_loads(self, meta: StepMeta) -> None:
        """Starting the step's loads raised: those that had not ended have failed, and are still reported once."""
        now = self._engine.clock()
        for job in (*meta.sync_loads, *meta.async_loads):
            if not job.done:
                job.failed_blocks.update(piece.block for piece in job.pieces)
                self._engine.state.end_load(job, now, now)
            self._invalid |= job.failed_blocks
        self._failed.extend(meta.async_loads)
        self._outstanding.update({job.request_id: job for job in meta.async_loads})

    @property
    def waits(self) -> bool:
        """Whether an asynchronous load is outstanding."""
        return bool(self._outstanding)

    def after_forward(self, meta: StepMeta) -> None:
        """The step's blocks are written: hand the saves over. A second call with the same metadata does nothing."""
        if meta is EMPTY or meta is self._submitted:
            return
        self._submitted = meta
        if meta.saves is not None:
            saves = self._without_tainted(meta.saves) if self._tainted else meta.saves
            self._engine.copier.submit_saves(saves)

    def take_finished(self) -> set[str]:
        """Requests whose asynchronous load ended, each exactly once. Invalid blocks among theirs are reported with them."""
        if not self._outstanding:
            return set()
        ended, self._failed = [*self._failed, *self._engine.copier.take_finished()], []
        if not self._engine.copier.alive:
            ended.extend(self._abandon(ended))
        finished = set()
        for job in ended:
            if self._outstanding.pop(job.request_id, None) is not None:
                finished.add(job.request_id)
                self._invalid |= job.failed_blocks
        return finished

    def take_invalid(self) -> set[int]:
        """Engine blocks that a load should have filled and did not."""
        if not self._invalid:
            return set()
        invalid, self._invalid = self._invalid, set()
        return invalid

    def _without_tainted(self, job: SaveJob) -> SaveJob:
        """The saves without those of requests that computed on a load which failed; their places are given back."""
        shared = self._engine.state
        bad = [piece for piece in job.pieces if piece.request_id in self._tainted]
        with shared.lock:
            for piece in bad:
                shared.tier.give_back(piece.place)
            shared.open_save(job.epoch, -len(bad))
            shared.count("drops_tainted", len(bad))
        return SaveJob(job.epoch, [piece for piece in job.pieces if piece.request_id not in self._tainted])

    def _abandon(self, ended: Sequence[LoadJob]) -> list[LoadJob]:
        """The copier died: end what it can no longer end, so that no request waits for ever."""
        done = {job.request_id for job in ended}
        lost = [job for request_id, job in self._outstanding.items() if request_id not in done]
        now = self._engine.clock()
        for job in lost:
            job.cancelled = True  # should it be taken up after all: its blocks are somebody else's by then
            job.failed_blocks.update(piece.block for piece in job.pieces)
            self._engine.state.end_load(job, now, now)
        return lost

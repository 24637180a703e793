"""The helper thread of one engine: copies blocks out of and into the engine beside its steps, and looks at the control page.

Loads go before saves: a request waits for a load, nobody for a save. Bytes are copied without the engine's lock; the lock is taken for
settling what was copied, in short turns, because the step thread takes it too. Nothing raises out of here: a failed copy ends as blocks
that were not saved, or as blocks reported invalid.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.directory.counters import latency_bucket
from xinference.model.llm.vllm.xavier.transfer.jobs import LoadJob, SaveJob, SavePiece
from xinference.model.llm.vllm.xavier.transfer.loader import Loader
from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy
from xinference.model.llm.vllm.xavier.transfer.state import TransferState

# Touches that may wait; beyond them the oldest are forgotten, which costs nothing but an older place in the order.
TOUCH_QUEUE = 64

Piece = TypeVar("Piece")

# How long a shutdown waits for one batch of copies, beyond its deadline.
LAST_BATCH_SECONDS = 2.0
# Pieces settled in one turn of the lock: about 0.1 ms.
SETTLE_TURN_PIECES = 16


class Copier:
    """Carries jobs out, in its own thread once started; a test calls ``run_pending`` and ``poll`` instead.

    Args:
        config: batch sizes and the poll interval.
        state: what the threads of the engine share.
        clock: seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, config: XavierConfig, state: TransferState, clock: Callable[[], float]) -> None:
        self._config = config
        self._state = state
        self._clock = clock
        self._loader = Loader(config, state, clock)
        block_bytes = state.mover.block_bytes
        self._batch_blocks = max(1, min(config.batch_max_blocks, config.batch_max_bytes // block_bytes))
        self._wake = threading.Condition()
        self._loads: deque[tuple[Sequence[LoadJob], Any]] = deque()
        self._saves: deque[tuple[SaveJob, Any]] = deque()
        self._finished: deque[LoadJob] = deque()
        self._touches: deque[tuple[Callable[[int], BlockKey], int]] = deque(maxlen=TOUCH_QUEUE)
        self._working = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._polled_at = float("-inf")

    # ---- step thread

    def submit_saves(self, job: SaveJob) -> None:
        """Take over a step's saves, after its forward pass was told to the device."""
        mark = self._state.mover.mark()
        with self._wake:
            self._saves.append((job, mark))
            self._wake.notify()

    def submit_loads(self, jobs: Sequence[LoadJob]) -> None:
        """Take over a step's asynchronous loads. Each comes back exactly once, through ``take_finished``.

        Steps that still run may write to blocks which a finished request left to these loads: copies follow what was told so far.
        """
        mark = self._state.mover.mark()
        with self._wake:
            self._loads.append((jobs, mark))
            self._wake.notify()

    def submit_touch(self, key_at: Callable[[int], BlockKey], last: int) -> None:
        """Block ``last`` of this chain served a request from the own slab: make it and all before it the last to be given up."""
        self._touches.append((key_at, last))

    def take_finished(self) -> list[LoadJob]:
        """Loads that have ended since the last call."""
        finished = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    @property
    def busy(self) -> bool:
        """Whether anything is queued or under way."""
        return bool(self._working or self._loads or self._touches or self._saves)

    @property
    def closing(self) -> bool:
        """Whether nothing new is accepted."""
        return self._closing

    @property
    def alive(self) -> bool:
        """Whether jobs are still carried out: the thread runs, or was never started because a test drives it."""
        return self._thread is None or self._thread.is_alive()

    # ---- life

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="xavier-copier", daemon=True)
        self._thread.start()

    def close(self, deadline_seconds: float) -> bool:
        """Finish what is queued within the deadline, give the rest back, end the thread. A second call does nothing.

        Returns:
            False if the thread is still in the middle of a copy: it writes to the slab, which must not be let go.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is None:
            self.run_pending()
            return True
        self._thread.join(deadline_seconds)
        self._drop_saves()
        self._thread.join(LAST_BATCH_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            if self._clock() - self._polled_at >= self._config.copier_poll_seconds:
                self.poll()
            with self._wake:
                if not (self.busy or self._closing):
                    self._wake.wait(self._config.copier_poll_seconds)
                if self._closing and not self.busy:
                    return
            self.run_one()

    # ---- copier thread

    def run_pending(self) -> None:
        """Carry out all that is queued."""
        while self.busy:
            self.run_one()

    def run_one(self) -> None:
        """Carry out all queued loads and touches, then one job of saves."""
        self._working = True
        try:
            self._run_loads()
            while self._touches:
                self._touch(*self._touches.popleft())
            next_saves = self._next_saves()
            if next_saves is not None:
                job, mark = next_saves
                for batch in _batches(job.pieces, self._batch_blocks):
                    self._run_save_batch(job.epoch, batch, mark)
                    self._run_loads()
        except Exception as error:
            self._state.report("the helper thread", error)
        finally:
            self._working = False

    def poll(self) -> None:
        """Read the control page, attach and detach peers, carry out and confirm a clear, beat. Where one of them fails the others go on."""
        now = self._polled_at = self._clock()
        for what, look in (("the control page", self._read_page), ("the look at peers", self._state.peers.refresh), ("a beat", self._beat)):
            try:
                look(now)
            except Exception as error:
                self._state.report(what, error)

    def _read_page(self, now: float) -> None:
        page = self._state.control.poll()
        if page is not None:
            self._state.peers.want(page.peers)

    def _beat(self, now: float) -> None:
        state = self._state
        with state.lock:
            state.epoch.ask(state.control.state.epoch)
            state.epoch.apply()
            state.epoch.confirm(state.oldest_open_epoch())
            state.segment.set_attached([peer.entry.incarnation for peer in state.peers.attached])
            state.segment.beat()

    def _run_loads(self) -> None:
        while self._loads:
            jobs, mark = self._loads.popleft()
            self._loader.run(jobs, mark)
            self._finished.extend(jobs)

    def _touch(self, key_at: Callable[[int], BlockKey], last: int) -> None:
        """A touch begins at the head of a fragment: the block before it is not kept here."""
        state = self._state
        try:
            with state.lock:
                head = last
                while head > 0 and state.segment.place_of(key_at(head - 1)) is not None:
                    head -= 1
                state.tier.touch([key_at(index) for index in range(head, last + 1)])
        except Exception as error:
            state.report("a touch", error)

    # ---- saves

    def _run_save_batch(self, epoch: int, batch: Sequence[SavePiece], mark: Any) -> None:
        state = self._state
        good = [piece for piece in batch if self._still_good(epoch, piece)]
        started = self._clock()
        failed = False
        try:
            state.mover.follow(mark)
            state.mover.save(state.slab, [BlockCopy(piece.block, piece.place) for piece in good])
        except Exception as error:
            failed = True
            state.report("a save", error)
        seconds = self._clock() - started
        saved = 0
        for turn in _batches(batch, SETTLE_TURN_PIECES):
            with state.lock:
                saved += sum(self._settle_save(piece, failed) for piece in turn)
        with state.lock:
            state.open_save(epoch, -len(batch))
            state.count("save_batches")
            state.count("save_ns", int(seconds * 1e9))
            state.count(latency_bucket("save", seconds))
            state.count("saves_blocks", saved)
            state.count("save_bytes", saved * state.mover.block_bytes)

    def _still_good(self, epoch: int, piece: SavePiece) -> bool:
        state = self._state
        return not state.corrupted and state.epoch.current == epoch and state.blocks.generation(piece.block) == piece.generation

    def _settle_save(self, piece: SavePiece, failed: bool) -> int:
        """Publish one block or give its place back; 1 if it was published. The lock is held."""
        state = self._state
        if failed or state.corrupted:
            reason = "drops_copy_failed"
        elif state.blocks.generation(piece.block) != piece.generation:
            # Bumped before the step that overwrites the block is dispatched: still equal means the copy saw one owner's bytes.
            reason = "drops_source_reused"
        else:
            return int(state.tier.publish(piece.place, piece.key, piece.parent))  # refused if a clear came in between
        state.tier.give_back(piece.place)
        state.count(reason)
        return 0

    def _next_saves(self) -> tuple[SaveJob, Any] | None:
        try:
            return self._saves.popleft()
        except IndexError:
            return None

    def _drop_saves(self) -> None:
        """Give back what there was no time for. The thread may take jobs at the same moment."""
        while (dropped := self._next_saves()) is not None:
            job, _ = dropped
            with self._state.lock:
                for piece in job.pieces:
                    self._state.tier.give_back(piece.place)
                self._state.open_save(job.epoch, -len(job.pieces))
                self._state.count("drops_closing", len(job.pieces))


def _batches(pieces: Sequence[Piece], size: int) -> Iterator[Sequence[Piece]]:
    """``pieces`` in runs of at most ``size``."""
    return (pieces[start : start + size] for start in range(0, len(pieces), size))

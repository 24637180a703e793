"""A replica that can be stopped wherever one of its threads might lose its turn, and killed there, or between two stores to its segment.

Everything runs in one thread, so a schedule is the same each time. The places where a thread may be overtaken are: before it takes the
engine's lock, in the middle of a copy (inside a block), before the copier takes its next job, and between the parts of a step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from xinference.model.llm.vllm.xavier.connector.requests import Phase
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.test.mini_blocks import BLOCK_BYTES, Request, WrongBytes, oldest_epoch
from xinference.model.llm.vllm.xavier.test.mini_engine import MiniEngine
from xinference.model.llm.vllm.xavier.test.truth_coverage import OUTCOMES
from xinference.model.llm.vllm.xavier.transfer.jobs import LoadJob, SaveJob
from xinference.model.llm.vllm.xavier.transfer.state import TransferState


class Killed(BaseException):
    """The process is gone: what was going on in it does not go on."""


class PausingLock:
    """The engine's lock; whoever is about to take it may be overtaken first."""

    def __init__(self, lock: Any, pause: Callable[[], None]) -> None:
        self._lock = lock
        self._pause = pause

    def __enter__(self) -> None:
        self._pause()
        if not self._lock.acquire(blocking=False):
            raise AssertionError("the lock is taken twice: the engine would hang")

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class DyingWords:
    """A region of the segment of which each store may be the process's last."""

    def __init__(self, words: Any, before_store: Callable[[], None]) -> None:
        self._words = words
        self._before_store = before_store

    def __getitem__(self, index: Any) -> Any:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._before_store()
        self._words[index] = value

    def release(self) -> None:
        """As a view."""
        self._words.release()


class LastStores:
    """Ends a process after so many more stores.

    Args:
        num_stores: how many it may still make.
        kill: carries it out.
    """

    def __init__(self, num_stores: int, kill: Callable[[SegmentWriter], None]) -> None:
        self._left = num_stores
        self._kill = kill
        self.disarmed = False

    def watch(self, segment: SegmentWriter) -> None:
        """Count the stores to records, index, header and counters."""

        def before_store() -> None:
            if self.disarmed:
                return
            if not self._left:
                self._kill(segment)
                raise Killed
            self._left -= 1

        table = segment._table
        table._records = DyingWords(table._records, before_store)  # type: ignore[assignment]
        table._hints = DyingWords(table._hints, before_store)  # type: ignore[assignment]
        segment._header = DyingWords(segment._header, before_store)  # type: ignore[assignment]
        segment.counters._words = DyingWords(segment.counters._words, before_store)  # type: ignore[assignment]


@contextmanager
def dying_while_it_opens(last: LastStores | None) -> Iterator[None]:
    """Count the stores of a take-over already."""
    real = SegmentWriter._take

    def take(segment: SegmentWriter, *arguments: Any, **named: Any) -> None:
        if last is not None:
            last.watch(segment)
        real(segment, *arguments, **named)

    SegmentWriter._take = take  # type: ignore[method-assign]
    try:
        yield
    finally:
        SegmentWriter._take = real  # type: ignore[method-assign]


def let_go(segment: SegmentWriter) -> None:
    """What the kernel does when a process is killed: nothing can be stored any more, and the lock falls."""
    segment._table.release()
    for view in segment._views:
        view.release()
    segment._header.release()
    segment._lock.release()


class WatchedState(TransferState):
    """Looks at a load at the moment of its end."""

    __slots__ = ()

    def end_load(self, job: LoadJob, started: float, ended: float) -> None:
        """No block that counts as loaded was written before the present epoch."""
        super().end_load(job, started, ended)
        of_before_a_clear = job.epoch != self.epoch.current
        if not job.asynchronous and job.failed_blocks and not self.mover.faulty and not of_before_a_clear:
            raise WrongBytes(f"a load of {job.request_id} within a step failed although no copy did")
        memory = self.mover._memory
        for piece in () if job.cancelled else job.pieces:
            raw = bytes(memory[piece.block * BLOCK_BYTES : (piece.block + 1) * BLOCK_BYTES])
            if piece.block not in job.failed_blocks and oldest_epoch(raw) < self.epoch.current:
                raise WrongBytes(f"{job.request_id} was given a block of before a clear")


class Replica(MiniEngine):
    """One replica of a schedule.

    Args:
        place: its directory, uid and clock, as for MiniEngine.
        paused: called wherever one of its threads may be overtaken.
        noted: called with what happens to it, and the states in which it does.
        learn: called with each request whose full blocks have become more.
        settings: as for MiniEngine.
    """

    def __init__(
        self,
        place: tuple[Any, str, Any],
        paused: Callable[["Replica"], None],
        noted: Callable[["Replica", str, set[str]], None],
        learn: Callable[[Request], None],
        **settings: Any,
    ) -> None:
        super().__init__(*place, **settings)
        self.dead = self.frozen = self.step_works = self.copier_works = self.saving = self.loading = False
        self.thread = self.verb = ""  # which one has the turn, and what it copies
        self.ticks = self.expected_errors = 0
        self.errors_before = self.counter("hook_errors")  # of predecessors in the same file
        self.books: object = None  # as they were when they were last checked
        self.ended: list[tuple[Request, str]] = []
        self.failing: set[str] = set()
        self.copying = False
        self._paused, self._noted, self._learn = paused, noted, learn
        self.pause = self._overtaken
        self.mover.during = self._in_the_middle_of_a_copy
        state, copier = self.engine.state, self.engine.copier
        state.lock = PausingLock(state.lock, self._overtaken)  # type: ignore[assignment]
        self._watch_counters()
        self._watch_copies()
        next_saves = copier._next_saves

        def next_after_a_pause() -> SaveJob | None:
            self._overtaken()
            return next_saves()

        copier._next_saves = next_after_a_pause  # type: ignore[method-assign]
        state.__class__ = WatchedState

    # ---- what threads do

    def act(self, action: Callable[[], None], thread: str) -> bool:
        """Let one thread go on. False if it is in the middle of something, or the process is gone."""
        busy = self.step_works if thread == "step" else self.copier_works or self.frozen
        if self.dead or busy:
            return False
        flag = "step_works" if thread == "step" else "copier_works"
        before, self.thread = self.thread, thread
        setattr(self, flag, True)
        try:
            action()
        except BaseException:
            if not self.dead:  # what a dying process still tries is seen by nobody
                raise
        finally:
            setattr(self, flag, False)
            self.thread = before
        return True

    def step(self) -> None:
        """One step."""
        self.mover.faulty = False
        super().step()

    def kill(self, segment: SegmentWriter | None = None) -> None:
        """SIGKILL."""
        self.dead = True
        slab = self.engine.state.slab
        let_go(segment or self.engine.state.segment)
        slab.view.release()

    def name_blocks(self, request: Request) -> None:
        """The model is told what they must hold."""
        super().name_blocks(request)
        self._learn(request)

    def _end(self, request: Request, status: str) -> None:
        super()._end(request, status)
        self.ended.append((request, status))

    def _preempt(self, request: Request) -> None:
        self._noted(self, "preempt", self.states_around(request))
        super()._preempt(request)

    def _overtaken(self) -> None:
        self._paused(self)
        if self.dead:
            raise Killed

    def _in_the_middle_of_a_copy(self) -> None:
        kind = self.verb
        if kind in self.failing:
            self.failing.discard(kind)
            self.mover.faulty = True
            self.expected_errors += 1
            self._noted(self, f"{kind}_fails", self.states())
            raise OSError("the copy failed")
        self._overtaken()

    # ---- what is going on

    def request_state(self, request: Request) -> str:
        """Where a request stands, in the words of the coverage table."""
        if request.status == "running":
            return "decode" if request.text else "prefill"
        state = self.half._requests.get(request.request_id)
        if request.status == "ended":
            return "ending"
        if request.status == "loading":
            if state is None or state.load is None or state.load.done:
                return "load_ended"
            return "load_copying" if self.loading else "load_queued"
        if state is not None and state.waiting and state.phase is Phase.WAITING:
            return "following"
        return "preempted" if request.num_preempted else "waiting"

    def states_around(self, request: Request) -> set[str]:
        """Where one request stands, and what else goes on here beside requests."""
        return {self.request_state(request), *(self.states() & {"save_queued", "save_copying", "clear_pending", "frozen"})}

    def states(self) -> set[str]:
        """Everything that is going on here."""
        found = {self.request_state(request) for request in self.requests.values()} or {"idle"}
        copier, state = self.engine.copier, self.engine.state
        if self.saving:
            found.add("save_copying")
        if copier._saves:
            found.add("save_queued")
        if state.epoch.current != state.epoch.wanted or state.epoch.confirmed != state.epoch.current:
            found.add("clear_pending")
        if self.frozen:
            found.add("frozen")
        return found

    # ---- wrappers

    def _watch_counters(self) -> None:
        counters = self.engine.state.segment.counters
        add = counters.add

        def add_and_note(name: str, amount: int = 1) -> None:
            add(name, amount)
            if amount and name in OUTCOMES:
                self._noted(self, OUTCOMES[name], self.states())

        counters.add = add_and_note  # type: ignore[method-assign]

    def _watch_copies(self) -> None:
        def watch(verb: str, flag: str) -> None:
            real = getattr(self.mover, verb)

            def copy(slab: Any, copies: Sequence[Any]) -> None:
                if not copies:
                    return
                before = self.verb, self.saving, self.loading
                self.verb = verb
                self.saving |= flag == "saving"
                self.loading |= flag == "loading" and self.thread == "copier"
                try:
                    real(slab, copies)
                finally:
                    self.verb, self.saving, self.loading = before

            setattr(self.mover, verb, copy)

        watch("save", "saving")
        watch("load", "loading")

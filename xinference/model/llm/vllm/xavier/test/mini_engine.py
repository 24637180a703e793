"""An engine in small that drives both halves of a connector in the order in which vLLM does, and notices every wrong byte.

A block's memory holds one slot a token; computing a token writes a digest of all tokens up to it, and first compares every slot before it
with what must be there: so a block that is loaded wrongly, too early, from another chain, or not at all fails the test that used it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.connector.engine import Engine
from xinference.model.llm.vllm.xavier.connector.metadata import RequestView, Scheduled, StepMeta, StepView
from xinference.model.llm.vllm.xavier.connector.requests import RequestState
from xinference.model.llm.vllm.xavier.connector.scheduler import XavierScheduler
from xinference.model.llm.vllm.xavier.connector.worker import XavierWorker
from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.geometry import segment_geometry, total_bytes
from xinference.model.llm.vllm.xavier.directory.names import control_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES, RequestEntry
from xinference.model.llm.vllm.xavier.test.mini_blocks import BLOCK, BLOCK_BYTES, GatedMover, MiniBlocks, Request, require

NAMESPACE = "0123456789abcdef"


class Clock:
    """Moved by hand; starts at a large odd number, so that a comparison with a real clock fails at once."""

    def __init__(self) -> None:
        self.now = 1_000_003.0

    def __call__(self) -> float:
        return self.now


Work = list[tuple[Request, int, int, list[int] | None]]  # request, first token, end, new blocks


class MiniEngine(MiniBlocks):
    """One replica.

    Args:
        directory: stands for /dev/shm; replicas that share it are peers.
        uid: the replica.
        clock: CLOCK_MONOTONIC, by hand.
        num_blocks: engine blocks, the null block included.
        cache_blocks: places of the CPU tier.
        budget: tokens a step computes.
        page: its control page, made here if there is none.
    """

    def __init__(
        self,
        directory: Path,
        uid: str,
        clock: Clock,
        *,
        num_blocks: int = 40,
        cache_blocks: int = 64,
        budget: int = 32,
        incarnation: int = 1,
        epoch: int = 1,
        page: ControlPageWriter | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(num_blocks)
        self.clock, self.budget = clock, budget
        records = settings.setdefault("request_ring_records", 512)
        budget_bytes = total_bytes(segment_geometry(cache_blocks, BLOCK_BYTES, records))
        self.config = XavierConfig("w", uid, incarnation, str(directory), budget_bytes, "model", **settings)
        self.entry = PeerEntry("w", uid, incarnation)
        self.page = page or ControlPageWriter.create(control_path(str(directory), "w", uid), ControlState(epoch=epoch))
        self.mover = GatedMover(self.memory, BLOCK_BYTES)
        self.engine = Engine.open(self.config, NAMESPACE, self.mover, BLOCK, clock)
        self.half = XavierScheduler(self.engine, self)
        self.worker = XavierWorker(self.engine)
        self.copying = True
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preempted: list[str] = []
        self.received: set[str] = set()
        self.reported: list[str] = []
        self.stepping = False
        self.pause: Callable[[], None] = lambda: None  # between two parts of a step

    # ---- what a test does

    def add(self, request_id: str, tokens: Sequence[int], max_tokens: int = 1, **kinds: object) -> Request:
        """A request arrives."""
        request = Request(request_id, list(tokens), max_tokens, num_prompt=len(tokens), **kinds)  # type: ignore[arg-type]
        self.name_blocks(request)
        self.requests[request_id] = request
        self.waiting.append(request)
        self.half.arrived(self._view(request), self.clock())
        return request

    def run(self, max_steps: int = 200) -> None:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            if not self.requests:
                self.step()  # the empty step after the last end
                return
            self.step()
        raise AssertionError(f"still there after {max_steps} steps: {[(r.request_id, r.status) for r in self.requests.values()]}")

    def ask(self, request_id: str, tokens: Sequence[int], max_tokens: int = 1, **kinds: object) -> Request:
        """A request from arrival to end."""
        request = self.add(request_id, tokens, max_tokens, **kinds)
        self.run()
        return request

    def abort(self, request_id: str) -> None:
        """The client left."""
        self._end(self.requests[request_id], "aborted")

    def know(self, *others: "MiniEngine", epoch: int = 1) -> None:
        """The control page names these peers, and is read."""
        self.page.write(ControlState(epoch=epoch, peers=tuple(other.entry for other in others)))
        self.poll()

    def poll(self) -> None:
        """The copier thread's look at the control page."""
        self.clock.now += 1.0
        self.engine.copier.poll()

    def copy(self) -> None:
        """The copier thread gets its turn."""
        self.engine.copier.run_pending()

    def counter(self, name: str) -> int:
        """One counter of the segment."""
        return self.engine.state.segment.counters.value(name)

    def sources(self, request_id: str) -> dict[str, int]:
        """Where the tokens of a request came from, without zeros."""
        entry = self.account(request_id)
        return {source: tokens for source, tokens in zip(SOURCES, entry.sources, strict=True) if tokens}

    def account(self, request_id: str) -> RequestEntry:
        """The record of a request in the segment's ring, as another process reads it."""
        reader = SegmentReader.open(self.engine.state.segment.path, expected_incarnation=None)
        identity = RequestState.of(RequestView(request_id, 1, 1, []), 0.0).identity
        (entry,) = reader.find_request(identity)
        return entry

    def records(self) -> list[RequestEntry]:
        """All records of the ring."""
        return SegmentReader.open(self.engine.state.segment.path, expected_incarnation=None).requests_since(0)[0]

    def header(self) -> dict[str, int]:
        """The segment's header."""
        return SegmentReader.open(self.engine.state.segment.path, expected_incarnation=None).header()

    def check(self) -> None:
        """All books balance, and an idle engine holds nothing."""
        self.engine.state.tier.check()
        self.check_held()

    def check_held(self) -> None:
        """An idle engine holds nothing."""
        if not self.requests and not self.engine.copier.busy:
            require(not self.engine.state.open_loads, f"an idle engine loads {self.engine.state.open_loads}")
            require(not self.engine.state.open_saves, f"an idle engine saves {self.engine.state.open_saves}")
            require(self.engine.state.tier._book.counts().pinned == 0, "an idle engine pins places")
            require(self.idle(), "an idle engine holds blocks")
            require(not self.half.wake_at, f"an idle engine waits for {self.half.wake_at}")

    # ---- one step, in vLLM's order

    def step(self) -> None:
        """Schedule, build, load, compute, save, report."""
        self.clock.now += 0.01
        self.stepping = True
        work = self._schedule()
        self.pause()
        scheduled = [Scheduled(request.request_id, stop, new) for request, _, stop, new in work]
        preempted, self.preempted = self.preempted, []
        meta = self.half.build(StepView(scheduled, preempted, (), sum(stop - start for _, start, stop, _ in work)), self.clock())
        self._forward(work, meta)
        self.stepping = False
        if self.copying:
            self.copy()
        self.pause()
        finished, invalid = self.worker.take_finished(), self.worker.take_invalid()
        self._update(work, finished, invalid)

    def _forward(self, work: Work, meta: StepMeta) -> None:
        epoch = self.engine.state.epoch.current
        self.pause()
        self.worker.start_loads(meta)
        failed_blocks = {block for job in meta.sync_loads for block in job.failed_blocks}
        self.pause()
        for request, start, stop, _ in work:
            if not failed_blocks & set(request.blocks):
                self.compute(request, start, stop, epoch)
        self.pause()
        self.worker.after_forward(meta)

    def _schedule(self) -> Work:
        work: Work = []
        budget = self.budget
        for request in list(self.running):
            stop = min(len(request.tokens), request.computed + budget)
            if request not in self.running or stop == request.computed:
                continue
            new = self.grow(request, stop)
            while new is None:
                victim = self.running[-1]
                self._preempt(victim)
                work = [entry for entry in work if entry[0] is not victim]
                if victim is request:
                    break
                new = self.grow(request, stop)
            if new is None:
                continue
            work.append((request, request.computed, stop, new or None))
            budget -= stop - request.computed
        if not self.preempted:
            self._admit(work, budget)
        return work

    def _admit(self, work: Work, budget: int) -> None:
        for request in sorted(self.waiting, key=lambda waiting: not waiting.blocks):  # who holds blocks goes first, as in vLLM
            if budget <= 0:
                return
            if request.status == "loading":
                if request.request_id not in self.received:
                    continue
                self.received.discard(request.request_id)
                self._promote(request)
            if request.computed == 0:
                outcome = self._look_up(request, budget)
                if outcome == "full":
                    return
                if outcome == "skip":
                    continue
            else:
                stop = min(len(request.tokens), request.computed + budget)
                if self.grow(request, stop) is None:
                    return
                self.half.allocated(self._view(request), request.blocks, 0, self.clock())
            stop = min(len(request.tokens), request.computed + budget)
            require(stop > request.computed, "the engine asserts that something is left to compute")
            request.status = "running"
            self.waiting.remove(request)
            self.running.append(request)
            work.append((request, request.computed, stop, None))
            budget -= stop - request.computed

    def _look_up(self, request: Request, budget: int) -> str:
        local = self.cached_prefix(request)
        num_local = len(local) * BLOCK
        external, asynchronous = self.half.matched_tokens(self._view(request), num_local, self.clock())
        if external is None:
            return "skip"
        require(external > 0 or not asynchronous, "nothing is loaded beside the steps")
        require(num_local + external <= max(len(request.tokens) - 1, num_local), "the last token is to be computed")
        require(external == 0 or num_local + external <= request.num_prompt, "only prompts are loaded")
        require(external == 0 or not request.prompt_logprobs, "a request that skips reading is offered nothing")
        require(external == 0 or not request.barred, "after one failed load nothing is offered again")
        computed = num_local + external
        stop = computed if asynchronous else min(len(request.tokens), computed + budget)
        needed = -(-stop // BLOCK) - len(local)
        if needed > len(self.free) - sum(block in self.free for block in local):
            return "full"
        for block in local:
            self.use(block)
        request.blocks = local + [self.take() for _ in range(needed)]
        request.computed = computed
        request.loaded = range(num_local // BLOCK, computed // BLOCK)
        if not request.text:
            request.local_tokens, request.external_tokens = num_local, external
        self.half.allocated(self._view(request), request.blocks, external, self.clock())
        if asynchronous:
            request.status = "loading"
            return "skip"
        self.cache(request, stop)
        return "ready"

    def _promote(self, request: Request) -> None:
        request.status = "waiting"
        if request.load_failed and request.computed == 0:
            self.release(request)
        else:
            self.cache(request, request.computed)
        request.load_failed = False

    def _update(self, work: Work, finished: set[str], invalid: set[int]) -> None:
        affected = set()
        for request in [*self.running, *(r for r in self.waiting if r.status == "loading")]:
            bad = [index for index, block in enumerate(request.blocks) if block in invalid]
            if bad and bad[0] * BLOCK < request.computed:
                request.computed, request.load_failed = bad[0] * BLOCK, True
                self._note_failed_load(request, bad[0])
                affected.add(request.request_id)
        for request, _, stop, _ in work:
            if request.request_id in affected or request.request_id not in self.requests or request.status != "running":
                continue
            request.computed = stop
            self.cache(request, stop)
            if stop == len(request.tokens):
                token = request.slot(stop - 1)[0]
                request.text.append(token)
                request.tokens.append(token)
                self.name_blocks(request)
                if len(request.text) == request.max_tokens:
                    self._end(request, "finished")
        self.half.output(finished, invalid, self.clock())
        for request_id in finished:
            again = request_id in self.reported and self.requests[request_id].status != "loading"
            require(not again, f"the load of {request_id} is reported twice")
            self.reported.append(request_id)
            request = self.requests[request_id]  # an unknown id kills the engine
            if request.status == "loading":
                self.received.add(request_id)
            else:
                require(request.status == "ended", f"a load of {request_id} is reported, which is {request.status}")
                self._forget(request)

    def _note_failed_load(self, request: Request, first_bad: int) -> None:
        """Whoever shares a bad block computes again; barred is only the request that loaded it."""
        request.barred |= first_bad in request.loaded
        if not request.text:
            request.external_tokens = min(request.external_tokens, max(0, request.computed - request.local_tokens))

    def _end(self, request: Request, status: str) -> None:
        loading = request.status == "loading" and request.request_id not in self.received
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        request.status = "ended"
        self.received.discard(request.request_id)
        self.half.finished(request.request_id, status, self.clock(), self._view(request))
        if not loading:
            self._forget(request)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.release(request)
        request.computed, request.status = 0, "waiting"
        request.num_preempted += 1
        self.waiting.insert(0, request)
        self.preempted.append(request.request_id)

    def _forget(self, request: Request) -> None:
        self.release(request)
        del self.requests[request.request_id]

    def name_blocks(self, request: Request) -> None:
        """Hash the blocks that are full by now."""
        request.hash_blocks()

    def _view(self, request: Request) -> RequestView:
        return RequestView(
            request.request_id, len(request.tokens), request.num_prompt, request.hashes, None, request.adapter, request.prompt_logprobs
        )

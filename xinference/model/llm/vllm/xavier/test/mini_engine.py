"""An engine in small that drives both halves of a connector in the order in which vLLM does, and notices every wrong byte.

A block's memory holds one slot a token; computing a token writes a digest of all tokens up to it, and first compares every slot before it
with what must be there: so a block that is loaded wrongly, too early, from another chain, or not at all fails the test that used it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.connector.engine import Engine
from xinference.model.llm.vllm.xavier.connector.metadata import RequestView, Scheduled, StepView
from xinference.model.llm.vllm.xavier.connector.requests import RequestState
from xinference.model.llm.vllm.xavier.connector.scheduler import XavierScheduler
from xinference.model.llm.vllm.xavier.connector.worker import XavierWorker
from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.geometry import segment_geometry, total_bytes
from xinference.model.llm.vllm.xavier.directory.names import control_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES, RequestEntry
from xinference.model.llm.vllm.xavier.transfer.bytes import BytesMover, BytesSlab
from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy

BLOCK = 4  # tokens
SLOT_BYTES = 16
NAMESPACE = "0123456789abcdef"


class Clock:
    """Moved by hand; starts at a large odd number, so that a comparison with a real clock fails at once."""

    def __init__(self) -> None:
        self.now = 1_000_003.0

    def __call__(self) -> float:
        return self.now


class WrongBytes(BaseException):
    """An engine was about to compute on bytes that are not its request's. No Exception: nothing may catch it."""


class GatedMover(BytesMover):
    """A mover that stops in the middle of a copy and lets a test do whatever may happen meanwhile."""

    def __init__(self, memory: bytearray, block_bytes: int) -> None:
        super().__init__(memory, block_bytes)
        self.during: Callable[[], None] = lambda: None

    def save(self, slab: BytesSlab, copies: Sequence[BlockCopy]) -> None:
        """The first half of the batch, a pause, the second half."""
        half = len(copies) // 2
        super().save(slab, copies[:half])
        self.during()
        super().save(slab, copies[half:])

    def load(self, slab: BytesSlab, copies: Sequence[BlockCopy]) -> None:
        """The first half of the batch, a pause, the second half."""
        half = len(copies) // 2
        super().load(slab, copies[:half])
        self.during()
        super().load(slab, copies[half:])


@dataclass
class Request:
    """One request inside the engine."""

    request_id: str
    tokens: list[int]
    max_tokens: int
    salt: bytes = b""
    adapter: bytes = b""
    prompt_logprobs: bool = False
    num_prompt: int = 0
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    status: str = "waiting"
    load_failed: bool = False
    text: list[int] = field(default_factory=list)

    def slot(self, position: int) -> bytes:
        """What the KV of this position must be: all tokens up to it, and what else tells chains apart."""
        data = self.salt + self.adapter + bytes(token % 251 for token in self.tokens[: position + 1])
        return sha256(data).digest()[:SLOT_BYTES]


class MiniEngine:
    """One replica.

    Args:
        directory: stands for /dev/shm; replicas that share it are peers.
        uid: the replica.
        clock: CLOCK_MONOTONIC, by hand.
        num_blocks: engine blocks, the null block included.
        cache_blocks: places of the CPU tier.
        budget: tokens a step computes.
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
        **settings: Any,
    ) -> None:
        self.clock, self.num_blocks, self.budget = clock, num_blocks, budget
        self.memory = bytearray(num_blocks * BLOCK * SLOT_BYTES)
        self.config = XavierConfig(
            "w", uid, incarnation, str(directory), total_bytes(segment_geometry(cache_blocks, BLOCK * SLOT_BYTES, 512)), "model", **settings
        )
        self.entry = PeerEntry("w", uid, incarnation)
        self.page = ControlPageWriter.create(control_path(str(directory), "w", uid), ControlState(epoch=epoch))
        self.mover = GatedMover(self.memory, BLOCK * SLOT_BYTES)
        self.engine = Engine.open(self.config, NAMESPACE, self.mover, BLOCK, clock)
        self.half = XavierScheduler(self.engine, self)
        self.worker = XavierWorker(self.engine)
        self.copying = True
        self.free: deque[int] = deque(range(1, num_blocks))
        self.cached: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.users: dict[int, int] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preempted: list[str] = []
        self.received: set[str] = set()
        self.reported: list[str] = []
        self.stepping = False

    # ---- what a test does

    def add(self, request_id: str, tokens: Sequence[int], max_tokens: int = 1, **kinds: object) -> Request:
        """A request arrives."""
        request = Request(request_id, list(tokens), max_tokens, num_prompt=len(tokens), **kinds)  # type: ignore[arg-type]
        self._hash(request)
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
        if not self.requests and not self.engine.copier.busy:
            assert self.engine.state.open_loads == {}
            assert self.engine.state.open_saves == {}
            assert self.engine.state.tier._book.counts().pinned == 0
            assert len(self.free) == self.num_blocks - 1
            assert not self.half.wake_at

    # ---- the engine's own prefix cache, as a clear sees it

    def idle(self) -> bool:
        """No block is in use."""
        return len(self.free) == self.num_blocks - 1

    def reset(self) -> bool:
        """Forget all cached prefixes."""
        self.cached.clear()
        self.hash_of.clear()
        return True

    # ---- one step, in vLLM's order

    def step(self) -> None:
        """Schedule, build, load, compute, save, report."""
        self.clock.now += 0.01
        self.stepping = True
        work = self._schedule()
        scheduled = [Scheduled(request.request_id, stop, new) for request, _, stop, new in work]
        preempted, self.preempted = self.preempted, []
        meta = self.half.build(StepView(scheduled, preempted, (), sum(stop - start for _, start, stop, _ in work)), self.clock())
        self.worker.start_loads(meta)
        failed_blocks = {block for job in meta.sync_loads for block in job.failed_blocks}
        for request, start, stop, _ in work:
            if not failed_blocks & set(request.blocks):
                self._compute(request, start, stop)
        self.worker.after_forward(meta)
        self.stepping = False
        if self.copying:
            self.copy()
        finished, invalid = self.worker.take_finished(), self.worker.take_invalid()
        self._update(work, finished, invalid)

    def _schedule(self) -> list[tuple[Request, int, int, list[int] | None]]:
        work: list[tuple[Request, int, int, list[int] | None]] = []
        budget = self.budget
        for request in list(self.running):
            stop = min(len(request.tokens), request.computed + budget)
            if request not in self.running or stop == request.computed:
                continue
            new = self._grow(request, stop)
            while new is None:
                victim = self.running[-1]
                self._preempt(victim)
                work = [entry for entry in work if entry[0] is not victim]
                if victim is request:
                    break
                new = self._grow(request, stop)
            if new is None:
                continue
            work.append((request, request.computed, stop, new or None))
            budget -= stop - request.computed
        if not self.preempted:
            self._admit(work, budget)
        return work

    def _admit(self, work: list[tuple[Request, int, int, list[int] | None]], budget: int) -> None:
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
                if self._grow(request, stop) is None:
                    return
                self.half.allocated(self._view(request), request.blocks, 0, self.clock())
            stop = min(len(request.tokens), request.computed + budget)
            assert stop > request.computed, "the engine asserts that something is left to compute"
            request.status = "running"
            self.waiting.remove(request)
            self.running.append(request)
            work.append((request, request.computed, stop, None))
            budget -= stop - request.computed

    def _look_up(self, request: Request, budget: int) -> str:
        local: list[int] = []
        if not request.prompt_logprobs:
            for block_hash in request.hashes[: (len(request.tokens) - 1) // BLOCK]:
                if block_hash not in self.cached:
                    break
                local.append(self.cached[block_hash])
        num_local = len(local) * BLOCK
        external, asynchronous = self.half.matched_tokens(self._view(request), num_local, self.clock())
        if external is None:
            return "skip"
        assert external > 0 or not asynchronous
        assert num_local + external <= max(len(request.tokens) - 1, num_local)
        assert external == 0 or num_local + external <= request.num_prompt
        computed = num_local + external
        stop = computed if asynchronous else min(len(request.tokens), computed + budget)
        needed = -(-stop // BLOCK) - len(local)
        if needed > len(self.free) - sum(block in self.free for block in local):
            return "full"
        for block in local:
            self._use(block)
        request.blocks = local + [self._take() for _ in range(needed)]
        request.computed = computed
        self.half.allocated(self._view(request), request.blocks, external, self.clock())
        if asynchronous:
            request.status = "loading"
            return "skip"
        self._cache(request, stop)
        return "ready"

    def _promote(self, request: Request) -> None:
        request.status = "waiting"
        if request.load_failed and request.computed == 0:
            self._release(request)
        else:
            self._cache(request, request.computed)
        request.load_failed = False

    def _compute(self, request: Request, start: int, stop: int) -> None:
        for position in range(start):
            if self._read(request, position) != request.slot(position):
                raise WrongBytes(f"{request.request_id} computes on wrong bytes at {position}")
        for position in range(start, stop):
            self._write(request, position, request.slot(position))

    def _update(self, work: list[tuple[Request, int, int, list[int] | None]], finished: set[str], invalid: set[int]) -> None:
        affected = set()
        for request in [*self.running, *(r for r in self.waiting if r.status == "loading")]:
            bad = [index for index, block in enumerate(request.blocks) if block in invalid]
            if bad and bad[0] * BLOCK < request.computed:
                request.computed, request.load_failed = bad[0] * BLOCK, True
                affected.add(request.request_id)
        for request, _, stop, _ in work:
            if request.request_id in affected or request.request_id not in self.requests or request.status != "running":
                continue
            request.computed = stop
            self._cache(request, stop)
            if stop == len(request.tokens):
                token = request.slot(stop - 1)[0]
                request.text.append(token)
                request.tokens.append(token)
                self._hash(request)
                if len(request.text) == request.max_tokens:
                    self._end(request, "finished")
        self.half.output(finished, invalid, self.clock())
        for request_id in finished:
            assert self.reported.count(request_id) == 0 or self.requests[request_id].status == "loading"
            self.reported.append(request_id)
            request = self.requests[request_id]  # an unknown id kills the engine
            if request.status == "loading":
                self.received.add(request_id)
            else:
                assert request.status == "ended"
                self._forget(request)

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
        self._release(request)
        request.computed, request.status = 0, "waiting"
        self.waiting.insert(0, request)
        self.preempted.append(request.request_id)

    # ---- blocks

    def _forget(self, request: Request) -> None:
        self._release(request)
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block) if block in self.hash_of else self.free.appendleft(block)
        request.blocks = []

    def _grow(self, request: Request, num_tokens: int) -> list[int] | None:
        needed = -(-num_tokens // BLOCK) - len(request.blocks)
        if needed > len(self.free):
            return None
        new = [self._take() for _ in range(needed)]
        request.blocks.extend(new)
        return new

    def _take(self) -> int:
        block = self.free.popleft()
        if (old := self.hash_of.pop(block, None)) is not None:
            self.cached.pop(old, None)
        self.users[block] = 1
        return block

    def _use(self, block: int) -> None:
        if block in self.free:
            self.free.remove(block)
            self.users[block] = 0
        self.users[block] += 1

    def _cache(self, request: Request, num_tokens: int) -> None:
        for index in range(min(num_tokens // BLOCK, len(request.hashes))):
            block = request.blocks[index]
            if block not in self.hash_of and request.hashes[index] not in self.cached:
                self.hash_of[block] = request.hashes[index]
                self.cached[request.hashes[index]] = block

    def _read(self, request: Request, position: int) -> bytes:
        start = (request.blocks[position // BLOCK] * BLOCK + position % BLOCK) * SLOT_BYTES
        return bytes(self.memory[start : start + SLOT_BYTES])

    def _write(self, request: Request, position: int, data: bytes) -> None:
        start = (request.blocks[position // BLOCK] * BLOCK + position % BLOCK) * SLOT_BYTES
        self.memory[start : start + SLOT_BYTES] = data

    def _hash(self, request: Request) -> None:
        for index in range(len(request.hashes), len(request.tokens) // BLOCK):
            parent = request.hashes[-1] if request.hashes else b"root"
            extra = request.salt if index == 0 else b""
            request.hashes.append(sha256(parent + extra + repr(request.tokens[index * BLOCK : (index + 1) * BLOCK]).encode()).digest())

    def _view(self, request: Request) -> RequestView:
        return RequestView(
            request.request_id, len(request.tokens), request.num_prompt, request.hashes, None, request.adapter, request.prompt_logprobs
        )

"""Which sequences compute how many tokens in the next step: vLLM's V1 scheduling in small.

    waiting ──admitted──→ running ──→ finished
      ↑  └─asynchronous load─→ loading ─┘(promoted to waiting, then admitted)
      └────────preempted─────────┘

No clock and no I/O: ``now`` is an argument, collaborators are handed in.
"""

from collections import deque
from dataclasses import dataclass, field

from xinference.model.llm.fake.blocks import BlockPool, extend_hashes
from xinference.model.llm.fake.config import FakeConfig
from xinference.model.llm.fake.request import Sequence, Status
from xinference.model.llm.fake.sharing import Sharing, Step


@dataclass
class Work:
    """One sequence's part of a step: positions [start, stop) are computed."""

    request: Sequence
    start: int
    stop: int
    new_blocks: list[int] = field(default_factory=list)


class Scheduler:
    """Queues and block tables.

    Args:
        config: sizes and limits.
        pool: the engine's KV memory.
        root: parent of first blocks' hashes.
        sharing: the connector.
    """

    def __init__(self, config: FakeConfig, pool: BlockPool, root: bytes, sharing: Sharing) -> None:
        self._config = config
        self._pool = pool
        self._root = root
        self._sharing = sharing
        self.waiting: deque[Sequence] = deque()
        self.loading: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self._preempted: list[str] = []
        self._finished: list[str] = []
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def add(self, request: Sequence, now: float) -> None:
        self._hash(request)
        self.waiting.append(request)
        self._sharing.arrived(request, now)

    def schedule(self, now: float) -> list[Work]:
        """Plan one step and hand out the blocks for it. An empty plan is a step too: connectors report on it."""
        budget = self._config.max_num_batched_tokens
        works: list[Work] = []
        for request in list(self.running):
            if budget == 0 or request.status is not Status.RUNNING:  # preempted by an earlier one
                continue
            work = self._continue(request, budget, works)
            if work is not None:
                works.append(work)
                budget -= work.stop - work.start
        if not self._preempted:
            self._admit(works, budget, now)
        scheduled = [(w.request, w.stop, w.new_blocks) for w in works]
        self._sharing.build(Step(scheduled, self._preempted, self._finished, sum(w.stop - w.start for w in works)), now)
        self._preempted, self._finished = [], []
        return works

    def _continue(self, request: Sequence, budget: int, works: list[Work]) -> Work | None:
        """The next tokens of a running sequence; preempts the newest ones while blocks are short."""
        start = request.num_computed
        stop = min(len(request.tokens), start + budget)
        while True:
            needed = self._blocks_for(stop) - len(request.block_ids)
            if needed <= self._pool.num_free:
                return Work(request, start, stop, self._grow(request, needed))
            victim = self.running[-1]
            self._preempt(victim)
            works[:] = [w for w in works if w.request is not victim]
            if victim is request:
                return None

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._pool.release(victim.block_ids)
        victim.block_ids, victim.num_computed, victim.status, victim.loaded = [], 0, Status.WAITING, False
        self.waiting.appendleft(victim)
        self._preempted.append(victim.request_id)
        self.preemptions += 1

    def _admit(self, works: list[Work], budget: int, now: float) -> None:
        """Take sequences from the waiting queue in order until tokens, places or blocks run out."""
        skipped: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[0]
            if not request.loaded:
                verdict = self._find_prefix(request, budget, now)
                if verdict == "full":
                    break
                if verdict != "ready":
                    self.waiting.popleft()
                    if verdict == "ask again":
                        skipped.append(request)
                    continue
            work = self._start(request, budget, now)
            if work is None:
                break
            works.append(work)
            budget -= work.stop - work.start
        self.waiting.extendleft(reversed(skipped))

    def _find_prefix(self, request: Sequence, budget: int, now: float) -> str:
        """Local and external prefix of a waiting sequence: ready, full (no blocks), ask again, or loading."""
        size = self._pool.block_size
        usable = (len(request.tokens) - 1) // size  # the last token is always computed
        caching = self._config.enable_prefix_caching and not request.sampling.prompt_logprobs
        local = self._pool.cached_prefix(request.block_hashes[:usable]) if caching else []
        external, asynchronous = self._sharing.matched_tokens(request, len(local) * size, now)
        if external is None:
            return "ask again"
        computed = len(local) * size + external
        end = computed if asynchronous else min(len(request.tokens), computed + budget)
        idle_local = sum(1 for block_id in local if self._pool.is_free(block_id))
        new = self._blocks_for(end) - len(local)
        if new > self._pool.num_free - idle_local:
            return "full"
        self._pool.take(local)
        request.block_ids = local + self._pool.allocate(new)
        request.num_computed = computed
        if request.num_cached is None:
            request.num_cached = computed
            self.prefix_queries += len(request.tokens)
            self.prefix_hits += len(local) * size
        self._sharing.allocated(request, external, now)
        if not asynchronous:
            return "ready"
        request.status = Status.LOADING
        self.loading[request.request_id] = request
        return "loading"

    def _start(self, request: Sequence, budget: int, now: float) -> Work | None:
        start = request.num_computed
        stop = min(len(request.tokens), start + budget)
        needed = max(0, self._blocks_for(stop) - len(request.block_ids))
        if needed > self._pool.num_free:
            return None
        self.waiting.popleft()
        self._grow(request, needed)
        if request.loaded:  # vLLM says so a second time, when a request goes on after its load
            self._sharing.allocated(request, 0, now)
        request.status, request.loaded = Status.RUNNING, False
        self.running.append(request)
        return Work(request, start, stop, list(request.block_ids))

    def promote(self, finished_loads: set[str]) -> None:
        """Asynchronous loads have ended: what they brought is cached, and the sequences run next."""
        for request_id in finished_loads:
            request = self.loading.pop(request_id, None)
            if request is None:
                continue
            if request.status is Status.FINISHED:  # aborted while loading
                self._release(request)
                continue
            request.status, request.loaded = Status.WAITING, request.num_computed > 0
            if request.loaded:
                self._remember(request)
            else:  # nothing of the load was usable: the request starts over, and the connector is asked again
                self._release(request)
            self.waiting.appendleft(request)

    def invalidate(self, blocks: set[int]) -> set[str]:
        """Blocks whose load failed: each sequence computes again from its first such block. Returns the sequences affected."""
        affected = set()
        for request in [*self.running, *self.loading.values()]:
            bad = [i for i, block_id in enumerate(request.block_ids) if block_id in blocks]
            if bad:
                request.num_computed = min(request.num_computed, bad[0] * self._pool.block_size)
                request.external_failed = True
                affected.add(request.request_id)
        for block_id in blocks:
            self._pool.forget(block_id)
        return affected

    def computed(self, work: Work) -> None:
        """The step has computed this work."""
        work.request.num_computed = work.stop
        self._remember(work.request)

    def append(self, request: Sequence, token: int) -> None:
        request.tokens.append(token)
        self._hash(request)

    def finish(self, request: Sequence, reason: str, now: float) -> None:
        """End a sequence in any state and give its blocks back; blocks of a load under way go back when that ends."""
        if request.status is Status.FINISHED:
            return
        loading = request.status is Status.LOADING
        if request in self.running:
            self.running.remove(request)
        elif not loading:
            self.waiting.remove(request)
        self._sharing.finished(request, reason, now)
        self._finished.append(request.request_id)
        request.status = Status.FINISHED
        if not loading:
            self._release(request)

    def _release(self, request: Sequence) -> None:
        self._pool.release(request.block_ids)
        request.block_ids = []

    def _grow(self, request: Sequence, count: int) -> list[int]:
        new = self._pool.allocate(max(0, count))
        request.block_ids.extend(new)
        return new

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def _hash(self, request: Sequence) -> None:
        extend_hashes(request.block_hashes, request.tokens, self._pool.block_size, self._root, request.salt)

    def _remember(self, request: Sequence) -> None:
        if self._config.enable_prefix_caching:
            for i in range(request.num_computed // self._pool.block_size):
                self._pool.remember(request.block_ids[i], request.block_hashes[i])

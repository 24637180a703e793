"""What a request is offered beyond the engine's own hit. Pure towards the engine: nothing is pinned, nothing counted.

Counts obey the engine's assertions: whole blocks, local + external <= num_tokens - 1 and <= num_prompt_tokens. An over-count kills it.
"""

from xinference.model.llm.vllm.xavier.connector.engine import Engine
from xinference.model.llm.vllm.xavier.connector.lookup import Lookup
from xinference.model.llm.vllm.xavier.connector.metadata import RequestView
from xinference.model.llm.vllm.xavier.connector.requests import Hit, Offer, RequestState
from xinference.model.llm.vllm.xavier.policy.loading import LoadLimits, Run, plan_load


class Offers:
    """Answers the engine's question, at every scheduling attempt anew.

    Args:
        engine: what both halves share.
        lookup: where stored blocks are found.
        failures_undone: the engine takes a step back before it dispatches the next one. A load within a step that fails is undone then;
            with two steps in flight the second is computed on what failed, and its tokens are delivered: nothing is loaded within a step.
    """

    def __init__(self, engine: Engine, lookup: Lookup, *, failures_undone: bool = True) -> None:
        self._engine = engine
        self._lookup = lookup
        config = engine.config
        within_step = config.sync_load_max_blocks if failures_undone and engine.state.mover.loads_within_step else 0
        self._limits = LoadLimits(within_step, config.sync_load_max_seconds, config.min_load_blocks)
        self._share_blocks = int(config.async_load_max_share * engine.state.mover.num_blocks)

    def find(self, request: RequestState, view: RequestView, local_tokens: int, step: int) -> Offer | None:
        """The offer for a request with this local hit, or None. ``request.refusal`` says why something found is not offered."""
        start, part = divmod(local_tokens, self._engine.tokens_per_block)
        request.refusal = ""
        if part or request.barred or view.skip_reading:
            return None
        stop = min(view.num_tokens - 1, view.num_prompt_tokens) // self._engine.tokens_per_block
        stop = min(stop, len(request.chain))
        if start >= stop:
            return None
        known = request.offer
        if known is not None and known.step == step and known.start == start:
            return known
        epoch = self._engine.state.epoch.current
        hits = self._lookup.hits(request.chain, start, stop)
        offer = self._judge(request, hits, start, step) if hits else None
        return offer if offer is None or offer.asynchronous or self._promise(epoch) else None

    def _judge(self, request: RequestState, hits: tuple[Hit, ...], start: int, step: int) -> Offer | None:
        shared = self._engine.state
        rates = shared.rates.rates(shared.mover.block_bytes, self._engine.tokens_per_block)
        plan = plan_load([Run(hit.source, hit.start, hit.stop) for hit in hits], rates, self._limits)
        if plan.kind == "none":
            request.refusal = "not_worth_loading"
            return None
        stop = plan.stop
        if plan.kind == "async":
            stop = min(stop, start + self._free_share(stop - start))
            if stop - start < self._limits.min_blocks:
                request.refusal = "async_share_refused"
                return None
        return Offer(step, start, stop, plan.kind == "async", _cut(hits, stop), plan.expected_seconds)

    def _promise(self, found_in_epoch: int) -> bool:
        """From here to the end of the schedule nothing is cleared, for the engine counts on these places. False: it is too late."""
        epoch = self._engine.state.epoch
        with self._engine.state.lock:
            epoch.promised = epoch.wanted == epoch.current == found_in_epoch
            return epoch.promised

    def _free_share(self, wanted: int) -> int:
        """Engine blocks that an asynchronous load may take. One that is alone takes what it wants, as its prompt would to be computed."""
        held = sum(len(job.pieces) for job in self._engine.state.open_loads.values() if job.asynchronous)
        return max(0, self._share_blocks - held) if held else wanted


def _cut(hits: tuple[Hit, ...], stop: int) -> tuple[Hit, ...]:
    """The hits as far as ``stop``."""
    return tuple(hit._replace(stop=min(hit.stop, stop)) for hit in hits if hit.start < stop)

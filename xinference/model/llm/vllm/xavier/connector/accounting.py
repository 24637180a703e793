"""Where every prompt token of every request came from, counted once, after the bytes are in place.

Fixed when a request's prefill first completes: the tokens of the last admission by source, the rest computed. Later preemptions only add
to ``recomputed_tokens``. The account is a record in the segment's ring and a set of counters.
"""

from xinference.model.llm.vllm.xavier.connector.engine import Engine
from xinference.model.llm.vllm.xavier.connector.requests import RequestState
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES, RequestEntry

_LOCAL = SOURCES.index("local")
_COMPUTED = SOURCES.index("computed")


class Accounts:
    """Writes the records of one engine.

    Args:
        engine: what both halves share.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def sources(self, state: RequestState) -> tuple[int, ...]:
        """Prompt tokens by source, in the order of SOURCES; they sum to the prompt's length.

        For a request that ended before its prefill completed, "computed" is what would have been left to compute.
        """
        tokens = [0] * len(SOURCES)
        tokens[_LOCAL] = state.local_tokens
        for source, loaded in state.external_tokens.items():
            tokens[SOURCES.index(source)] = loaded
        tokens[_COMPUTED] = state.num_prompt_tokens - sum(tokens)
        return tuple(tokens)

    def complete(self, state: RequestState, now: float) -> None:
        """The prefill of ``state`` completed for the first time and its first token is out: fix the account. The caller holds the lock."""
        state.completed = True
        state.completing_step = 0
        state.first_token_at = now
        shared = self._engine.state
        shared.count("requests", 1)
        for source, tokens in zip(SOURCES, self.sources(state), strict=True):
            if tokens:
                shared.count(f"prompt_tokens_{source}", tokens)
        if state.pre_clear_tokens:
            shared.count("pre_clear_tokens", state.pre_clear_tokens)
        self._write(state, "first_token", 0, 0.0)

    def end(self, state: RequestState, status: str, output_tokens: int, now: float) -> None:
        """The request ended: write its final record. The caller holds the lock."""
        if state.recomputed_tokens:
            self._engine.state.count("recomputed_tokens", state.recomputed_tokens)
        self._write(state, status, output_tokens, now)

    def _write(self, state: RequestState, status: str, output_tokens: int, finished_at: float) -> None:
        entry = RequestEntry(
            request=state.identity,
            state=status,
            prompt_tokens=state.num_prompt_tokens,
            sources=self.sources(state),
            pre_clear_tokens=state.pre_clear_tokens,
            recomputed_tokens=state.recomputed_tokens,
            output_tokens=output_tokens,
            queued_us=_us(state.queued_at),
            scheduled_us=_us(state.scheduled_at),
            load_started_us=_us(state.load_started_at),
            loaded_us=_us(state.loaded_at),
            first_token_us=_us(state.first_token_at),
            finished_us=_us(finished_at),
        )
        ring = self._engine.state.segment.requests
        state.slot = ring.write(entry) if state.slot is None else ring.update(state.slot, entry)


def _us(seconds: float) -> int:
    return int(seconds * 1e6)

"""Where the blocks of a request are: the longest contiguous prefix over the own slab and the peers', as runs.

Local memory reads only. The own slab is asked first, then the peers; what one of them has ends where the next one may go on.
"""

from xinference.model.llm.vllm.xavier.connector.engine import Engine
from xinference.model.llm.vllm.xavier.connector.requests import Hit, KeyChain
from xinference.model.llm.vllm.xavier.transfer.jobs import OWN_SLAB

# A prefix broken into more runs than this is cut: each run costs a search, and a chain so scattered is hardly worth one.
MAX_RUNS = 16


class Lookup:
    """Finds runs of stored blocks.

    Args:
        engine: what both halves share.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def hits(self, chain: KeyChain, start: int, stop: int) -> tuple[Hit, ...]:
        """The runs that cover [start, end) without a gap, for the greatest end <= ``stop`` found."""
        found: list[Hit] = []
        position = start
        while position < stop and len(found) < MAX_RUNS:
            hit = self._own(chain, position, stop) or self._best_peer(chain, position, stop)
            if hit is None:
                break
            found.append(hit)
            position = hit.stop
        return tuple(found)

    def peer_end(self, chain: KeyChain, start: int, stop: int) -> int:
        """Up to where one peer keeps the blocks from ``start`` on."""
        hit = self._best_peer(chain, start, stop)
        return hit.stop if hit else start

    def _own(self, chain: KeyChain, start: int, stop: int) -> Hit | None:
        shared = self._engine.state
        end = shared.tier.prefix(chain, start, stop)
        if end - start <= self._engine.config.sync_load_max_blocks:
            # What may be loaded synchronously must be certain. A search in halves steps over a gap that a peer's blocks fill.
            end = next((index for index in range(start, end) if shared.segment.place_of(chain[index]) is None), end)
        return Hit("cpu_tier", OWN_SLAB, start, end) if end > start else None

    def _best_peer(self, chain: KeyChain, start: int, stop: int) -> Hit | None:
        best = None
        epoch = self._engine.state.epoch.current
        for peer in self._engine.state.peers.attached:
            end = peer.reader.longest_prefix(chain, start, stop, epoch)
            if end > (best.stop if best else start):
                best = Hit("peer_cpu", peer.replica_uid, start, end)
                if end == stop:
                    break
        return best

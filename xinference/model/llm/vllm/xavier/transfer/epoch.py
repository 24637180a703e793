"""The model-wide clear epoch inside one engine: who learns of a new one, who carries it out, and when it is confirmed.

    control page ──ask──> wanted ──apply──> current ──nothing older held──> confirmed

The copier thread asks, because it runs in an idle engine too. Whoever comes first applies, under the engine's lock, but not while the
step thread has promised a synchronous load: the engine counts on those places until ``build``, and its next step may be under way before
it hears that they are gone.
"""

from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.store.tier import CpuTier


class ModelEpoch:
    """One engine's place in the sequence of clears. Not thread safe: callers hold the engine's lock, save for reads of ``current``.

    Args:
        segment: where the epoch is published and confirmed.
        tier: what is cleared.
        epoch: the epoch at start; an adopted segment holds nothing of another.
    """

    def __init__(self, segment: SegmentWriter, tier: CpuTier, epoch: int) -> None:
        self._segment = segment
        self._tier = tier
        self.current = epoch
        self.wanted = epoch
        self.confirmed = -1
        # Set by the step thread from the answer that promises a synchronous load to the end of that schedule.
        self.promised = False

    @property
    def needs_step(self) -> bool:
        """Whether the end of a schedule matters: something is promised, or a clear is to be carried out. Read without the lock."""
        return self.promised or self.wanted != self.current

    def ask(self, epoch: int) -> None:
        """The control page names this epoch. An older one is not gone back to."""
        self.wanted = max(self.wanted, epoch)

    def apply(self) -> bool:
        """Clear the tier if a newer epoch is wanted and nothing is promised. True if it did."""
        if self.wanted == self.current or self.promised:
            return False
        self.current = self.wanted
        self._tier.clear(self.current)
        self._segment.counters.add("clears")
        return True

    def confirm(self, oldest_open: int) -> None:
        """Say so in the segment once nothing older than the present epoch is held.

        Args:
            oldest_open: the lowest epoch of any save or load that still holds a place, or the current one.
        """
        if oldest_open >= self.current and self.confirmed != self.current:
            self._segment.confirm_epoch(self.current)
            self.confirmed = self.current

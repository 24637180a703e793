"""What this machine's copies and prefills have lately cost, as rates for load-or-recompute.

Each estimate is a ratio of two sums that fade, amounts over seconds: a large sample counts for more than a small one, and what was
measured a while ago counts for less. No clock: samples are brought by whoever has just measured one.
"""

from dataclasses import dataclass

# Share of the older samples that the next one leaves. Ten samples are three load batches or ten steps: a change of load shows soon.
KEEP_PER_SAMPLE = 0.9
# Share of the copy samples that one prefill sample leaves. Copies that are judged too slow are not made, so not measured either; but
# the work done instead is, and after some hundred such steps the expectation below rules again and one load is tried.
COPY_KEPT_PER_PREFILL = 0.99
# Expected of a copy through host memory before one was measured: a slow machine's rate, weighing as much as one mebibyte copied.
EXPECTED_COPY_BYTES_PER_SECOND = 1e9
EXPECTED_COPY_WEIGHT_BYTES = float(1 << 20)
# An asynchronous load of nothing: two to three turns of an idle engine's loop of 1 ms each (measured).
NULL_ASYNC_SECONDS = 0.003


@dataclass(frozen=True, slots=True)
class Rates:
    """What a load and a recompute cost, as far as known.

    Attributes:
        copy_bytes_per_second: from a slab into the engine.
        null_async_seconds: what an asynchronous load costs beside its copy.
        prefill_tokens_per_second: of the engine; None before the first measurement.
        block_bytes: bytes of one block over all layers.
        tokens_per_block: tokens of one block.
    """

    copy_bytes_per_second: float
    null_async_seconds: float
    prefill_tokens_per_second: float | None
    block_bytes: int
    tokens_per_block: int

    def copy_seconds(self, num_blocks: int) -> float:
        """Time to copy so many blocks."""
        return num_blocks * self.block_bytes / self.copy_bytes_per_second

    def prefill_seconds(self, num_blocks: int) -> float | None:
        """Time to compute so many blocks; None while unknown."""
        if self.prefill_tokens_per_second is None:
            return None
        return num_blocks * self.tokens_per_block / self.prefill_tokens_per_second


class FadingRate:
    """Amount per second over samples that fade, beside an expectation that does not."""

    __slots__ = ("_amount", "_expected_amount", "_expected_seconds", "_seconds")

    def __init__(self, expected_amount: float = 0.0, expected_seconds: float = 0.0) -> None:
        """Start with no sample. What is expected counts like one; nothing is, unless given."""
        self._expected_amount = expected_amount
        self._expected_seconds = expected_seconds
        self._amount = 0.0
        self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """Take a sample. One without an amount or a duration says nothing (a clock may stand still for a short copy)."""
        if amount > 0 and seconds > 0:
            self._amount = self._amount * KEEP_PER_SAMPLE + amount
            self._seconds = self._seconds * KEEP_PER_SAMPLE + seconds

    def fade(self, kept: float) -> None:
        """Let all samples count for less."""
        self._amount *= kept
        self._seconds *= kept

    def per_second(self) -> float | None:
        """The rate; None while nothing is expected and nothing was sampled."""
        seconds = self._seconds + self._expected_seconds
        return (self._amount + self._expected_amount) / seconds if seconds else None


class MeasuredRates:
    """The two estimates of one engine. The engine's lock orders its callers."""

    __slots__ = ("_copy", "_null_async_seconds", "_prefill")

    def __init__(self, null_async_seconds: float = NULL_ASYNC_SECONDS) -> None:
        self._copy = FadingRate(EXPECTED_COPY_WEIGHT_BYTES, EXPECTED_COPY_WEIGHT_BYTES / EXPECTED_COPY_BYTES_PER_SECOND)
        self._prefill = FadingRate()
        self._null_async_seconds = null_async_seconds

    def observe_copy(self, num_bytes: int, seconds: float) -> None:
        """A batch between a slab and the engine ended."""
        self._copy.observe(num_bytes, seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step that computed so many tokens ended."""
        self._prefill.observe(num_tokens, seconds)
        self._copy.fade(COPY_KEPT_PER_PREFILL)

    def rates(self, block_bytes: int, tokens_per_block: int) -> Rates:
        """The estimates now, for blocks of this size."""
        copy = self._copy.per_second() or EXPECTED_COPY_BYTES_PER_SECOND
        return Rates(copy, self._null_async_seconds, self._prefill.per_second(), block_bytes, tokens_per_block)

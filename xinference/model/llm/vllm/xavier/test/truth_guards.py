"""Guards of the package, each with the text that is it: taken out one at a time, to see that random schedules notice."""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

PACKAGE = "xinference.model.llm.vllm.xavier"


class Guard(NamedTuple):
    """One guard: ``text`` in ``function`` of ``module``, and what stands there when it is left out."""

    name: str
    module: str
    function: str
    text: str
    instead: str


GUARDS = (
    Guard("peer_generation_after_copy", "directory.records", "RecordTable.still", "== generation)", "== generation or True)"),
    Guard("check_word", "directory.records", "RecordTable.find", "and check == record_check", "and check or record_check"),
    Guard(
        "epoch_compare",
        "directory.records",
        "RecordTable.find",
        "written == epoch and check == record_check(place, k0, k1, generation, epoch,",
        "check == record_check(place, k0, k1, generation, written,",
    ),
    Guard(
        "withdraw_before_reuse",
        "store.tier",
        "CpuTier.reserve",
        "self._segment.invalidate_published(plan.places)",
        "self._segment.invalidate_published(())",
    ),
    Guard("withdraw_bumps_generation", "directory.records", "OwnedRecordTable.withdraw", "+ 1) & MASK", ") & MASK"),
    Guard(
        "own_generation_after_save",
        "transfer.copier",
        "Copier._settle_save",
        "state.blocks.generation(piece.block) != piece.generation",
        "False",
    ),
    Guard("hand_out_bumps_generation", "transfer.blocks", "EngineBlocks.hand_out", "self._generations[block] += 1", "pass"),
    Guard(
        "save_after_forward",
        "connector.worker",
        "XavierWorker.start_loads",
        "if meta is EMPTY:",
        "self.after_forward(meta)\n    if meta is EMPTY:",
    ),
    Guard("pin_before_load", "store.tier", "CpuTier.pin", "self._book.pin(place)", "pass"),
    Guard("load_of_older_epoch_fails", "transfer.state", "TransferState.end_load", "job.epoch != self.epoch.current", "False"),
    Guard("clear_waits_for_a_promise", "transfer.epoch", "ModelEpoch.apply", "or self.promised", ""),
    Guard("one_failure_bars", "connector.loads", "Loads.settle", "state.barred = True", "pass"),
    Guard("incarnation_compare", "directory.reader", "SegmentReader.open", "!= expected_incarnation:", "is None:"),
    Guard(
        "replaced_owner_is_let_go",
        "directory.reader",
        "SegmentReader.replaced",
        "return self.owner_incarnation() != self._incarnation",
        "return False",
    ),
    Guard("dead_owner_is_let_go", "transfer.peers", "Peers._good", "peer.reader.alive()", "True"),
    Guard("unwanted_peer_is_let_go", "transfer.peers", "Peers._good", "peer.entry not in self._wanted or", ""),
    Guard(
        "block_of_older_epoch_is_not_saved",
        "connector.saving",
        "SavePlanner._end_of_own_epoch",
        "shared.blocks.epoch(block) != shared.epoch.current",
        "False",
    ),
    Guard("save_of_older_epoch_is_not_published", "store.tier", "CpuTier.publish", "self._forget_filling(place, key) and", ""),
    Guard("tainted_is_not_saved", "connector.worker", "XavierWorker.start_loads", "self._tainted.append(job.request_id)", "pass"),
    Guard("failed_copy_is_not_published", "transfer.copier", "Copier._settle_save", "failed or state.corrupted", "state.corrupted"),
    Guard("failed_load_is_reported", "transfer.loader", "Loader._copy", "job_by_block[piece.block].failed_blocks.add(piece.block)", "pass"),
    Guard("adoption_checks_records", "directory.adoption", "_valid_by_order", "check == record_check(", "check or record_check("),
    Guard("nobody_builds_on_unwritten", "connector.loads", "Loads.builds_on_unwritten", "if not self._unwritten:", "if True:"),
    Guard("orphans_are_withdrawn", "store.tier", "CpuTier._restore", "segment.invalidate(place)", "pass"),
    Guard("leaves_first", "policy.placement", "PlacementBook._evictable", "and not self._table.children[place]", ""),
    Guard("pinned_is_not_evicted", "policy.placement", "PlacementBook._evictable", "and not self._table.pins[place]", ""),
    Guard(
        "unpinned_after_the_load",
        "transfer.state",
        "TransferState.end_load",
        "self.tier.unpin([piece.place for piece in job.pieces if piece.place != UNPINNED])",
        "pass",
    ),
    Guard("places_come_back_after_a_dropped_save", "transfer.copier", "Copier._settle_save", "state.tier.give_back(piece.place)", "pass"),
    Guard("whole_prompt_is_never_offered", "connector.offers", "Offers.find", "view.num_tokens - 1", "view.num_tokens"),
    Guard("no_reading_when_skipped", "connector.offers", "Offers.find", "or view.skip_reading", ""),
    Guard(
        "failed_load_moves_tokens_to_computed",
        "connector.loads",
        "Loads.settle",
        "self._note_sources(state, job, num_usable)",
        "self._note_sources(state, job, len(job.pieces))",
    ),
)


@contextmanager
def without(guard: Guard) -> Iterator[None]:
    """The package without one guard, while it lasts.

    Raises:
        LookupError: its text is not there exactly once: the code has changed, and so must the list.
    """
    module = importlib.import_module(f"{PACKAGE}.{guard.module}")
    *owners, name = guard.function.split(".")
    owner = getattr(module, owners[0]) if owners else module
    real = inspect.getattr_static(owner, name)
    function = getattr(real, "__func__", real)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(guard.text) != 1:
        raise LookupError(f"{guard.name}: {guard.text!r} is {source.count(guard.text)} times in {guard.function}")
    space: dict[str, object] = {}
    exec(compile(source.replace(guard.text, guard.instead), f"<without {guard.name}>", "exec"), module.__dict__, space)  # noqa: S102
    setattr(owner, name, space[name])
    try:
        yield
    finally:
        setattr(owner, name, real)

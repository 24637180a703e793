"""An engine on a device: copies follow the steps that were told to it before, and no load is part of a step."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.test import mini_engine
from xinference.model.llm.vllm.xavier.test.mini_engine import BLOCK, Clock, GatedMover, MiniEngine
from xinference.model.llm.vllm.xavier.transfer.bytes import BytesSlab
from xinference.model.llm.vllm.xavier.transfer.mover import BlockCopy


class DeviceMover(GatedMover):
    """Numbers its marks, and remembers which one each copy followed."""

    loads_within_step = False

    def __init__(self, memory: bytearray, block_bytes: int) -> None:
        super().__init__(memory, block_bytes)
        self.marks = 0
        self.followed = 0
        self.copies: list[tuple[str, int]] = []

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def follow(self, mark: int) -> None:
        self.followed = max(self.followed, mark)

    def save(self, slab: BytesSlab, copies: Sequence[BlockCopy]) -> None:
        self.copies.append(("save", self.followed))
        super().save(slab, copies)

    def load(self, slab: BytesSlab, copies: Sequence[BlockCopy]) -> None:
        self.copies.append(("load", self.followed))
        super().load(slab, copies)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MiniEngine:
    monkeypatch.setattr(mini_engine, "GatedMover", DeviceMover)
    return MiniEngine(tmp_path, "a", Clock(), num_blocks=12)


def test_a_save_follows_the_step_that_wrote_its_blocks(engine: MiniEngine) -> None:
    engine.ask("r1", range(5 * BLOCK))
    assert isinstance(engine.mover, DeviceMover)
    saves = [mark for verb, mark in engine.mover.copies if verb == "save"]
    assert saves == sorted(saves)
    assert saves[0] >= 1
    assert saves[-1] == engine.mover.marks


def test_a_hit_in_the_own_slab_is_loaded_beside_the_steps_and_follows_those_that_still_run(engine: MiniEngine) -> None:
    engine.ask("r1", range(5 * BLOCK))
    engine.ask("other", range(100, 100 + 11 * BLOCK))  # takes the engine blocks
    assert isinstance(engine.mover, DeviceMover)
    marks, copies = engine.mover.marks, len(engine.mover.copies)
    engine.ask("r2", range(5 * BLOCK))
    loads = [mark for verb, mark in engine.mover.copies[copies:] if verb == "load"]
    assert loads[0] > marks
    assert engine.counter("loads_sync") == 0
    assert engine.counter("loads_async") == 1


def test_a_mark_that_cannot_be_followed_fails_the_copies_and_nothing_else(engine: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(mark: int) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.mover, "follow", lost)
    engine.ask("r1", range(5 * BLOCK))
    assert engine.counter("saves_blocks") == 0
    assert engine.counter("drops_copy_failed") == 5
    assert engine.counter("hook_errors") > 0
    engine.check()

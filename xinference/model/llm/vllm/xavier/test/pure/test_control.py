from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference.model.llm.vllm.xavier.directory import control
from xinference.model.llm.vllm.xavier.directory.control import (
    CONTROL_BYTES,
    ControlPageReader,
    ControlPageWriter,
    ControlState,
    PeerEntry,
)
from xinference.model.llm.vllm.xavier.errors import ControlPageRefused

SLOT = 8256  # where the first state lies
STATE = ControlState(3, (PeerEntry("w1", "m-0", 0xFFFF_FFFF_FFFF_FFFF), PeerEntry("w1", "m-1", 1)), True)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "xinference.w1.m-0.ctl")


def test_a_reader_starts_with_the_present_state(path: str) -> None:
    ControlPageWriter.create(path, STATE)
    reader = ControlPageReader.open(path)
    assert reader.state == STATE
    assert reader.poll() is None


def test_a_change_is_seen_once(path: str) -> None:
    writer = ControlPageWriter.create(path)
    reader = ControlPageReader.open(path)
    assert reader.state == ControlState(0, (), False)
    writer.write(STATE)
    assert reader.poll() == STATE
    assert reader.poll() is None
    assert reader.state == STATE


def test_of_several_changes_the_last_is_seen(path: str) -> None:
    writer = ControlPageWriter.create(path)
    reader = ControlPageReader.open(path)
    for epoch in range(1, 6):
        writer.write(ControlState(epoch))
    assert reader.poll() == ControlState(5)


def test_a_writer_that_dies_in_the_middle_leaves_the_last_complete_state(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ControlPageWriter.create(path, STATE)

    def die(sequence: int, raw: bytes) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "_check", die)
    with pytest.raises(KeyboardInterrupt):
        writer.write(ControlState(4))
    monkeypatch.undo()
    reader = ControlPageReader.open(path)
    assert reader.state == STATE
    writer.write(ControlState(5))
    assert reader.poll() == ControlState(5)


def test_a_state_too_large_for_the_page_is_refused_and_the_old_one_stays(path: str) -> None:
    writer = ControlPageWriter.create(path, STATE)
    reader = ControlPageReader.open(path)
    peers = tuple(PeerEntry("w" * 48, f"{'m' * 40}-{number:03}", number) for number in range(100))
    with pytest.raises(ControlPageRefused, match="100 peers exceeds"):
        writer.write(ControlState(1, peers))
    assert reader.poll() is None
    writer.write(ControlState(1, peers[:60]))
    assert reader.poll() == ControlState(1, peers[:60])


def test_a_page_whose_first_state_is_too_large_leaves_nothing(path: str) -> None:
    with pytest.raises(ControlPageRefused, match="200 peers exceeds"):
        ControlPageWriter.create(path, ControlState(1, tuple(PeerEntry("w" * 48, "m" * 48, number) for number in range(200))))
    assert list(Path(path).parent.iterdir()) == []
    ControlPageWriter.create(path, STATE)


def test_a_live_writer_is_not_displaced_and_a_dead_one_is(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONTROL_LOCK_WAIT_SECONDS", 0.01)
    writer = ControlPageWriter.create(path, STATE)
    with pytest.raises(ControlPageRefused, match="locked by a live process"):
        ControlPageWriter.create(path)
    writer.close(unlink=False)
    ControlPageWriter.create(path, ControlState(9))
    assert ControlPageReader.open(path).state == ControlState(9)


def test_closing_removes_the_page_once(path: str) -> None:
    writer = ControlPageWriter.create(path)
    writer.close()
    writer.close()
    assert not Path(path).exists()
    with pytest.raises(ControlPageRefused, match="does not exist"):
        ControlPageReader.open(path)


@pytest.mark.parametrize("raw", [b"", bytes(CONTROL_BYTES), bytes(CONTROL_BYTES - 1), b"\xff" * CONTROL_BYTES])
def test_what_is_not_a_control_page_is_refused(path: str, raw: bytes) -> None:
    Path(path).write_bytes(raw)
    with pytest.raises(ControlPageRefused):
        ControlPageReader.open(path)


@given(offset=st.one_of(st.integers(0, 23), st.integers(SLOT, SLOT + 200)), change=st.integers(1, 255))
def test_a_damaged_page_is_refused_or_unchanged(offset: int, change: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("page") / "xinference.w1.m-0.ctl"
    writer = ControlPageWriter.create(str(path), STATE)
    raw = bytearray(path.read_bytes())
    used = SLOT + 16 + len(STATE.to_wire())
    raw[offset] ^= change
    writer.close()
    path.write_bytes(raw)
    if 16 <= offset < SLOT or offset >= used:  # nobody looks there
        assert ControlPageReader.open(str(path)).state == STATE
    else:
        with pytest.raises(ControlPageRefused):
            ControlPageReader.open(str(path))


def test_a_state_that_was_overwritten_while_it_was_read_is_read_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ControlPageWriter.create(path)
    reader = ControlPageReader.open(path)
    writer.write(ControlState(1))
    find_slot = control._slot

    def be_overtaken(sequence: int) -> int:
        monkeypatch.setattr(control, "_slot", find_slot)
        writer.write(ControlState(2))
        writer.write(ControlState(3))
        return find_slot(sequence)

    monkeypatch.setattr(control, "_slot", be_overtaken)
    assert reader.poll() == ControlState(3)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"epoch":1}', b'{"epoch":1,"peers":[["a"]],"stopping":false}', b'{"epoch":"x","peers":[],"stopping":0}']
)
def test_a_text_that_is_no_state_is_refused(text: bytes) -> None:
    with pytest.raises(ControlPageRefused, match="holds no valid state"):
        ControlState.from_wire(text)

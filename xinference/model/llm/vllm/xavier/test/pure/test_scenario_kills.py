"""An owner killed or stopped after any single store: of a publish, an eviction, a clear, an adoption, a record, a control page.

The real code is run one instruction at a time (see moments.py). Each image of its file is what a kill or a stop there leaves. Stopped: a
reader finds right bytes or nothing. Killed: a successor keeps right bytes in whole chains, and whoever was copying notices reuse.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory import control
from xinference.model.llm.vllm.xavier.directory.control import ControlPageReader, ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.layout import LINE_WORDS, Word
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.records import CHECK, RecordTable
from xinference.model.llm.vllm.xavier.directory.requests import RequestEntry
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.store.tier import CpuTier, ReserveRequest
from xinference.model.llm.vllm.xavier.test.moments import Moments
from xinference.model.llm.vllm.xavier.test.segments import SEGMENT_NAME, content, fill, keys, open_segment, small

GEOMETRY = small(num_places=4, place_bytes=64, request_records=2)
SIZE = GEOMETRY.place_bytes
OLD, NEW, OTHER = keys(range(3)), keys(range(10, 13)), keys(range(20, 22))
ALL = [*OLD, *NEW, *OTHER]
EPOCHS = (1, 2)
Work = Callable[["Owner"], object]


class Owner:
    """A segment with a tier, as an engine has them."""

    def __init__(self, directory: Path, incarnation: int = 7, epoch: int = 1) -> None:
        self.segment = open_segment(directory, GEOMETRY, incarnation=incarnation, epoch=epoch)
        self.slab = self.segment.slab_view()
        self.tier = CpuTier.of(self.segment)

    def save(self, chain: list[BlockKey]) -> None:
        """A request's blocks, from the reservation to the last publish."""
        for _ in range(2):  # the second time it was seen before, so it displaces what was reused
            reserved = self.tier.reserve(ReserveRequest(None, chain))
            for index, place in enumerate(reserved.places, reserved.first):
                self.slab[place * SIZE : (place + 1) * SIZE] = content(chain[index], SIZE)
                self.tier.publish(place, chain[index], chain[index - 1] if index else None)

    def close(self) -> None:
        self.slab.release()
        self.segment.close()


def publish(owner: Owner) -> None:
    owner.save(OTHER[:1])


def evict(owner: Owner) -> None:
    owner.save(NEW)


def clear_and_save(owner: Owner) -> None:
    owner.tier.clear(2)
    owner.segment.confirm_epoch(2)
    owner.save(OTHER)


def save_in_part(owner: Owner) -> None:
    """A reservation whose second block is given back, with what follows it."""
    owner.tier.touch(OLD)
    reserved = owner.tier.reserve(ReserveRequest(None, OTHER))
    for index, place in enumerate(reserved.places):
        owner.slab[place * SIZE : (place + 1) * SIZE] = bytes([index + 1]) * SIZE
        owner.tier.give_back(place)


WORKS: dict[str, Work] = {"publish": publish, "evict": evict, "clear": clear_and_save, "save in part": save_in_part}


def moments_of(directory: Path, work: Work) -> Moments:
    """What the file of an owner that holds OLD looks like during this work, from before it to its end."""
    owner = Owner(directory)
    owner.save(OLD)
    moments = Moments(owner.segment.path)
    moments.run(lambda: work(owner))
    owner.close()
    return moments


@pytest.fixture(scope="module", params=WORKS)
def moments(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Moments:
    return moments_of(tmp_path_factory.mktemp("life"), WORKS[request.param])


class Seen:
    """What a reader sees in one image."""

    def __init__(self, image: bytes) -> None:
        self.image = memoryview(image)
        self.table = RecordTable(self.image, GEOMETRY)
        self.found = {(wanted, epoch): self.table.find(wanted, epoch) for wanted in ALL for epoch in EPOCHS}

    def bytes_of(self, place: int) -> bytes:
        start = GEOMETRY.slab_offset + place * SIZE
        return bytes(self.image[start : start + SIZE])


def wrong_reads(moments: Moments) -> list[str]:
    """Every wrong read that a reader can make which finds in one image, copies in this or a later one, and looks again."""
    wrong = []
    seen = [Seen(image) for image in moments.images]
    for first, then in enumerate(seen):
        for (wanted, epoch), found in then.found.items():
            if found is None:
                continue
            for later in range(first, len(seen)):
                still = seen[later].table.still(*found)
                if still and seen[later].bytes_of(found.place) != content(wanted, SIZE):
                    wrong.append(f"{wanted} of epoch {epoch}: found after {moments.where[first]}, copied after {moments.where[later]}")
    return wrong


def test_work_takes_many_moments_and_every_store_is_one(moments: Moments) -> None:
    assert len(moments.images) >= 10
    changed = [changed_words(one, other) for one, other in zip(moments.images, moments.images[1:], strict=False)]
    for words in changed:
        assert len([word for word in words if word < GEOMETRY.slab_offset]) <= 1, "two words of the books changed within one instruction"


def changed_words(one: bytes, other: bytes) -> list[int]:
    return [offset for offset in range(0, len(one), 8) if one[offset : offset + 8] != other[offset : offset + 8]]


def test_a_reader_of_an_owner_stopped_anywhere_reads_right_bytes_or_nothing(moments: Moments) -> None:
    assert wrong_reads(moments) == []


def test_the_moments_would_show_an_owner_that_publishes_before_the_bytes(tmp_path: Path) -> None:
    def too_early(owner: Owner) -> None:
        (place,) = owner.tier.reserve(ReserveRequest(None, OTHER[:1])).places
        owner.tier.publish(place, OTHER[0], None)
        owner.slab[place * SIZE : (place + 1) * SIZE] = content(OTHER[0], SIZE)

    assert wrong_reads(moments_of(tmp_path, too_early)) != []


def test_the_moments_would_show_an_owner_that_withdraws_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentWriter, "invalidate_published", lambda self, places: None)
    monkeypatch.setattr(SegmentWriter, "publish", lambda self, place, *rest: (self.invalidate(place), fill_record(self, place, *rest)))
    assert wrong_reads(moments_of(tmp_path, evict)) != []


def fill_record(segment: SegmentWriter, place: int, block: BlockKey, parent: BlockKey | None) -> None:
    segment._order += 1
    segment._table.fill(place, block, parent, segment.epoch, segment._order)
    slot = segment._table.free_hint(block.k0, segment.epoch)
    assert slot is not None
    segment._table.put_hint(slot, place, block.k0)
    segment._published[place] = 1


def test_a_clear_is_one_store_after_which_no_reader_of_the_new_epoch_finds_anything_older(tmp_path: Path) -> None:
    moments = moments_of(tmp_path, clear_and_save)
    for image in moments.images:
        seen = Seen(image)
        assert all(seen.found[old, 2] is None for old in OLD)
        assert all(seen.found[new, 1] is None for new in OTHER)


@pytest.mark.parametrize("epoch", EPOCHS)
def test_a_successor_of_an_owner_killed_anywhere_keeps_right_bytes_in_whole_chains_and_goes_on(
    moments: Moments, epoch: int, tmp_path: Path
) -> None:
    for image in moments.images:
        (tmp_path / SEGMENT_NAME).write_bytes(image)
        copying = Seen(image).found.values()
        reader = SegmentReader.open(str(tmp_path / SEGMENT_NAME), expected_incarnation=None)
        successor = Owner(tmp_path, incarnation=8, epoch=epoch)
        successor.tier.check()
        check_whole(successor)
        before = bytes(successor.slab)
        successor.save(NEW)
        successor.save(OTHER)
        successor.tier.check()
        check_whole(successor)
        for found in copying:
            if found is not None and reader.still(*found):
                start = found.place * SIZE
                assert before[start : start + SIZE] == successor.slab[start : start + SIZE]
        reader.close()
        successor.close()


def check_whole(owner: Owner) -> None:
    """Every block that is found has its own bytes, and the blocks before it in its chain."""
    for chain in (OLD, NEW, OTHER):
        places = [owner.segment.place_of(block) for block in chain]
        for block, place in zip(chain, places, strict=True):
            assert place is None or owner.slab[place * SIZE : (place + 1) * SIZE] == content(block, SIZE)
        kept = [place is not None for place in places]
        assert kept == sorted(kept, reverse=True), "a chain with a gap"


# ---- adoption


def damaged(directory: Path) -> None:
    """What a kill could leave at worst: a block of a former epoch, one twice, one without a hint, one half written."""
    segment = open_segment(directory, GEOMETRY)
    fill(segment, 0, OLD[0])
    segment.set_epoch(2)
    fill(segment, 1, OLD[0])
    fill(segment, 2, OLD[1], OLD[0])
    fill(segment, 3, OLD[2], OLD[1])
    segment._table._records[3 * LINE_WORDS + CHECK] ^= 1
    segment._table.drop_hint(2, OLD[1].k0)
    segment.close()


def test_a_successor_killed_anywhere_in_its_adoption_leaves_the_next_one_the_same_blocks(tmp_path: Path) -> None:
    damaged(tmp_path)
    path = tmp_path / SEGMENT_NAME
    start = path.read_bytes()
    moments = Moments(path)
    first = moments.run(lambda: Owner(tmp_path, incarnation=8, epoch=2))
    check_whole(first)
    kept = [first.segment.place_of(block) for block in ALL]
    assert kept[:3] == [1, 2, None]
    first.close()
    functions = {where.partition(":")[0] for where in moments.where}
    assert functions >= {"_take", "withdraw", "clear_hints", "put_hint", "add", "set_used"}, functions
    found_at_start = Seen(start).found.values()
    for image in moments.images:
        seen = Seen(image)
        for (wanted, _), found in seen.found.items():
            assert found is None or seen.bytes_of(found.place) == content(wanted, SIZE)
        path.write_bytes(image)
        next_one = Owner(tmp_path, incarnation=9, epoch=2)
        next_one.tier.check()
        check_whole(next_one)
        assert [next_one.segment.place_of(block) for block in ALL] == kept
        next_one.close()
    assert any(found is not None for found in found_at_start)


def test_while_a_successor_takes_over_the_file_seems_to_be_of_the_dead_one_or_of_nobody_or_its_own(tmp_path: Path) -> None:
    """No image pairs one start's pid with another's incarnation while it also seems to run."""
    damaged(tmp_path)
    path = tmp_path / SEGMENT_NAME
    with open(path, "r+b") as file:  # a former owner, as if it still ran: the worst that a pid used again can look like
        file.seek(Word.INCARNATION * 8)
        file.write((5).to_bytes(8, "little"))
    moments = Moments(path)
    moments.run(lambda: Owner(tmp_path, incarnation=8, epoch=2)).close()
    seen = []
    for image in moments.images:
        words = memoryview(image[: 64 * 8]).cast("Q")
        seen.append((words[Word.START_TICKS] == 0, words[Word.INCARNATION]))
    changed = [stopped for (stopped, incarnation), (_, before) in zip(seen[1:], seen, strict=False) if incarnation != before]
    assert changed == [True], "the incarnation changes once, while nobody seems to run"


# ---- accounting records


def test_a_record_killed_anywhere_while_it_is_written_or_updated_is_skipped_or_whole(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    entries = [RequestEntry(bytes([number]) * 16, "running", number, (number,) * 8, *(number,) * 9) for number in range(1, 5)]
    entries += [RequestEntry(b"\1" * 16, "finished", 9, (9,) * 8, *(9,) * 9)]

    def work() -> None:
        slots = [owner.segment.requests.write(entry) for entry in entries[:4]]  # twice round the ring
        owner.segment.requests.update(slots[0], entries[4])

    moments = Moments(owner.segment.path)
    moments.run(work)
    owner.close()
    path = tmp_path / "image"
    most = 0
    for image in moments.images:
        path.write_bytes(image)
        reader = SegmentReader.open(str(path), expected_incarnation=None)
        listed, update = reader.requests_since(0)
        assert all(entry in entries for entry in listed)
        assert reader.requests_since(update)[0] == []
        for entry in entries:
            assert all(found in entries for found in reader.find_request(entry.request))
        most = max(most, len(listed))
        reader.close()
    assert most == 2
    assert len(moments.images) > 5 * 20


# ---- control page

STATES = [ControlState(epoch, tuple(PeerEntry("w", f"m-{peer}", epoch) for peer in range(epoch)), epoch == 3) for epoch in range(1, 4)]


def test_a_control_page_whose_writer_is_killed_anywhere_shows_the_last_whole_state(tmp_path: Path) -> None:
    path = tmp_path / "page"
    moments = Moments(path)

    def work() -> None:
        writer = ControlPageWriter.create(str(path), STATES[0])
        writer.write(STATES[1])
        writer.write(STATES[2])

    moments.run(work)
    order = []
    for image in moments.images:
        (tmp_path / "image").write_bytes(image)
        order.append(STATES.index(ControlPageReader.open(str(tmp_path / "image")).state))
        successor = ControlPageWriter.create(str(tmp_path / "image"), STATES[2])
        assert ControlPageReader.open(str(tmp_path / "image")).state == STATES[2]
        successor.close()
    assert order == sorted(order)
    assert set(order) == {0, 1, 2}
    assert len(moments.images) >= 1 + 2 * 4


def test_the_moments_would_show_a_page_that_names_its_state_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page"
    writer = ControlPageWriter.create(str(path), STATES[0])

    def early(sequence: int, raw: bytes) -> int:
        writer._words[control._SEQUENCE_WORD] = sequence
        return check(sequence, raw)

    check = control._check
    monkeypatch.setattr(control, "_check", early)
    moments = Moments(path)
    moments.run(lambda: writer.write(STATES[1]))
    monkeypatch.undo()
    refused = 0
    for image in moments.images:
        (tmp_path / "image").write_bytes(image)
        try:
            ControlPageReader.open(str(tmp_path / "image"))
        except control.ControlPageRefused:
            refused += 1
    assert refused

import os
from pathlib import Path
from typing import NoReturn

import pytest

from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.directory import files, layout
from xinference.model.llm.vllm.xavier.directory import segment as segment_module
from xinference.model.llm.vllm.xavier.directory.geometry import SegmentGeometry
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import RequestEntry
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.errors import BookImbalance, PlatformRefused, SegmentRefused, SharedMemoryFull
from xinference.model.llm.vllm.xavier.test.segments import SEGMENT_NAME, content, fill, key, keys, open_segment, small


def reader_of(segment: SegmentWriter, incarnation: int | None = 7) -> SegmentReader:
    return SegmentReader.open(segment.path, expected_incarnation=incarnation)


def test_a_published_block_is_found_by_owner_and_reader_with_its_bytes(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    fill(segment, 3, key(1))
    reader = reader_of(segment)
    found = reader.find(key(1), epoch=1)
    assert found is not None
    assert (found.place, segment.place_of(key(1))) == (3, 3)
    assert bytes(reader.slab_view()[3 * 64 : 4 * 64]) == content(key(1), 64)
    assert reader.still(found.place, found.generation)


def test_the_peers_that_are_mapped_can_be_read_from_outside(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    reader = reader_of(segment)
    assert reader.attached() == frozenset()
    segment.set_attached([11, 22])
    assert reader.attached() == {11, 22}
    segment.set_attached([22])
    assert reader.attached() == {22}
    segment.set_attached(range(1, layout.MAX_ATTACHED + 9))
    assert reader.attached() == set(range(1, layout.MAX_ATTACHED + 1))
    segment.close()
    open_segment(tmp_path, incarnation=8)
    assert reader.attached() == frozenset()  # a successor has mapped nobody yet
    assert reader.header()["file_bytes"] == small().file_bytes


def test_an_empty_segment_holds_no_key_at_all(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    assert segment.place_of(BlockKey(0, 0)) is None
    assert segment.place_of(key(1)) is None


def test_the_key_of_zeros_is_a_key_like_any_other(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    fill(segment, 0, BlockKey(0, 0))
    assert segment.place_of(BlockKey(0, 0)) == 0


def test_keys_that_share_a_line_and_a_tag_are_told_apart(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    one, other = BlockKey(8, 1), BlockKey(8, 2)
    fill(segment, 0, one)
    fill(segment, 1, other)
    assert (segment.place_of(one), segment.place_of(other)) == (0, 1)
    reader = reader_of(segment)
    assert reader.find(BlockKey(8, 3), epoch=1) is None
    assert reader.rejected == 0


def test_withdrawing_makes_a_block_unfindable_and_fails_copies_in_flight(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    fill(segment, 3, key(1))
    reader = reader_of(segment)
    found = reader.find(key(1), epoch=1)
    assert found is not None
    segment.invalidate(3)
    assert reader.find(key(1), epoch=1) is None
    assert not reader.still(*found)


def test_the_generation_alone_withdraws_even_if_the_hint_stays(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    fill(segment, 3, key(1))
    reader = reader_of(segment)
    segment._table.drop_hint = lambda place, k0: None  # type: ignore[method-assign]
    segment.invalidate(3)
    assert reader.find(key(1), epoch=1) is None
    assert reader.rejected == 1


def test_a_lost_hint_is_only_a_miss(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    fill(segment, 3, key(1))
    segment._table.clear_hints()
    assert segment.place_of(key(1)) is None


def test_a_reader_serves_exactly_its_own_epoch(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, epoch=5)
    fill(segment, 0, key(1))
    reader = reader_of(segment)
    assert [reader.find(key(1), epoch) is not None for epoch in (4, 5, 6)] == [False, True, False]


def test_a_new_epoch_hides_everything_older_at_once(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, epoch=5)
    fill(segment, 0, key(1))
    segment.set_epoch(6)
    assert segment.place_of(key(1)) is None
    fill(segment, 1, key(1))
    reader = reader_of(segment)
    found = reader.find(key(1), epoch=6)
    assert found is not None
    assert found.place == 1
    assert reader.header()["epoch"] == 6


def test_a_place_that_was_not_withdrawn_is_never_filled_again(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    fill(segment, 0, key(1))
    with pytest.raises(BookImbalance, match="place 0 was not withdrawn"):
        segment.publish(0, key(2), None)


def test_a_ninth_block_on_one_line_is_refused_until_one_of_them_goes(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, small(num_places=16))
    same_line = [BlockKey(16 * number << 32, number) for number in range(1, 10)]
    for place, block in enumerate(same_line[:8]):
        fill(segment, place, block)
    assert not segment.has_room(same_line[8])
    with pytest.raises(BookImbalance, match="no room"):
        segment.publish(9, same_line[8], None)
    segment.invalidate(4)
    assert segment.has_room(same_line[8])
    fill(segment, 9, same_line[8])
    assert [segment.place_of(block) for block in same_line] == [0, 1, 2, 3, None, 5, 6, 7, 9]


def test_hints_of_an_older_epoch_make_room_for_new_ones(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, small(num_places=16))
    same_line = [BlockKey(16 * number << 32, number) for number in range(1, 10)]
    for place, block in enumerate(same_line[:8]):
        fill(segment, place, block)
    segment.set_epoch(2)
    fill(segment, 9, same_line[8])
    assert segment.place_of(same_line[8]) == 9


@pytest.mark.parametrize("stored", range(9))
@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("stop", [3, 7, 8])
def test_the_longest_prefix_ends_where_the_chain_does(tmp_path: Path, stored: int, start: int, stop: int) -> None:
    segment = open_segment(tmp_path)
    chain = keys(range(8))
    for place in range(stored):
        fill(segment, place, chain[place])
    expected = max(start, min(stored, stop))
    assert segment.longest_prefix(chain, start, stop) == expected
    assert reader_of(segment).longest_prefix(chain.__getitem__, start, stop, epoch=1) == expected


def test_a_long_prefix_takes_few_probes(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, small(num_places=512))
    chain = keys(range(512))
    for place, block in enumerate(chain[:400]):
        fill(segment, place, block)
    probed: list[int] = []

    def at(index: int) -> BlockKey:
        probed.append(index)
        return chain[index]

    assert segment.longest_prefix(at, 0, 512) == 400
    assert len(probed) <= 18
    assert len(set(probed)) == len(probed)


def test_a_prefix_with_a_hole_is_never_longer_than_its_last_present_block(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    chain = keys(range(8))
    for place in (0, 1, 3, 4):
        fill(segment, place, chain[place])
    end = segment.longest_prefix(chain, 0, 8)
    assert end in (2, 5)


def test_a_segment_is_private_and_fully_allocated(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, small(num_places=64, place_bytes=4096))
    status = os.stat(segment.path)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == segment.geometry.file_bytes
    assert status.st_blocks * 512 >= status.st_size
    assert sorted(os.listdir(tmp_path)) == [SEGMENT_NAME]


def test_a_live_owner_is_not_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xinference.model.llm.vllm.xavier.directory.segment.LOCK_WAIT_SECONDS", 0.02)
    segment = open_segment(tmp_path)
    with pytest.raises(SegmentRefused, match="locked by a live process") as refusal:
        open_segment(tmp_path)
    assert not refusal.value.permanent
    segment.close()
    open_segment(tmp_path).close()


def test_a_live_owner_that_adopted_is_not_adopted_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "LOCK_WAIT_SECONDS", 0.0)
    open_segment(tmp_path).close()
    open_segment(tmp_path, incarnation=8)
    with pytest.raises(SegmentRefused, match="locked by a live process"):
        open_segment(tmp_path, incarnation=9)


def test_a_file_replaced_while_its_lock_was_taken_is_not_the_one_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_segment(tmp_path).close()
    flock, others = files.fcntl.flock, []

    def be_overtaken(fd: int, operation: int) -> None:
        monkeypatch.setattr(files.fcntl, "flock", flock)
        os.unlink(tmp_path / SEGMENT_NAME)
        others.append(open_segment(tmp_path, incarnation=9))
        flock(fd, operation)

    monkeypatch.setattr(segment_module, "LOCK_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(files.fcntl, "flock", be_overtaken)
    with pytest.raises(SegmentRefused, match="locked by a live process"):
        open_segment(tmp_path, incarnation=8)
    others[0].close()
    open_segment(tmp_path, incarnation=8).close()


def test_a_successor_adopts_what_its_predecessor_published(tmp_path: Path) -> None:
    first = open_segment(tmp_path, incarnation=7)
    chain = keys(range(3))
    for place, block in zip((5, 2, 4), chain, strict=True):
        fill(first, place, block, parent=chain[chain.index(block) - 1] if block != chain[0] else None)
    first.counters.add("steps", 3)
    reader = reader_of(first)
    first.close()
    second = open_segment(tmp_path, incarnation=8)
    assert list(second.adopted) == [(5, chain[0], None), (2, chain[1], chain[0]), (4, chain[2], chain[1])]
    assert second.longest_prefix(chain, 0, 3) == 3
    assert bytes(second.slab_view()[2 * 64 : 3 * 64]) == content(chain[1], 64)
    assert second.counters.value("steps") == 3
    assert second.counters.value("adopted_blocks") == 3
    assert reader.replaced()
    assert reader.header()["adoptions"] == 1
    assert reader.header()["used_places"] == 3
    with pytest.raises(BookImbalance, match="not withdrawn"):
        second.publish(5, key(9), None)


def test_while_a_successor_takes_over_nobody_seems_to_be_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_segment(tmp_path)
    reader = reader_of(first)
    first.close()
    seen = []
    real = segment_module.start_ticks

    def watch(pid: int) -> int | None:
        seen.append(reader.alive())
        return real(pid)

    monkeypatch.setattr(segment_module, "start_ticks", watch)
    open_segment(tmp_path, incarnation=8)
    assert seen == [False]
    assert reader.alive()


def test_generations_survive_an_adoption_so_a_slow_reader_notices_reuse(tmp_path: Path) -> None:
    first = open_segment(tmp_path)
    fill(first, 0, key(1))
    reader = reader_of(first)
    found = reader.find(key(1), epoch=1)
    assert found is not None
    first.close()
    second = open_segment(tmp_path, incarnation=8)
    assert reader.still(*found)
    fill(second, 0, key(2))
    assert not reader.still(*found)


@pytest.mark.parametrize("word", range(8))
def test_a_record_that_the_predecessor_left_half_written_is_withdrawn(tmp_path: Path, word: int) -> None:
    first = open_segment(tmp_path)
    fill(first, 0, key(1))
    fill(first, 1, key(2))
    first._table._records[8 + word] ^= 4  # place 1
    generation = first._table.generation(1)
    first.close()
    second = open_segment(tmp_path, incarnation=8)
    assert [adopted.key for adopted in second.adopted] == [key(1)]
    assert second._table.generation(1) == generation + 1


def test_a_block_without_a_hint_is_found_again_after_adoption(tmp_path: Path) -> None:
    first = open_segment(tmp_path)
    fill(first, 0, key(1))
    first._table.clear_hints()
    first.close()
    assert open_segment(tmp_path, incarnation=8).place_of(key(1)) == 0


def test_of_two_places_with_one_key_the_newer_is_adopted(tmp_path: Path) -> None:
    first = open_segment(tmp_path)
    fill(first, 6, key(1))
    fill(first, 2, key(1))
    first.close()
    second = open_segment(tmp_path, incarnation=8)
    assert [adopted.place for adopted in second.adopted] == [2]
    assert second.place_of(key(1)) == 2
    assert second.key_of(6) is None  # withdrawn: somebody may be copying it, and the place counts as free


def test_blocks_of_another_epoch_are_not_adopted(tmp_path: Path) -> None:
    first = open_segment(tmp_path, epoch=1)
    fill(first, 0, key(1))
    first.set_epoch(2)
    fill(first, 1, key(2))
    first.close()
    second = open_segment(tmp_path, incarnation=8, epoch=2)
    assert [adopted.key for adopted in second.adopted] == [key(2)]
    second.close()
    assert len(open_segment(tmp_path, incarnation=9, epoch=3).adopted) == 0


def test_adopted_blocks_are_read_on_demand_and_the_list_can_be_dropped(tmp_path: Path) -> None:
    first = open_segment(tmp_path)
    for place in range(4):
        fill(first, place, key(place))
    first.close()
    second = open_segment(tmp_path, incarnation=8)
    assert [adopted.place for adopted in second.adopted[1:3]] == [1, 2]
    second.invalidate(0)
    with pytest.raises(LookupError, match="withdrawn after it was adopted"):
        second.adopted[0]
    second.forget_adopted()
    assert len(second.adopted) == 0


def test_publish_order_goes_on_after_an_adoption(tmp_path: Path) -> None:
    first = open_segment(tmp_path)
    fill(first, 5, key(1))
    first.close()
    second = open_segment(tmp_path, incarnation=8)
    fill(second, 1, key(2), parent=key(1))
    second.close()
    assert [adopted.place for adopted in open_segment(tmp_path, incarnation=9).adopted] == [5, 1]


@pytest.mark.parametrize("other", [small(num_places=9), small(place_bytes=128), small(request_records=5)])
def test_a_segment_of_another_geometry_is_replaced_by_a_new_file(tmp_path: Path, other: SegmentGeometry) -> None:
    first = open_segment(tmp_path)
    fill(first, 0, key(1))
    reader = reader_of(first)
    first.close()
    second = open_segment(tmp_path, other)
    assert second.place_of(key(1)) is None
    assert reader.replaced()
    assert reader.find(key(1), epoch=1) is not None  # the old mapping stays readable
    assert sorted(os.listdir(tmp_path)) == [SEGMENT_NAME]


def test_a_file_of_rubbish_is_replaced(tmp_path: Path) -> None:
    (tmp_path / SEGMENT_NAME).write_bytes(b"rubbish")
    segment = open_segment(tmp_path)
    fill(segment, 0, key(1))
    assert segment.place_of(key(1)) == 0


def test_a_segment_of_no_use_is_gone_before_its_successor_takes_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / SEGMENT_NAME).write_bytes(b"rubbish")

    def create(path: str, num_bytes: int) -> NoReturn:
        raise SharedMemoryFull(f"found {os.listdir(tmp_path)}")

    monkeypatch.setattr(segment_module, "create_file", create)
    with pytest.raises(SharedMemoryFull, match=r"found \[\]"):
        open_segment(tmp_path)


def test_a_failed_adoption_leaves_the_segment_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_segment(tmp_path)
    fill(first, 0, key(1))
    first.close()

    def fail(*_: object) -> NoReturn:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(segment_module, "adopt_records", fail)
        with pytest.raises(MemoryError):
            open_segment(tmp_path, incarnation=8)
    monkeypatch.setattr(segment_module, "LOCK_WAIT_SECONDS", 0.0)
    assert len(open_segment(tmp_path, incarnation=9).adopted) == 1


def test_a_failed_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(segment_module, "write_static", fail)
        with pytest.raises(MemoryError):
            open_segment(tmp_path)
    assert os.listdir(tmp_path) == []


def test_of_two_processes_that_make_one_segment_the_later_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_header, made = segment_module.write_static, []

    def be_overtaken(words: memoryview, geometry: SegmentGeometry) -> None:
        monkeypatch.setattr(segment_module, "write_static", make_header)
        made.append(open_segment(tmp_path, incarnation=9))
        make_header(words, geometry)

    monkeypatch.setattr(segment_module, "write_static", be_overtaken)
    with pytest.raises(SegmentRefused, match="made by another process meanwhile") as refusal:
        open_segment(tmp_path, incarnation=7)
    assert not refusal.value.permanent
    assert os.listdir(tmp_path) == [SEGMENT_NAME]
    assert reader_of(made[0], incarnation=9).alive()


def test_opening_adopting_replacing_and_closing_leave_no_descriptor_open(tmp_path: Path) -> None:
    def cycle() -> None:
        for geometry in (small(), small(), small(num_places=9)):
            segment = open_segment(tmp_path, geometry)
            reader_of(segment).close()
            segment.close()
        with pytest.raises(SegmentRefused):
            SegmentReader.open(str(tmp_path), expected_incarnation=None)

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    cycle()
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_twice_and_closing_with_views_held_is_harmless(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    fill(segment, 0, key(1))
    slab = segment.slab_view()
    segment.close()
    segment.close(unlink=True)
    assert bytes(slab[:64]) == content(key(1), 64)
    assert (tmp_path / SEGMENT_NAME).exists()


def test_a_closed_segment_refuses_every_store(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    segment.close()
    entry = RequestEntry(bytes(16), "running", 1)
    for store in (
        lambda: segment.publish(0, key(1), None),
        lambda: segment.invalidate(0),
        lambda: segment.counters.add("steps"),
        lambda: segment.requests.write(entry),
        lambda: segment.set_epoch(2),
        segment.slab_view,
    ):
        with pytest.raises(ValueError, match="released memoryview"):
            store()


def test_unlinking_removes_only_the_own_file(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    os.unlink(segment.path)
    Path(segment.path).write_bytes(b"somebody else's")
    segment.close(unlink=True)
    assert Path(segment.path).read_bytes() == b"somebody else's"


def test_a_reader_of_another_incarnation_is_refused_for_now(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, incarnation=7)
    with pytest.raises(SegmentRefused, match="incarnation 0000000000000007, not 0000000000000008") as refusal:
        reader_of(segment, incarnation=8)
    assert not refusal.value.permanent
    assert reader_of(segment, incarnation=None).owner_incarnation() == 7


def test_a_segment_that_does_not_exist_is_refused_for_now(tmp_path: Path) -> None:
    with pytest.raises(SegmentRefused, match="does not exist") as refusal:
        SegmentReader.open(str(tmp_path / SEGMENT_NAME), expected_incarnation=None)
    assert not refusal.value.permanent


def test_a_reader_sees_counters_requests_and_header(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, epoch=3)
    reader = reader_of(segment)
    segment.counters.add("steps", 5)
    segment.set_used(2, 128)
    segment.confirm_epoch(3)
    entry = RequestEntry(bytes(range(16)), "finished", 7, sources=(7, 0, 0, 0, 0, 0, 0, 0))
    segment.requests.write(entry)
    assert reader.counters()["steps"] == 5
    assert reader.find_request(bytes(range(16))) == [entry]
    assert reader.requests_since(0) == ([entry], 1)
    header = reader.header()
    assert (header["epoch_confirmed"], header["used_places"], header["used_bytes"], header["pid"]) == (3, 2, 128, os.getpid())
    assert (header["state"], header["num_places"]) == (layout.State.OPEN, 8)


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    reader = reader_of(open_segment(tmp_path))
    with pytest.raises(TypeError, match="read-only"):
        reader.slab_view()[0] = 1


def test_a_closed_reader_raises_instead_of_touching_memory(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    fill(segment, 0, key(1))
    reader = reader_of(segment)
    slab = reader.slab_view()
    reader.close()
    with pytest.raises(ValueError, match="is closed"):
        reader.find(key(1), epoch=1)
    assert bytes(slab[:8]) == content(key(1), 64)[:8]


def test_a_reader_knows_that_its_file_was_removed(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    reader = reader_of(segment)
    assert not reader.replaced()
    segment.close(unlink=True)
    assert reader.replaced()


def test_this_process_is_alive_and_a_wrong_start_time_is_not(tmp_path: Path) -> None:
    segment = open_segment(tmp_path)
    reader = reader_of(segment)
    assert reader.alive()
    segment._header[layout.Word.START_TICKS] += 1
    assert not reader.alive()


@pytest.mark.parametrize("machine", ["aarch64", "riscv64", "", "armv7l"])
def test_machines_that_reorder_stores_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    segment = open_segment(tmp_path)
    monkeypatch.setattr(layout.platform, "machine", lambda: machine)
    with pytest.raises(PlatformRefused, match="needs x86-64"):
        open_segment(tmp_path / "other")
    with pytest.raises(PlatformRefused, match="needs x86-64"):
        reader_of(segment)

import gc
import tracemalloc
from pathlib import Path

import pytest

from xinference.model.llm.vllm.xavier import config
from xinference.model.llm.vllm.xavier.block.key import BlockKey
from xinference.model.llm.vllm.xavier.config import BOOK_BYTES_PER_PLACE
from xinference.model.llm.vllm.xavier.directory.segment import SegmentWriter
from xinference.model.llm.vllm.xavier.errors import BookImbalance
from xinference.model.llm.vllm.xavier.policy.admission import Doorkeeper
from xinference.model.llm.vllm.xavier.policy.placement import DECISION_BYTES_PER_PLACE, PlacementBook
from xinference.model.llm.vllm.xavier.store import tier as tier_module
from xinference.model.llm.vllm.xavier.store.tier import CpuTier, Reserved, ReserveRequest
from xinference.model.llm.vllm.xavier.test.segments import fill, key, keys, open_segment, small

CHAIN = keys(range(1, 10))


def make(directory: Path, num_places: int = 4, **opening: int) -> tuple[CpuTier, SegmentWriter]:
    segment = open_segment(directory, small(num_places=num_places), **opening)
    return CpuTier.of(segment), segment


def save(tier: CpuTier, chain: list[BlockKey], parent: BlockKey | None = None) -> list[bool]:
    """Reserve and publish a run, as an engine does."""
    reserved = tier.reserve(ReserveRequest(parent, chain))
    published = []
    for index, place in enumerate(reserved.places, reserved.first):
        published.append(tier.publish(place, chain[index], chain[index - 1] if index else parent))
        tier.check()
    return published


def test_a_saved_chain_is_found_as_a_prefix(tmp_path: Path) -> None:
    tier, _ = make(tmp_path)
    assert save(tier, CHAIN[:3]) == [True, True, True]
    assert tier.prefix(CHAIN, 0, 9) == 3
    assert (tier.used_blocks, tier.used_bytes) == (3, 192)
    assert tier.holds(CHAIN[2])
    assert not tier.holds(CHAIN[3])


def test_nothing_is_visible_before_it_is_published(tmp_path: Path) -> None:
    tier, _ = make(tmp_path)
    reserved = tier.reserve(ReserveRequest(None, CHAIN[:2]))
    assert reserved == Reserved(0, [0, 1], None)
    assert tier.prefix(CHAIN, 0, 9) == 0
    assert tier.used_blocks == 2
    tier.check()
    tier.publish(0, CHAIN[0], None)
    assert tier.prefix(CHAIN, 0, 9) == 1


def test_blocks_that_are_here_or_on_their_way_get_no_second_place(tmp_path: Path) -> None:
    tier, _ = make(tmp_path)
    save(tier, CHAIN[:1])
    tier.reserve(ReserveRequest(CHAIN[0], CHAIN[1:2]))
    assert tier.reserve(ReserveRequest(None, CHAIN[:3])) == Reserved(2, [2], None)
    assert tier.reserve(ReserveRequest(None, CHAIN[:3])) == Reserved(3, [], None)
    tier.check()


def test_a_full_tier_gives_up_tails_of_what_was_not_used_longest(tmp_path: Path) -> None:
    tier, segment = make(tmp_path)
    old, new = keys(range(20, 23)), keys(range(30, 32))
    save(tier, old)
    save(tier, new)
    assert tier.prefix(old, 0, 3) == 2
    assert tier.prefix(new, 0, 2) == 2
    assert segment.counters.value("evictions") == 1
    tier.check()


def test_touching_a_prefix_keeps_it(tmp_path: Path) -> None:
    tier, _ = make(tmp_path)
    one, two, three = keys(range(20, 22)), keys(range(30, 32)), keys(range(40, 42))
    save(tier, one)
    save(tier, two)
    tier.touch(one)
    save(tier, three)
    assert (tier.prefix(one, 0, 2), tier.prefix(two, 0, 2), tier.prefix(three, 0, 2)) == (2, 0, 2)


def test_an_evicted_place_is_withdrawn_before_its_bytes_can_be_overwritten(tmp_path: Path) -> None:
    tier, segment = make(tmp_path, num_places=1)
    save(tier, CHAIN[:1])
    generation = segment._table.generation(0)
    assert tier.reserve(ReserveRequest(None, keys([50]))).places == [0]
    assert segment._table.generation(0) == generation + 1
    assert segment.place_of(CHAIN[0]) is None


def test_pinned_places_are_not_given_up_and_their_refusal_is_counted(tmp_path: Path) -> None:
    tier, segment = make(tmp_path, num_places=2)
    save(tier, CHAIN[:2])
    places = tier.pin(CHAIN[:3])
    assert places == [0, 1]
    assert tier.reserve(ReserveRequest(None, keys([50, 51]))) == Reserved(0, [], "capacity")
    assert segment.counters.value("drops_capacity") == 2
    tier.unpin(places)
    assert len(tier.reserve(ReserveRequest(None, keys([50, 51]))).places) == 2
    tier.check()


def test_a_run_whose_parent_is_not_kept_is_refused(tmp_path: Path) -> None:
    tier, segment = make(tmp_path)
    assert tier.reserve(ReserveRequest(CHAIN[0], CHAIN[1:3])) == Reserved(0, [], "parent_gone")
    assert segment.counters.value("drops_parent") == 2
    assert tier.used_blocks == 0


def test_a_run_whose_beginning_is_kept_elsewhere_starts_on_its_own(tmp_path: Path) -> None:
    tier, _ = make(tmp_path)
    assert save(tier, CHAIN[3:5]) == [True, True]
    assert tier.prefix(CHAIN, 3, 9) == 5
    assert tier.prefix(CHAIN, 0, 9) == 0


def test_children_of_a_block_that_was_given_back_are_not_published(tmp_path: Path) -> None:
    tier, segment = make(tmp_path)
    reserved = tier.reserve(ReserveRequest(None, CHAIN[:3]))
    assert tier.publish(reserved.places[0], CHAIN[0], None)
    tier.give_back(reserved.places[1])
    tier.check()
    assert not tier.publish(reserved.places[2], CHAIN[2], CHAIN[1])
    tier.check()
    assert tier.prefix(CHAIN, 0, 9) == 1
    assert tier.used_blocks == 1
    assert segment.counters.value("drops_parent") == 1


def test_a_block_published_before_the_one_it_follows_is_refused_with_all_that_follows_it(tmp_path: Path) -> None:
    tier, segment = make(tmp_path, num_places=8)
    reserved = tier.reserve(ReserveRequest(None, CHAIN[:3]))
    assert not tier.publish(reserved.places[1], CHAIN[1], CHAIN[0])
    tier.check()
    assert tier.holds(CHAIN[0])
    assert not tier.holds(CHAIN[2])
    assert not tier.publish(reserved.places[2], CHAIN[2], CHAIN[1])
    assert segment.counters.value("drops_parent") == 2
    assert tier.publish(reserved.places[0], CHAIN[0], None)
    assert save(tier, CHAIN[:3]) == [True, True]
    assert tier.used_blocks == 3


def test_a_place_that_is_being_filled_is_never_handed_out_twice(tmp_path: Path) -> None:
    tier, _ = make(tmp_path, num_places=2)
    reserved = tier.reserve(ReserveRequest(None, CHAIN[:2]))
    tier.give_back(reserved.places[0])
    again = tier.reserve(ReserveRequest(None, keys([50, 51])))
    assert reserved.places[1] not in again.places
    tier.check()


def test_a_chain_whose_head_was_given_back_can_be_offered_again_at_once(tmp_path: Path) -> None:
    tier, _ = make(tmp_path, num_places=8)
    lost = tier.reserve(ReserveRequest(None, CHAIN[:3]))
    tier.give_back(lost.places[0])
    again = tier.reserve(ReserveRequest(None, CHAIN[:3]))
    assert (again.first, len(again.places), again.refused) == (0, 3, None)
    assert not set(again.places) & set(lost.places[1:])
    tier.check()
    for index in (1, 2):
        assert not tier.publish(lost.places[index], CHAIN[index], CHAIN[index - 1])
        tier.check()
    assert [tier.publish(place, CHAIN[index], CHAIN[index - 1] if index else None) for index, place in enumerate(again.places)] == [
        True
    ] * 3
    tier.check()
    assert tier.used_blocks == 3


def test_a_gap_before_a_run_of_its_own_is_filled_without_a_second_copy_of_the_run(tmp_path: Path) -> None:
    tier, _ = make(tmp_path, num_places=8)
    save(tier, CHAIN[2:4])
    filled = tier.reserve(ReserveRequest(None, CHAIN[:6]))
    assert (filled.first, len(filled.places), filled.refused, filled.end) == (0, 2, None, 2)
    rest = tier.reserve(ReserveRequest(CHAIN[1], CHAIN[2:6]))
    assert (rest.first, len(rest.places), rest.refused, rest.end) == (2, 2, None, 4)
    for reserved, offset in ((filled, 0), (rest, 2)):
        for index, place in enumerate(reserved.places, offset + reserved.first):
            assert tier.publish(place, CHAIN[index], CHAIN[index - 1] if index else None)
            tier.check()
    assert tier.prefix(CHAIN, 0, 9) == 6
    assert tier.used_blocks == 6
    tier.touch(CHAIN[:6])
    tier.check()


def test_a_gap_before_a_run_on_its_way_is_filled_without_a_second_place_for_the_run(tmp_path: Path) -> None:
    tier, _ = make(tmp_path, num_places=8)
    run = tier.reserve(ReserveRequest(None, CHAIN[2:4]))
    gap = tier.reserve(ReserveRequest(None, CHAIN[:4]))
    assert (gap.first, len(gap.places), gap.refused, gap.end) == (0, 2, None, 2)
    for reserved, offset in ((run, 2), (gap, 0)):
        for index, place in enumerate(reserved.places, offset):
            assert tier.publish(place, CHAIN[index], CHAIN[index - 1] if index % 2 else None)
            tier.check()
    assert tier.prefix(CHAIN, 0, 9) == 4


def test_touching_the_middle_of_a_chain_changes_nothing(tmp_path: Path) -> None:
    tier, _ = make(tmp_path)
    one = keys(range(20, 22))
    save(tier, one)
    save(tier, keys([30, 31]))
    tier.touch(one[1:])
    tier.check()
    save(tier, keys([40]))
    assert tier.prefix(one, 0, 2) == 1


def test_a_clear_empties_the_tier_and_says_how_much_it_freed(tmp_path: Path) -> None:
    tier, segment = make(tmp_path)
    save(tier, CHAIN[:3])
    assert tier.clear(2) == 192
    assert (tier.used_blocks, tier.prefix(CHAIN, 0, 9)) == (0, 0)
    assert segment.counters.value("cleared_blocks") == 3
    tier.check()
    assert save(tier, CHAIN[:4]) == [True] * 4
    assert tier.prefix(CHAIN, 0, 9) == 4


def test_a_block_that_was_being_filled_during_a_clear_is_not_published(tmp_path: Path) -> None:
    tier, segment = make(tmp_path)
    before = tier.reserve(ReserveRequest(None, CHAIN[:1]))
    assert tier.clear(2) == 0
    assert tier.used_blocks == 1
    after = tier.reserve(ReserveRequest(None, CHAIN[:1]))
    assert after.places != before.places
    assert not tier.publish(before.places[0], CHAIN[0], None)
    assert segment.counters.value("drops_epoch") == 1
    tier.check()
    assert tier.publish(after.places[0], CHAIN[0], None)
    tier.check()
    assert tier.used_blocks == 1


def test_a_block_being_filled_during_a_clear_can_be_given_back(tmp_path: Path) -> None:
    tier, _ = make(tmp_path)
    before = tier.reserve(ReserveRequest(None, CHAIN[:2]))
    tier.clear(2)
    after = tier.reserve(ReserveRequest(None, CHAIN[:2]))
    for place in before.places:
        tier.give_back(place)
        tier.check()
    assert tier.used_blocks == 2
    assert [tier.publish(place, CHAIN[index], CHAIN[0] if index else None) for index, place in enumerate(after.places)] == [True, True]


def test_pinned_places_outlive_a_clear_until_they_are_unpinned(tmp_path: Path) -> None:
    tier, _ = make(tmp_path)
    save(tier, CHAIN[:2])
    places = tier.pin(CHAIN[:2])
    assert tier.clear(2) == 0
    assert tier.used_blocks == 2
    assert tier.prefix(CHAIN, 0, 9) == 0
    tier.check()
    tier.unpin(places)
    assert tier.used_blocks == 0
    tier.check()


def test_a_full_line_of_the_index_refuses_a_block_and_keeps_the_books(tmp_path: Path) -> None:
    tier, segment = make(tmp_path, num_places=16)
    same_line = [BlockKey(16 * number << 32, number) for number in range(1, 11)]
    assert save(tier, same_line) == [True] * 8 + [False, False]
    assert segment.counters.value("drops_index_full") == 1
    assert segment.counters.value("drops_parent") == 1
    assert tier.used_blocks == 8


def test_content_never_offered_before_does_not_displace_what_was_reused(tmp_path: Path) -> None:
    tier, _ = make(tmp_path, num_places=20)
    good = keys(range(20, 24))
    save(tier, good)
    tier.touch(good)
    for number in range(100, 150):
        save(tier, keys([number]))
    assert tier.prefix(good, 0, 4) == 4


def test_what_was_offered_is_remembered_and_known_when_it_is_offered_again(tmp_path: Path) -> None:
    book, doorkeeper = PlacementBook(4), Doorkeeper(4)
    tier = CpuTier(open_segment(tmp_path, small(num_places=4)), book, doorkeeper)
    save(tier, CHAIN[:2])
    assert doorkeeper.num_seen(CHAIN) == 2
    assert [book.view(place).reused for place in (0, 1)] == [False, False]


def test_a_successor_rebuilds_the_tier_with_its_chains(tmp_path: Path) -> None:
    tier, segment = make(tmp_path)
    save(tier, CHAIN[:3])
    segment.close()
    second, adopting = make(tmp_path, incarnation=8)
    second.check()
    assert len(adopting.adopted) == 0  # entered, and the list let go
    assert second.prefix(CHAIN, 0, 9) == 3
    assert second.used_blocks == 3
    save(second, keys([50, 51]))
    assert second.prefix(CHAIN, 0, 9) == 2


def test_a_successor_drops_blocks_whose_parent_is_lost(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, small(num_places=4))
    for place, parent in ((0, None), (1, CHAIN[0]), (2, CHAIN[1])):
        fill(segment, place, CHAIN[place], parent)
    segment._table.withdraw(1)
    segment.close()
    tier, segment = make(tmp_path, incarnation=8)
    tier.check()
    assert tier.used_blocks == 1
    assert segment.place_of(CHAIN[2]) is None


def test_a_successor_of_another_epoch_starts_empty(tmp_path: Path) -> None:
    tier, segment = make(tmp_path, epoch=1)
    save(tier, CHAIN[:3])
    segment.close()
    second, _ = make(tmp_path, incarnation=8, epoch=2)
    second.check()
    assert second.used_blocks == 0


def test_blocks_on_their_way_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "FILLING_MAX_BLOCKS", 3)
    tier, segment = make(tmp_path, num_places=8)
    reserved = tier.reserve(ReserveRequest(None, CHAIN[:5]))
    assert reserved == Reserved(0, [0, 1, 2], "queue_full")
    assert segment.counters.value("drops_queue_full") == 2
    tier.publish(0, CHAIN[0], None)
    assert tier.reserve(ReserveRequest(CHAIN[2], CHAIN[3:5])) == Reserved(0, [3], "queue_full")


def test_the_header_says_what_the_books_say(tmp_path: Path) -> None:
    tier, segment = make(tmp_path)
    save(tier, CHAIN[:3])
    assert (segment._header[32], segment._header[33]) == (3, 192)
    tier.clear(2)
    assert (segment._header[32], segment._header[33]) == (0, 0)


def test_a_book_of_another_size_is_refused(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, small(num_places=4))
    with pytest.raises(BookImbalance, match="a book of 5 places for a segment of 4"):
        CpuTier(segment, PlacementBook(5), Doorkeeper(4))


def test_check_notices_a_record_that_vanished_and_one_that_appeared(tmp_path: Path) -> None:
    tier, segment = make(tmp_path)
    save(tier, CHAIN[:1])
    segment.invalidate(0)
    with pytest.raises(BookImbalance, match="place 0 is stored"):
        tier.check()
    segment.publish(0, CHAIN[0], None)
    tier.check()
    fill(segment, 2, key(50))
    with pytest.raises(BookImbalance, match="place 2 is free"):
        tier.check()


def test_no_more_memory_is_used_than_the_budget_sets_aside_for_books(tmp_path: Path) -> None:
    """Opening, adopting, entering and filling, on a full tier of as many places as make the fixed parts small."""
    geometry = small(num_places=20_000)
    segment = open_segment(tmp_path, geometry)
    for number in range(geometry.num_places):
        block = key(number)
        if segment.has_room(block):
            segment.publish(number, block, None)
    segment.close()
    new = keys(range(50_000, 50_000 + config.FILLING_MAX_BLOCKS))
    gc.collect()
    tracemalloc.start()
    segment = open_segment(tmp_path, geometry, incarnation=8)
    tier = CpuTier.of(segment)
    assert len(tier.reserve(ReserveRequest(None, new)).places) == config.FILLING_MAX_BLOCKS
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tier.used_blocks > 19_990
    assert peak <= geometry.book_bytes


def test_the_books_of_a_place_fit_into_what_the_budget_sets_aside() -> None:
    book, doorkeeper = PlacementBook(1000), Doorkeeper(1000)
    published = 1  # a byte a place in SegmentWriter
    assert book.nbytes() + doorkeeper.nbytes() == 1000 * DECISION_BYTES_PER_PLACE
    assert published + DECISION_BYTES_PER_PLACE <= BOOK_BYTES_PER_PLACE
    assert config.FILLING_MAX_BLOCKS == 1024

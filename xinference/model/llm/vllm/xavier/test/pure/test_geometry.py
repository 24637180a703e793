import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference.model.llm.vllm.xavier.config import BOOK_BYTES_PER_PLACE
from xinference.model.llm.vllm.xavier.directory import layout
from xinference.model.llm.vllm.xavier.directory.counters import COUNTERS, INDEX_BY_NAME
from xinference.model.llm.vllm.xavier.directory.geometry import plan_segment, segment_geometry, total_bytes
from xinference.model.llm.vllm.xavier.directory.layout import COUNTER_BYTES, MAX_PLACES, REQUEST_BYTES, Word, layout_word
from xinference.model.llm.vllm.xavier.directory.requests import END, RECORD_WORDS
from xinference.model.llm.vllm.xavier.errors import BudgetTooSmall


def test_a_budget_is_cut_into_header_counters_requests_index_records_and_slab() -> None:
    geometry = plan_segment(1 << 20, 4000, request_records=16)
    assert geometry.place_bytes == 4032
    assert geometry.num_places == 226
    assert geometry.counters_offset == 4096
    assert geometry.requests_offset == 8192
    assert geometry.hints_offset == 12288
    assert geometry.records_offset == 12288 + 226 * 64
    assert geometry.slab_offset == 45056
    assert geometry.file_bytes == 958464
    assert geometry.book_bytes == 16384 + 226 * (32 + 288)
    assert geometry.slab_bytes == 226 * 4032


@given(st.integers(1, 1 << 44), st.integers(1, 1 << 28), st.integers(1, 4096))
def test_file_and_books_never_exceed_the_budget_and_one_more_block_would(budget: int, block: int, records: int) -> None:
    try:
        geometry = plan_segment(budget, block, request_records=records)
    except BudgetTooSmall:
        assert total_bytes(segment_geometry(1, -(-block // 64) * 64, records)) > budget
        return
    assert total_bytes(geometry) <= budget
    assert geometry.place_bytes - block < 64
    if geometry.num_places < MAX_PLACES:
        assert total_bytes(segment_geometry(geometry.num_places + 1, geometry.place_bytes, records)) > budget


@given(st.integers(1 << 24, 1 << 40), st.integers(1 << 14, 1 << 20))
def test_nearly_all_of_a_large_budget_is_blocks(budget: int, block: int) -> None:
    geometry = plan_segment(budget, block, request_records=512)
    overhead = 160 + 64 + 288  # index, record and books of one place, rounding of the place, objects while it is being filled
    fixed = 3 * 4096 + 512 * REQUEST_BYTES + 8192 + 16384
    assert geometry.num_places * (geometry.place_bytes + overhead) + fixed + geometry.place_bytes + overhead > budget


@given(st.integers(1, 1 << 20), st.integers(1, 64), st.integers(1, 600))
def test_regions_follow_each_other_without_overlap(num_places: int, lines: int, records: int) -> None:
    geometry = segment_geometry(num_places, lines * 64, records)
    assert geometry.counters_offset + COUNTER_BYTES <= geometry.requests_offset
    assert geometry.requests_offset + records * REQUEST_BYTES <= geometry.hints_offset
    assert geometry.hints_offset + geometry.num_buckets * 64 <= geometry.records_offset
    assert geometry.records_offset + num_places * 64 <= geometry.slab_offset
    assert geometry.slab_offset + num_places * geometry.place_bytes <= geometry.file_bytes
    assert geometry.slab_offset % 4096 == geometry.file_bytes % 4096 == 0


def test_a_budget_without_room_for_one_block_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(BudgetTooSmall) as refusal:
        plan_segment(200_000, 196_608, request_records=16)
    assert str(refusal.value) == (
        "a CPU cache of 200000 bytes cannot hold one block: 196608 for the block + 16384 for header, counters, request records and index "
        "+ 16704 for in-process books, in whole pages of 4096 = 229696 bytes"
    )
    assert plan_segment(229_696, 196_608, request_records=16).num_places == 1


@pytest.mark.parametrize(
    "numbers", [(0, 64, 4), (MAX_PLACES + 1, 64, 4), (1, 0, 4), (1, 63, 4), (1, (1 << 40) + 64, 4), (1, 64, 0), (1, 64, 1 << 21)]
)
def test_impossible_numbers_have_no_geometry(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="has"):
        segment_geometry(*numbers)


def test_a_block_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        plan_segment(1 << 20, 0, request_records=4)


def test_header_counters_and_request_records_fit_their_regions() -> None:
    assert max(Word) < 512
    assert len(COUNTERS) <= 512
    assert len(INDEX_BY_NAME) == len(COUNTERS)
    assert END <= RECORD_WORDS == REQUEST_BYTES // 8
    assert BOOK_BYTES_PER_PLACE < 64
    assert 0 < layout_word() < 1 << 64


def test_check_words_are_the_same_in_processes_with_other_hash_seeds() -> None:
    code = (
        f"from {layout.__name__} import layout_word, record_check\nprint(layout_word(), record_check(1, 2**64 - 1, 2**63, 4, 5, 6, 7, 8))"
    )
    expected = f"{layout_word()} {layout.record_check(1, 2**64 - 1, 2**63, 4, 5, 6, 7, 8)}\n"
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert result.stdout == expected


def test_a_layout_with_other_check_words_is_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = layout_word()
    monkeypatch.setattr(layout, "record_check", lambda *words: sum(words))
    assert layout_word() != mine

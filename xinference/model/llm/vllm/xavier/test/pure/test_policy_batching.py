"""Batches: every block once, bounded, from one source each; contradictions before anything moves."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from xinference.model.llm.vllm.xavier.errors import ConflictingWrites
from xinference.model.llm.vllm.xavier.policy.batching import NULL_BLOCK, Batch, Piece, Read, cut_batches

MANY_BYTES = 1 << 40


def test_pieces_are_grouped_by_source_in_order_of_appearance() -> None:
    pieces = [Piece("b", 1, 11), Piece("a", 2, 12), Piece("b", 3, 13)]
    assert cut_batches(pieces, 64, MANY_BYTES, 1) == [
        Batch("b", (Read(1, (11,)), Read(3, (13,)))),
        Batch("a", (Read(2, (12,)),)),
    ]


def test_one_place_for_several_blocks_is_read_once() -> None:
    pieces = [Piece("a", 1, 11), Piece("a", 2, 12), Piece("a", 1, 13)]
    assert cut_batches(pieces, 64, MANY_BYTES, 1) == [Batch("a", (Read(1, (11, 13)), Read(2, (12,))))]


def test_equal_pieces_count_once() -> None:
    assert cut_batches([Piece("a", 1, 11)] * 3, 64, MANY_BYTES, 1) == [Batch("a", (Read(1, (11,)),))]


def test_the_null_block_is_never_written() -> None:
    assert cut_batches([Piece("a", 1, NULL_BLOCK), Piece("b", 2, NULL_BLOCK)], 64, MANY_BYTES, 1) == []


@pytest.mark.parametrize("second", [Piece("a", 2, 11), Piece("b", 1, 11)])
def test_two_contents_for_one_block_are_refused(second: Piece) -> None:
    with pytest.raises(ConflictingWrites, match="block 11"):
        cut_batches([Piece("a", 1, 11), second], 64, MANY_BYTES, 1)


def test_a_batch_ends_at_its_most_blocks() -> None:
    pieces = [Piece("a", place, place) for place in range(1, 6)]
    assert [batch.num_blocks for batch in cut_batches(pieces, 2, MANY_BYTES, 1)] == [2, 2, 1]


def test_a_batch_ends_at_its_most_bytes_but_moves_at_least_one_block() -> None:
    pieces = [Piece("a", place, place) for place in range(1, 4)]
    assert [batch.num_blocks for batch in cut_batches(pieces, 64, 250, 100)] == [2, 1]
    assert [batch.num_blocks for batch in cut_batches(pieces, 64, 99, 100)] == [1, 1, 1]


def test_a_place_for_more_blocks_than_a_batch_holds_is_read_again() -> None:
    pieces = [Piece("a", 1, block) for block in (11, 12, 13)]
    assert cut_batches(pieces, 2, MANY_BYTES, 1) == [Batch("a", (Read(1, (11, 12)),)), Batch("a", (Read(1, (13,)),))]


PIECES = st.lists(st.builds(Piece, st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 20)), max_size=60)


@given(pieces=PIECES, max_blocks=st.integers(1, 8), max_bytes=st.integers(1, 800))
def test_every_block_gets_its_content_once_in_bounded_batches(pieces: list[Piece], max_blocks: int, max_bytes: int) -> None:
    wanted = {piece for piece in pieces if piece.block != NULL_BLOCK}
    conflict = len({piece.block for piece in wanted}) < len(wanted)
    try:
        batches = cut_batches(pieces, max_blocks, max_bytes, 100)
    except ConflictingWrites:
        assert conflict
        return
    assert not conflict
    written = [Piece(batch.source, read.place, block) for batch in batches for read in batch.reads for block in read.blocks]
    assert sorted(written) == sorted(wanted)
    for batch in batches:
        assert 1 <= batch.num_blocks <= max(1, min(max_blocks, max_bytes // 100))
        assert len({read.place for read in batch.reads}) == len(batch.reads)

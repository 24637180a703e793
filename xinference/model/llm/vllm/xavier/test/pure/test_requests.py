from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference.model.llm.vllm.xavier.directory.requests import RECORD_WORDS, SOURCES, RequestEntry, RequestLog, RequestRing

ONE, TWO, THREE = (bytes([number]) * 16 for number in (1, 2, 3))


def make(num_records: int = 2) -> tuple[RequestRing, RequestLog, memoryview]:
    words = memoryview(array("Q", bytes(8 * RECORD_WORDS * num_records)))
    cursor = memoryview(array("Q", bytes(16)))
    return RequestRing(words, cursor), RequestLog(words.toreadonly(), cursor.toreadonly()), words


def entry(request: bytes, state: str = "running", **changes: int) -> RequestEntry:
    return RequestEntry(request=request, state=state, prompt_tokens=100, sources=(1, 2, 3, 4, 5, 6, 7, 72), **changes)


def test_a_record_is_found_by_its_request() -> None:
    ring, log, _ = make()
    ring.write(entry(ONE, queued_us=11, finished_us=16))
    ring.write(entry(TWO))
    assert log.find(ONE) == [entry(ONE, queued_us=11, finished_us=16)]
    assert log.find(THREE) == []


def test_an_updated_record_replaces_itself() -> None:
    ring, log, _ = make()
    slot = ring.write(entry(ONE))
    assert ring.update(slot, entry(ONE, "finished", output_tokens=9)) == slot
    assert log.find(ONE) == [entry(ONE, "finished", output_tokens=9)]


def test_two_legs_of_one_request_are_both_found_oldest_change_first() -> None:
    ring, log, _ = make()
    first = ring.write(entry(ONE))
    ring.write(entry(ONE, "failed"))
    ring.update(first, entry(ONE, "finished"))
    assert [found.state for found in log.find(ONE)] == ["failed", "finished"]


def test_the_oldest_record_makes_room() -> None:
    ring, log, _ = make(num_records=2)
    for request in (ONE, TWO, THREE):
        ring.write(entry(request))
    assert log.find(ONE) == []
    assert log.find(TWO) == [entry(TWO)]
    assert log.find(THREE) == [entry(THREE)]


def test_an_update_after_the_ring_went_round_writes_a_new_record_and_spoils_no_other() -> None:
    ring, log, _ = make(num_records=2)
    slot = ring.write(entry(ONE))
    ring.write(entry(TWO))
    ring.write(entry(THREE))
    moved = ring.update(slot, entry(ONE, "finished"))
    assert moved != slot
    assert log.find(ONE) == [entry(ONE, "finished")]
    assert log.find(THREE) == [entry(THREE)]
    assert ring.update(moved, entry(ONE, "aborted")) == moved


def test_a_reader_gets_what_changed_since_it_last_looked_and_nothing_twice() -> None:
    ring, log, _ = make(num_records=4)
    slot = ring.write(entry(ONE))
    ring.write(entry(TWO))
    found, update = log.since(0)
    assert found == [entry(ONE), entry(TWO)]
    assert log.since(update) == ([], update)
    ring.update(slot, entry(ONE, "finished"))
    assert log.since(update)[0] == [entry(ONE, "finished")]


@given(st.integers(0, RECORD_WORDS - 1), st.integers(1, (1 << 64) - 1))
def test_a_record_with_any_word_changed_is_skipped(offset: int, change: int) -> None:
    ring, log, words = make()
    ring.write(entry(ONE, queued_us=1))
    words[offset] ^= change
    assert log.find(ONE) == [] or offset >= 23  # words behind the last one in use mean nothing
    assert log.since(0)[0] in ([], [entry(ONE, queued_us=1)])


@given(st.integers(0, 22), st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 9))
def test_a_record_caught_between_two_updates_is_skipped(num_stored: int, tokens: list[int], output: int) -> None:
    ring, log, words = make()
    slot = ring.write(entry(ONE))
    old = list(words[:RECORD_WORDS])
    ring.update(slot, RequestEntry(ONE, "first_token", sum(tokens), tuple(tokens), output_tokens=output, first_token_us=output))
    new = list(words[:RECORD_WORDS])
    words[1 : 1 + num_stored] = memoryview(array("Q", new[1 : 1 + num_stored]))
    words[1 + num_stored : RECORD_WORDS] = memoryview(array("Q", old[1 + num_stored :]))
    for check, whole in ((old[0], old), (new[0], new)):
        words[0] = check
        assert (log.find(ONE) != []) == (list(words[:RECORD_WORDS]) == whole)


def test_a_record_whose_writer_died_half_way_is_skipped() -> None:
    ring, log, words = make()
    ring.write(entry(ONE))
    words[0] = 0
    assert log.find(ONE) == []


def test_an_entry_with_a_wrong_id_state_or_number_of_sources_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        RequestEntry(b"short", "running", 1)
    with pytest.raises(ValueError, match="unknown request state: lost"):
        RequestEntry(ONE, "lost", 1)
    with pytest.raises(ValueError, match=f"{len(SOURCES)} numbers, not 1"):
        RequestEntry(ONE, "running", 1, sources=(1,))

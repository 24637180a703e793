"""What is remembered of requests, and how it is put together with what replicas accounted for them."""

from typing import Any

from xinference.api.history import History, Past, combined, listing

SOURCES = {"local": 16, "cpu_tier": 0, "computed": 4}


def past(number: int, request_id: str | None = None, **more: Any) -> Past:
    return Past(request_id or f"id-{number}", f"{number:032x}", "m", "completions", more.pop("num_choices", 1), 1000.0 + number, **more)


def record(number: int, queued: float | None = None, **more: Any) -> dict[str, Any]:
    begun = {"queued": queued or 1000.5 + number, "scheduled": None, "load_started": None, "loaded": None}
    return {
        "request_id": f"{number:032x}", "model_uid": "m", "replica_uid": "m-1", "state": "finished", "prompt_tokens": 20,
        "output_tokens": 3, "sources": SOURCES, "cached_tokens": 16, "pre_clear_tokens": 8, "recomputed_tokens": 0,
        "times": {**begun, "first_token": 3.0, "finished": 4.0}, **more,
    }  # fmt: skip


def test_the_oldest_request_makes_room_and_that_is_told() -> None:
    history = History(2)
    assert [history.add(past(number)) for number in range(3)] == [False, False, True]
    assert [one.request_id for one in history] == ["id-2", "id-1"]
    assert history.find("id-0") is None


def test_a_request_is_found_by_either_of_its_ids() -> None:
    history = History(5)
    mine = past(7, "mine")
    history.add(mine)
    assert history.find("mine") is mine
    assert history.find(f"{7:032x}") is mine


def test_of_requests_with_one_id_the_newest_is_found() -> None:
    history = History(5)
    for number in range(3):
        history.add(past(number, "same"))
    found = history.find("same")
    assert found is not None
    assert found.request_hex == f"{2:032x}"


def test_outcomes_are_states_and_error_codes() -> None:
    states = []
    for outcome in ("ok", "client_disconnected", "request_aborted", "slow_reader", "engine_dead"):
        one = past(1)
        one.ended(outcome)
        states.append((one.state, one.error))
    assert states == [
        ("finished", None), ("aborted", "client_disconnected"), ("aborted", "request_aborted"), ("aborted", "slow_reader"),
        ("failed", "engine_dead"),
    ]  # fmt: skip


def test_a_request_without_a_record_has_the_replicas_figures_and_invents_no_sources() -> None:
    one = past(1, replica_uid="m-0")
    one.settled({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}})
    found = combined(one, None)
    assert (found["prompt_tokens"], found["output_tokens"], found["cached_tokens"], found["sources"]) == (9, 2, 4, None)
    assert found["times"] == {
        "received": 1001.0, "queued": None, "scheduled": None, "load_started": None, "loaded": None, "first_token": None, "finished": None,
    }  # fmt: skip


def test_a_record_adds_sources_and_phases_to_what_the_client_saw() -> None:
    one = past(1, "mine", replica_uid="m-0", finished=1009.0, state="aborted", error="client_disconnected")
    found = combined(one, record(1))
    assert (found["request_id"], found["accounting_id"]) == ("mine", f"{1:032x}")
    assert (found["state"], found["error"]) == ("aborted", "client_disconnected")
    assert (found["sources"], found["pre_clear_tokens"]) == (SOURCES, 8)
    assert found["times"]["received"] == 1001.0
    assert found["times"]["queued"] == 1001.5
    assert (found["times"]["first_token"], found["times"]["finished"]) == (3.0, 1009.0)
    assert "legs" not in found


def test_the_choices_of_a_request_count_its_prompt_once() -> None:
    legs = [record(1, 5.0, sources={"local": 0, "cpu_tier": 0, "computed": 20}), record(1, 6.0)]
    found = combined(past(1, num_choices=2), record(1, legs=legs, prompt_tokens=40))
    assert (found["prompt_tokens"], found["cached_tokens"], found["output_tokens"]) == (20, 0, 6)


def test_a_listing_holds_each_request_once_newest_first_and_those_that_came_another_way() -> None:
    rows = listing([past(3, "mine"), past(1)], [record(3), record(2)], limit=10)
    assert [row["request_id"] for row in rows] == ["mine", f"{2:032x}", "id-1"]
    assert [row["sources"] for row in rows] == [SOURCES, SOURCES, None]
    assert [row["request_id"] for row in listing([past(3), past(1)], [record(2)], limit=1)] == ["id-3"]

"""What the accounting records of one request say together, read from a segment that an engine has written."""

from pathlib import Path
from typing import Any

from xinference.core.cache_view import CacheView
from xinference.core.clock import SystemClock
from xinference.core.machine import Machine
from xinference.core.orders import CacheOrder, ReplicaOrder
from xinference.core.request_legs import merge
from xinference.core.runner import Watch
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES, RequestEntry
from xinference.model.llm.vllm.xavier.test.segments import open_segment, small

ONE, TWO = b"\x01" * 16, b"\x02" * 16


def entry(request: bytes = ONE, local: int = 0, peer: int = 0, computed: int = 0, state: str = "finished", **more: Any) -> RequestEntry:
    tokens = {"local": local, "peer_cpu": peer, "computed": computed}
    sources = tuple(tokens.get(source, 0) for source in SOURCES)
    return RequestEntry(request=request, state=state, prompt_tokens=sum(sources), sources=sources, **more)


def view_of(directory: Path, *entries: RequestEntry) -> CacheView:
    segment = open_segment(directory, small(request_records=16))
    for each in entries:
        segment.requests.write(each)
    order = ReplicaOrder("m", "m-0", 7, "fake", "/m", ("m",), 16, 4096, 60.0, cache=CacheOrder(1 << 20, "identity", 1))
    return CacheView(Machine("w1", str(directory), str(directory), Watch()), order, SystemClock())


async def record(view: CacheView, request: bytes = ONE) -> dict[str, Any]:
    found = await view.wait_request(request.hex(), 0.0)
    assert found is not None
    return found


async def test_a_record_tells_of_tokens_from_before_a_clear(tmp_path: Path) -> None:
    found = await record(view_of(tmp_path, entry(local=32, computed=4, pre_clear_tokens=16)))
    assert found["pre_clear_tokens"] == 16
    assert "legs" not in found


async def test_the_prompts_of_one_body_are_added_up(tmp_path: Path) -> None:
    first = entry(peer=64, computed=3, output_tokens=5, recomputed_tokens=1, queued_us=10, first_token_us=30, finished_us=90)
    second = entry(local=16, computed=9, output_tokens=7, recomputed_tokens=2, queued_us=20, first_token_us=25, finished_us=80)
    found = await record(view_of(tmp_path, first, entry(TWO, local=1000), second))
    assert (found["prompt_tokens"], found["cached_tokens"]) == (92, 80)
    assert (found["output_tokens"], found["recomputed_tokens"]) == (12, 3)
    assert sum(found["sources"].values()) == 92
    times = found["times"]
    assert times["queued"] < times["first_token"] < times["finished"]
    assert [leg["prompt_tokens"] for leg in found["legs"]] == [67, 25]


async def test_a_request_is_accounted_for_when_all_its_prompts_are(tmp_path: Path) -> None:
    view = view_of(tmp_path, entry(local=16), entry(local=16, state="running"))
    assert await view.wait_request(ONE.hex(), 0.0) is None


async def test_a_request_has_ended_when_all_its_prompts_have(tmp_path: Path) -> None:
    found = await record(view_of(tmp_path, entry(local=1, finished_us=5), entry(local=1, state="first_token")))
    assert (found["state"], found["times"]["finished"]) == ("running", None)


async def test_the_choices_of_a_prompt_count_it_once_as_its_first_choice_found_it(tmp_path: Path) -> None:
    long = [entry(peer=64, computed=6, queued_us=10, scheduled_us=20), entry(local=64, computed=6, queued_us=11, scheduled_us=30)]
    # Both choices begin in one step: the one that had to compute is the one that the other found.
    short = [entry(local=16, computed=1, queued_us=13, scheduled_us=40), entry(computed=17, queued_us=12, scheduled_us=40)]
    found = merge((await record(view_of(tmp_path, *long, *short)))["legs"], num_choices=2)
    assert (found["prompt_tokens"], found["cached_tokens"]) == (87, 64)
    assert found["sources"] == {**dict.fromkeys(SOURCES, 0), "peer_cpu": 64, "computed": 23}


async def test_choices_of_prompts_of_one_length_are_told_apart_by_their_arrival(tmp_path: Path) -> None:
    legs = [
        entry(computed=20, queued_us=10, scheduled_us=40), entry(local=16, computed=4, queued_us=11, scheduled_us=41),
        entry(peer=16, computed=4, queued_us=20, scheduled_us=43), entry(local=16, computed=4, queued_us=21, scheduled_us=44),
    ]  # fmt: skip
    found = merge((await record(view_of(tmp_path, *reversed(legs))))["legs"], num_choices=2)
    assert (found["prompt_tokens"], found["cached_tokens"], found["sources"]["peer_cpu"]) == (40, 16, 16)


async def test_a_failed_prompt_is_the_state_of_its_request(tmp_path: Path) -> None:
    found = await record(view_of(tmp_path, entry(local=1), entry(local=1, state="aborted"), entry(local=1, state="failed")))
    assert found["state"] == "failed"


async def test_recent_requests_are_listed_once_each_newest_first(tmp_path: Path) -> None:
    view = view_of(tmp_path, entry(ONE, local=1), entry(TWO, local=2), entry(ONE, local=4))
    assert [(found["request_id"], found["prompt_tokens"]) for found in view.recent(10)] == [(ONE.hex(), 5), (TWO.hex(), 2)]
    assert [found["request_id"] for found in view.recent(1)] == [ONE.hex()]

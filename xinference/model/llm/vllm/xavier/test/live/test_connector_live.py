"""Two real vLLM engines on the CPU share blocks: the text is that of an engine without a connector, and every token is accounted for."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from xinference.model.llm.random_model import make_random_model
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter, ControlState, PeerEntry
from xinference.model.llm.vllm.xavier.directory.names import control_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES
from xinference.model.llm.vllm.xavier.test.live_engine import BLOCK, LiveEngine

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1500)


def prompt(number: int, length: int) -> list[int]:
    return [(number * 131 + index * 7) % 480 + 5 for index in range(length)]


def numbered(number: int) -> str:
    return f"{number:032x}"


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@dataclass
class Sharing:
    """A replica with its control page and a view of its segment."""

    config: XavierConfig
    page: ControlPageWriter
    engine: LiveEngine

    @property
    def entry(self) -> PeerEntry:
        return PeerEntry(self.config.worker_id, self.config.replica_uid, self.config.incarnation)

    def reader(self) -> SegmentReader:
        (path,) = Path(self.config.shm_dir).glob(f"xinference.w.{self.config.replica_uid}.*.seg")
        return SegmentReader.open(str(path), expected_incarnation=self.config.incarnation)

    def counter(self, name: str) -> int:
        return self.reader().counters()[name]

    def sources(self, request: str) -> dict[str, int]:
        (entry,) = self.reader().find_request(bytes.fromhex(request))
        assert sum(entry.sources) == entry.prompt_tokens
        return {source: tokens for source, tokens in zip(SOURCES, entry.sources, strict=True) if tokens}

    def settled(self) -> None:
        """Nothing is on its way into the slab any more: what is used was published."""
        header = self.reader().header
        until(lambda: header()["used_places"] == self.counter("saves_blocks") - self.counter("evictions") - self.counter("cleared_blocks"))


@dataclass
class Pair:
    """Two replicas that know each other, a plain engine's answers, and what makes more of them."""

    a: Sharing
    b: Sharing
    plain: dict[int, list[int]]
    start: Callable[[str, int], Sharing]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("live")
    model = make_random_model(directory / "model")
    shm = directory / "shm"
    shm.mkdir()
    started: list[LiveEngine] = []

    def launch(config: XavierConfig | None, name: str) -> LiveEngine:
        started.append(LiveEngine(model, config, directory / f"{name}.log"))
        return started[-1]

    def start(uid: str, incarnation: int) -> Sharing:
        config = XavierConfig("w", uid, incarnation, str(shm), 16 << 20, "random")
        page = ControlPageWriter.create(control_path(str(shm), "w", uid), ControlState(epoch=1))
        return Sharing(config, page, launch(config, f"{uid}{incarnation}"))

    control, a, b = launch(None, "plain"), start("a", 1), start("b", 2)
    try:
        control.wait_ready()
        plain = {length: control.ask(prompt(length, length))["tokens"][0] for length in LENGTHS}
        control.close()
        for replica in (a, b):
            replica.engine.wait_ready()
            replica.page.write(ControlState(epoch=1, peers=(a.entry, b.entry)))
        for replica in (a, b):
            until(lambda replica=replica: replica.counter("peer_attach_ok") == 1)
        yield Pair(a, b, plain, start)
    finally:
        for engine in started:
            engine.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_text_with_sharing_is_text_without(pair: Pair, length: int) -> None:
    cold = pair.a.engine.ask(prompt(length, length))
    pair.a.settled()
    shared = pair.b.engine.ask(prompt(length, length), request=numbered(length))
    assert cold["tokens"][0] == shared["tokens"][0] == pair.plain[length]
    expected = (length - 1) // BLOCK * BLOCK
    assert pair.b.sources(numbered(length)).get("peer_cpu", 0) == expected
    assert shared["cached"] == [expected]


def test_of_1500_tokens_46_blocks_come_from_the_peer_and_28_tokens_are_computed(pair: Pair) -> None:
    tokens = prompt(3, 1500)
    pair.a.engine.ask(tokens)
    pair.a.settled()
    pair.b.engine.ask(tokens, request=numbered(900))
    assert pair.b.sources(numbered(900)) == {"peer_cpu": 46 * BLOCK, "computed": 28}


def test_salts_do_not_meet_and_equal_salts_do(pair: Pair) -> None:
    tokens = prompt(7, 200)
    pair.a.engine.ask(tokens, salt="one")
    pair.a.settled()
    for number, salt, expected in ((901, "two", 0), (902, "", 0), (903, "one", 192)):
        pair.b.engine.ask(tokens, salt=salt, request=numbered(number))
        assert pair.b.sources(numbered(number)).get("peer_cpu", 0) == expected


def test_a_batch_of_requests_shares_and_keeps_its_text(pair: Pair) -> None:
    prompts = [prompt(20 + number, 150 + 40 * number) for number in range(6)]
    cold = pair.a.engine.ask(*prompts)["tokens"]
    pair.a.settled()
    loads = pair.b.counter("loads_async")
    assert pair.b.engine.ask(*prompts)["tokens"] == cold
    assert pair.b.counter("loads_async") == loads + 6
    assert pair.b.counter("hook_errors") == pair.a.counter("hook_errors") == 0


def test_prompt_logprobs_are_computed_and_not_loaded(pair: Pair) -> None:
    tokens = prompt(40, 100)
    pair.a.engine.ask(tokens)
    pair.a.settled()
    pair.b.engine.ask(tokens, request=numbered(940), sampling={"prompt_logprobs": 1})
    assert pair.b.sources(numbered(940)) == {"computed": 100}


def test_a_clear_is_confirmed_by_idle_engines_and_leaves_no_hit(pair: Pair) -> None:
    tokens = prompt(50, 300)
    before = pair.a.engine.ask(tokens)["tokens"]
    for replica in (pair.a, pair.b):
        replica.page.write(ControlState(epoch=2, peers=(pair.a.entry, pair.b.entry)))
    for replica in (pair.a, pair.b):
        until(lambda replica=replica: replica.reader().header()["epoch_confirmed"] == 2)
    assert pair.a.reader().header()["used_bytes"] == 0
    assert pair.a.engine.ask(tokens, request=numbered(951))["tokens"] == before
    assert pair.a.sources(numbered(951)) == {"computed": 300}
    pair.a.settled()
    assert pair.b.engine.ask(tokens, request=numbered(952))["tokens"] == before
    assert pair.b.sources(numbered(952)) == {"peer_cpu": 288, "computed": 12}


def test_a_killed_replica_is_adopted_by_its_next_start_and_the_other_serves_on(pair: Pair) -> None:
    tokens = prompt(60, 400)
    before = pair.a.engine.ask(tokens)["tokens"]
    pair.a.settled()
    pair.a.engine.kill()
    assert pair.b.engine.ask(tokens)["tokens"] == before
    pair.a.page.close()
    again = pair.start("a", 3)
    again.page.write(ControlState(epoch=2))
    again.engine.wait_ready()
    assert again.counter("adopted_blocks") >= 12
    assert again.engine.ask(tokens, request=numbered(960))["tokens"] == before
    assert again.sources(numbered(960)) == {"cpu_tier": 384, "computed": 16}

"""The fake engine with the real shared cache: hits across replicas, eviction, restarts, clears. Wrong bytes would give a wrong text."""

import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from xinference.model.llm.fake import vocabulary
from xinference.model.llm.fake.config import FakeConfig, Faults
from xinference.model.llm.fake.network import continuation
from xinference.model.llm.fake.shared_cache import namespace_of
from xinference.model.llm.test.replicas import SharingReplicas, eventually
from xinference.model.llm.vllm.xavier.directory.names import segment_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES

PROMPT = "the river and the stone " * 40
TOKENS = len(vocabulary.encode(PROMPT))
WHOLE_BLOCKS_TOKENS = (TOKENS - 1) // 16 * 16  # what a hit can give at most: whole blocks, never the last token
SLOW = Faults(prefill_ms_per_token=0.2)  # so that a load is worth it


class Group(SharingReplicas):
    """Replicas whose answers are checked against a model without any cache, and whose token sources are read from their records."""

    def reader(self, name: str) -> SegmentReader:
        config = self.replicas[name].config
        assert config.xavier is not None
        namespace = namespace_of(config, config.xavier["model_identity"])
        return SegmentReader.open(segment_path(str(self.shm_dir), "w0", name, namespace), expected_incarnation=None)

    async def ask(self, name: str, prompt: str = PROMPT, **fields: object) -> dict[str, int]:
        """Ask for 8 tokens; the text must be right. Returns the prompt's tokens by source."""
        request = uuid.uuid4()
        params = {"xavier": {"v": 1, "request": request.hex}}
        body = await self.replicas[name].complete(prompt, max_tokens=8, kv_transfer_params=params, **fields)
        assert body["choices"][0]["text"] == text_without_cache(prompt)
        segment = self.reader(name)
        entry = (await eventually(lambda: [e for e in segment.find_request(request.bytes) if e.state == "finished"]))[0]
        assert sum(entry.sources) == entry.prompt_tokens == body["usage"]["prompt_tokens"]
        return {source: count for source, count in zip(SOURCES, entry.sources, strict=True) if count}

    async def saved(self, name: str, tokens: int = WHOLE_BLOCKS_TOKENS) -> None:
        segment = self.reader(name)
        await eventually(lambda: segment.counters()["saves_blocks"] * 16 >= tokens)

    async def attached(self, name: str) -> None:
        segment = self.reader(name)
        await eventually(lambda: segment.counters()["peer_attach_ok"])


def text_without_cache(prompt: str) -> str:
    return vocabulary.decode(continuation(vocabulary.encode(prompt), 8, FakeConfig.eos_every), skip_specials=True)


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[Group]:
    async with Group(tmp_path, FakeConfig(faults=SLOW)) as replicas:
        yield replicas


async def test_a_prefix_computed_by_one_replica_is_loaded_by_another(group: Group) -> None:
    await group.launch("a")
    await group.launch("b")
    assert await group.ask("a") == {"computed": TOKENS}
    await group.saved("a")
    await group.attached("b")
    assert await group.ask("b") == {"peer_cpu": WHOLE_BLOCKS_TOKENS, "computed": TOKENS - WHOLE_BLOCKS_TOKENS}


async def test_evicted_blocks_come_back_from_the_own_tier(tmp_path: Path) -> None:
    config = FakeConfig(max_model_len=512, num_blocks=40, faults=SLOW)
    async with Group(tmp_path, config) as group:
        await group.launch("a")
        await group.ask("a")
        await group.saved("a")
        for i in range(3):
            await group.ask("a", f"{i} cold winter light " * 60)
        sources = await group.ask("a")
        assert sources["cpu_tier"] + sources.get("local", 0) == WHOLE_BLOCKS_TOKENS
        assert sources["cpu_tier"] > WHOLE_BLOCKS_TOKENS // 2


async def test_a_killed_replica_finds_its_saved_blocks_when_it_comes_back(group: Group) -> None:
    replica = await group.launch("a")
    await group.ask("a")
    await group.saved("a")
    process = replica.process
    assert process is not None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    await group.launch("a")
    assert (await group.ask("a"))["cpu_tier"] == WHOLE_BLOCKS_TOKENS


async def test_a_frozen_peer_delays_nobody(group: Group) -> None:
    replica = await group.launch("a")
    await group.launch("b")
    await group.ask("a")
    await group.saved("a")
    await group.attached("b")
    assert replica.process is not None
    frozen = psutil.Process(replica.process.pid)
    frozen.suspend()
    try:
        assert sum((await group.ask("b")).values()) == TOKENS
    finally:
        frozen.resume()


async def test_nothing_from_before_a_clear_is_served_after_it(group: Group) -> None:
    for name in ("a", "b"):
        await group.launch(name)
    await group.ask("a")
    await group.saved("a")
    await group.attached("b")
    group.clear()
    for name in ("a", "b"):
        segment = group.reader(name)
        await eventually(lambda segment=segment: segment.header()["epoch_confirmed"] == group.epoch)
        assert segment.header()["used_places"] == 0
    assert await group.ask("b") == {"computed": TOKENS}
    sources = await group.ask("a")
    assert set(sources) <= {"computed", "peer_cpu"}  # what b has computed since is younger than the clear


async def test_salts_keep_prefixes_apart_and_texts_equal(group: Group) -> None:
    for name in ("a", "b"):
        await group.launch(name)
    await group.ask("a", cache_salt="tenant one")
    await group.saved("a")
    await group.attached("b")
    assert await group.ask("b", cache_salt="tenant two") == {"computed": TOKENS}
    assert (await group.ask("b", cache_salt="tenant one"))["peer_cpu"] == WHOLE_BLOCKS_TOKENS


async def test_prompt_logprobs_are_computed_not_loaded(group: Group) -> None:
    for name in ("a", "b"):
        await group.launch(name)
    await group.ask("a")
    await group.saved("a")
    await group.attached("b")
    assert await group.ask("b", prompt_logprobs=1) == {"computed": TOKENS}


async def test_many_requests_of_one_prefix_are_all_right_and_add_up(group: Group) -> None:
    for name in ("a", "b"):
        await group.launch(name)
    await group.ask("a")
    await group.saved("a")
    await group.attached("b")
    results = [await group.ask("b", PROMPT + f"{i} and more") for i in range(6)]
    assert results[0]["peer_cpu"] == WHOLE_BLOCKS_TOKENS
    assert all(r.get("local", 0) >= WHOLE_BLOCKS_TOKENS for r in results[1:])


async def test_control_bytes_changed_behind_the_records_change_the_text(group: Group) -> None:
    """The control for all tests here: the fake does notice wrong bytes, so their right texts mean right bytes."""
    for name in ("a", "b"):
        await group.launch(name)
    await group.ask("a")
    await group.saved("a")
    await group.attached("b")
    path = next(group.shm_dir.glob("xinference.w0.a.*.seg"))
    replica_bytes = path.read_bytes()
    header = group.reader("a").header()
    with path.open("r+b") as file:  # flip a bit in every place of the slab
        start = header["slab_offset"]
        file.seek(start)
        file.write(bytes(b ^ 1 for b in replica_bytes[start:]))
    with pytest.raises(AssertionError):
        await group.ask("b")

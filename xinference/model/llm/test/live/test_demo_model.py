"""The demonstration's model on real vLLM with sharing on: fetched, converted, served, and it knows the capital of France."""

import asyncio
import os
import uuid
from pathlib import Path

import aiohttp

from xinference.model.llm.demo_model import ensure_demo_model
from xinference.model.llm.engine import EngineProcess
from xinference.model.llm.family import read_family
from xinference.model.llm.test.replicas import eventually
from xinference.model.llm.vllm.arguments import known_arguments
from xinference.model.llm.vllm.command import VllmStart, build_command
from xinference.model.llm.vllm.flavour import detect_flavour
from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.directory.control import ControlPageWriter, ControlState
from xinference.model.llm.vllm.xavier.directory.names import control_path
from xinference.model.llm.vllm.xavier.directory.reader import SegmentReader
from xinference.model.llm.vllm.xavier.directory.requests import SOURCES
from xinference.model.llm.weights import model_identity

READY_SECONDS = 150.0
QUESTION = "What is the capital of France?"
RULES = "You are a helpful assistant who answers in one short sentence. " * 8  # a few whole blocks to save


async def test_the_demo_model_answers_and_its_prefix_is_kept(tmp_path: Path) -> None:
    home, shm = tmp_path / "home", tmp_path / "shm"
    shm.mkdir()
    path = await asyncio.to_thread(ensure_demo_model, home)
    flavour = detect_flavour()
    xavier = XavierConfig("w0", "r0", 1, str(shm), 64 << 20, model_identity(path))
    page = ControlPageWriter.create(control_path(str(shm), "w0", "r0"), ControlState(epoch=1, peers=()))
    start = VllmStart(
        read_family(path), ("smollm2",), home / "run" / "e.sock", {"max_num_seqs": 8, "max_num_batched_tokens": 512},
        max_model_len=2048, kv_cache_bytes=256 << 20, num_threads=2, connector_config=xavier.to_wire(),
    )  # fmt: skip
    command = build_command(start, flavour, await known_arguments(home, flavour), os.environ)
    engine = EngineProcess(command.argv, command.env, start.uds, lambda line: None)
    try:
        await engine.start()
        await engine.wait_ready(READY_SECONDS)
        async with aiohttp.ClientSession("http://engine", connector=aiohttp.UnixConnector(str(start.uds))) as session:
            request = uuid.uuid4()
            body = {
                "messages": [{"role": "system", "content": RULES}, {"role": "user", "content": QUESTION}],
                "max_tokens": 16, "temperature": 0, "kv_transfer_params": {"xavier": {"v": 1, "request": request.hex}},
            }  # fmt: skip
            async with session.post("/v1/chat/completions", json=body) as response:
                answer = await response.json()
        assert "The capital of France is Paris" in answer["choices"][0]["message"]["content"]
        (file,) = shm.glob("xinference.w0.r0.*.seg")
        segment = SegmentReader.open(str(file), expected_incarnation=1)
        blocks = answer["usage"]["prompt_tokens"] // 32
        await eventually(lambda: segment.counters()["saves_blocks"] >= blocks)
        (entry,) = segment.find_request(request.bytes)
        assert dict(zip(SOURCES, entry.sources, strict=True))["computed"] == answer["usage"]["prompt_tokens"]
    finally:
        status = await engine.stop(10)
        page.close()
    assert status == 0

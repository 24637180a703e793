"""One vLLM engine on a GPU as a process, driven by JSON lines: `python -m benchmarks.gpu_engine '{"model": ..., "wire": ..., ...}'`.

In: {"id", "prompt", "max_tokens", "salt", "request", "abort_after"} for a request, {"op": "stats"} for vLLM's own counters.
Out, each line behind an `@`: {"ready"}, {"id", "tokens", "aborted"}, {"stats"}.
"""

import asyncio
import json
import sys
from typing import Any

CONNECTOR = "xinference.model.llm.vllm.xavier.connector.connector"


def transfer_config(wire: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the launcher gives an engine that shares; None for one that does not."""
    if wire is None:
        return None
    return {
        "kv_connector": "XavierConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": CONNECTOR,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": wire,
    }


def execution(kind: str) -> dict[str, Any]:
    """vLLM's arguments for an execution: "compiled" (its default), "graphs" (CUDA graphs of what is not compiled) or "eager"."""
    kinds: dict[str, dict[str, Any]] = {
        "compiled": {},
        "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
        "eager": {"enforce_eager": True},
    }
    return kinds[kind]


def say(answer: dict[str, Any]) -> None:
    """One line, marked, since vLLM writes to standard output too."""
    print(f"@{json.dumps(answer)}", flush=True)


async def answer(engine: Any, call: dict[str, Any]) -> None:
    """One request from beginning to end, or until it is to be aborted."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=call["max_tokens"], temperature=0, ignore_eos=True, detokenize=False)
    params.extra_args = {"kv_transfer_params": {"xavier": {"v": 1, "request": call["request"]}}}
    prompt = {"prompt_token_ids": call["prompt"], **({"cache_salt": call["salt"]} if call["salt"] else {})}
    tokens: list[int] = []
    limit = call["abort_after"]
    if limit == 0:  # before the first token: wherever it is by then
        task = asyncio.ensure_future(_collect(engine, prompt, params, call["id"], tokens))
        await asyncio.sleep(call["abort_delay"])
        await engine.abort(call["id"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        say({"id": call["id"], "tokens": tokens, "aborted": True})
        return
    aborted = False
    async for output in engine.generate(prompt, params, call["id"]):
        tokens = list(output.outputs[0].token_ids)
        if limit is not None and len(tokens) >= limit and not output.finished:
            await engine.abort(call["id"])
            aborted = True
            break
    say({"id": call["id"], "tokens": tokens, "aborted": aborted})


async def _collect(engine: Any, prompt: Any, params: Any, request_id: str, tokens: list[int]) -> None:
    async for output in engine.generate(prompt, params, request_id):
        tokens[:] = output.outputs[0].token_ids


def stats() -> dict[str, float]:
    """vLLM's counters of preemptions and of hits in external caches."""
    from prometheus_client import REGISTRY

    wanted = ("preemptions_total", "external_prefix_cache_hits_total", "prefix_cache_hits_total", "prompt_tokens_total")
    return {sample.name: sample.value for metric in REGISTRY.collect() for sample in metric.samples if sample.name.endswith(wanted)}


async def serve(start: dict[str, Any]) -> None:
    """Start the engine and answer standard input until it ends."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=start["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        async_scheduling=True,
        **execution(start["execution"]),
        kv_cache_memory_bytes=start["kv_cache_memory_bytes"],
        num_gpu_blocks_override=start["num_blocks"],
        block_size=start["block_size"],
        max_model_len=2048,
        max_num_batched_tokens=1024,
        max_num_seqs=32,
        enable_prefix_caching=start["prefix_caching"],
        kv_transfer_config=transfer_config(start["wire"]),  # type: ignore[arg-type]
    )
    engine = AsyncLLM.from_engine_args(arguments)
    say({"ready": True})
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks = set()
    while line := await reader.readline():
        call = json.loads(line)
        if call.get("op") == "stats":
            say({"stats": stats()})
            continue
        task = asyncio.create_task(answer(engine, call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))

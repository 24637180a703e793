"""Refusals and a plan, made by asking the very code that refuses and plans: the messages are what a user would read."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from typing import Any, Final

from rich.console import Console
from rst import block, code, table, text

from xinference.core.plan import LaunchPlan, plan_launch
from xinference.core.spec import parse_spec
from xinference.core.topology import HostFacts, ModelFacts, Snapshot, WorkerView
from xinference.deploy.output import facts_table
from xinference.deploy.plan_view import plan_rows
from xinference.errors import XinferenceError
from xinference.model.llm import sharing_limits
from xinference.model.llm.vllm.xavier.connector.facts import EngineFacts, GroupFacts, refuse_unproven
from xinference.model.llm.vllm.xavier.errors import XavierError

GiB: Final = 1 << 30
# SmolLM2-135M in bfloat16: 30 layers, keys and values, 3 KV heads of 64, 2 bytes each.
MODEL: Final = ModelFacts(("LlamaForCausalLM",), 30 * 2 * 3 * 64 * 2, 8192, None, 269_000_000, "0" * 32)
HOST: Final = HostFacts("host", "127.0.0.1", 24 * GiB, 16 * GiB, 12 * GiB, 8 * GiB, 8)
PATH: Final = {"model_path": "/models/smollm2-135m-instruct"}
SHARING: Final[dict[str, Any]] = {**PATH, "replica": 2, "enable_xavier": True}
ENGINE: Final = EngineFacts(
    version="0.32.0+cpu", executor="uni", parallel_sizes=(("tensor_parallel_size", 1),), role="kv_both", failure_policy="recompute",
    device="cpu", runner="generate", dtype="torch.bfloat16", quantization="None", kv_cache_dtype="auto", kv_scales="none",
    rope_overrides="{}", attention_backend="CPU_ATTN", instruction_set="AVX512", speculative="", hash_algorithm="sha256",
    hash_block_size=32, num_blocks=1024,
    groups=(GroupFacts("FullAttentionSpec", 32, 24576, ("layer.0",), (), ()),),
)  # fmt: skip


def plan(body: dict[str, Any], facts: ModelFacts = MODEL, host: HostFacts = HOST) -> LaunchPlan:
    """The plan of a launch on a machine with 16 GiB of free memory, 8 GiB of it in /dev/shm."""
    return plan_launch(parse_spec(body), "smollm2", facts, Snapshot((WorkerView("w0", host),), host.host))


def plan_example() -> str:
    """What ``--dry-run`` prints of such a launch, but for the places and the engine's command line."""
    shown = plan({**SHARING, "xavier_cpu_cache_bytes": "256MiB", "kv_cache_memory_bytes": 512 << 20, "max_model_len": 2048}).to_wire()
    out = StringIO()
    rows = facts_table([("uid", shown["model_uid"]), *plan_rows(shown)], title="Plan")
    Console(file=out, width=132, highlight=False, no_color=True).print(rows)
    return block(out.getvalue())


def by_the_launch() -> str:
    """What a launch is refused for, before anything starts."""
    return _table(_launch_cases())


def by_the_engine() -> str:
    """What the connector refuses when the engine starts."""
    return _table(_engine_cases())


def _launch_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    def spec(**fields: Any) -> Callable[[], object]:
        return lambda: parse_spec({**SHARING, **fields})

    def model(config: dict[str, Any], kind: str = "llama") -> Callable[[], object]:
        return lambda: plan(SHARING, replace(MODEL, sharing_refusal=sharing_limits.refusal(config, kind)))

    yield "one replica", spec(replica=1)
    yield "a cache without sharing", lambda: parse_spec({**PATH, "xavier_cpu_cache_bytes": "1GiB"})
    yield "a GPU tier", spec(xavier_gpu_cache_bytes="256MiB")
    yield "tensor parallelism", spec(tensor_parallel_size=2)
    yield "no prefix caching", spec(enable_prefix_caching=False)
    yield "prefill and decode replicas", spec(replica_config=[{"role": "prefill"}, {"role": "decode"}])
    yield "a budget below one block", lambda: plan({**SHARING, "xavier_cpu_cache_bytes": "512KiB"})
    yield "more than free memory", lambda: plan({**SHARING, "xavier_cpu_cache_bytes": "8GiB"})
    yield (
        "more than free shared memory",
        lambda: plan({**SHARING, "xavier_cpu_cache_bytes": "256MiB"}, host=replace(HOST, shm_free_bytes=64 << 20)),
    )
    yield "a model with a sliding window", model({"sliding_window": 4096})
    yield "a recurrent model", model({}, "mamba")
    yield "a model that sees images", model({"vision_config": {"hidden_size": 1}})


def _engine_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for label, changed in (
        ("KV memory on another accelerator", {"device": "xpu"}),
        ("an unknown vLLM", {"version": "0.40.0"}),
        ("an executor of several processes", {"executor": "mp"}),
        ("speculative decoding", {"speculative": "ngram:None"}),
        ("FP8 KV with computed scales", {"kv_cache_dtype": "fp8", "kv_scales": "computed"}),
        ("several KV groups", {"groups": ENGINE.groups * 2}),
    ):
        yield label, lambda changed=changed: refuse_unproven(replace(ENGINE, **changed))  # type: ignore[misc]


def message_of(call: Callable[[], object]) -> str:
    """What a refusal says. Raises RuntimeError when nothing is refused: then this page is wrong."""
    try:
        call()
    except XinferenceError as error:
        return f"{error.message} [{error.param}]" if error.param else error.message
    except XavierError as error:
        return str(error)
    raise RuntimeError("nothing was refused")


def _table(cases: Iterator[tuple[str, Callable[[], object]]]) -> str:
    rows = [(text(label), code(message_of(call))) for label, call in cases]
    return table(("asked for", "answer"), rows, (24, 76))

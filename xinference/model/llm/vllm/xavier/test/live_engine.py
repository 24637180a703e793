"""A real vLLM engine as a process of its own, driven by JSON lines: ``python -m ...live_engine``. And the handle that starts one."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from xinference.model.llm.vllm.xavier.config import XavierConfig
from xinference.model.llm.vllm.xavier.policy.rates import MeasuredRates

BLOCK = 32
START_SECONDS = 150.0
ANSWER_SECONDS = 60.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONHASHSEED": "0",
}


def serve(model: str, wire: dict[str, Any] | None) -> None:
    """Start an engine and answer requests from standard input until it ends."""
    # The one door to the engine: importing this module from a test must not load it.
    from vllm import LLM, SamplingParams

    # A model this small is often computed sooner than it is loaded: what was measured is not to decide here whether anything is loaded.
    MeasuredRates.observe_prefill = lambda *_: None  # type: ignore[method-assign]
    transfer = None
    if wire is not None:
        transfer = {
            "kv_connector": "XavierConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "xinference.model.llm.vllm.xavier.connector.connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": wire,
        }
    engine = LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        block_size=BLOCK,
        kv_cache_memory_bytes=32 << 20,
        max_model_len=2048,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        disable_log_stats=False,
        kv_transfer_config=transfer,
    )
    say({"ready": True})
    for line in sys.stdin:
        call = json.loads(line)
        prompts = [{"prompt_token_ids": tokens, **({"cache_salt": call["salt"]} if call.get("salt") else {})} for tokens in call["prompts"]]
        params = SamplingParams(max_tokens=call.get("max_tokens", 8), temperature=0, ignore_eos=True, **call.get("sampling", {}))
        params.extra_args = {"kv_transfer_params": {"xavier": {"v": 1, "request": call["request"]}}}
        outputs = engine.generate(prompts, params, use_tqdm=False)
        say(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
            }
        )


def say(answer: dict[str, Any]) -> None:
    """One line, marked, since vLLM writes to standard output too."""
    print(f"@{json.dumps(answer)}", flush=True)


class LiveEngine:
    """A running engine. Killed when closed, whatever state it is in."""

    def __init__(self, model: Path, config: XavierConfig | None, log: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        arguments = [sys.executable, "-m", __spec__.name, str(model), json.dumps(config.to_wire() if config else None)]
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env={**environment, **ENVIRONMENT}
        )
        self._buffer = b""
        assert self.process.stdout is not None
        self._output = selectors.DefaultSelector()  # select() knows only the first 1,024 descriptors
        self._output.register(self.process.stdout, selectors.EVENT_READ)
        self.num_asked = 0
        self.log = log

    def wait_ready(self) -> "LiveEngine":
        """Block until it can be asked."""
        self._answer(START_SECONDS)
        return self

    def ask(self, *prompts: list[int], request: str = "", **call: Any) -> dict[str, Any]:
        """Generate for these prompts in one batch."""
        self.num_asked += 1
        line = json.dumps({"prompts": prompts, "request": request or f"{self.num_asked:032x}", **call})
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        return self._answer(ANSWER_SECONDS)

    def kill(self) -> None:
        """SIGKILL, as the kernel would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def close(self) -> None:
        """End it in the ordinary way, or by force."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        assert self.process.stdout is not None
        self._output.close()
        self.process.stdout.close()
        self._log.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        assert self.process.stdout is not None
        while True:
            while b"\n" in self._buffer:
                line, self._buffer = self._buffer.split(b"\n", 1)
                if line.startswith(b"@"):
                    answer: dict[str, Any] = json.loads(line[1:])
                    return answer
            ready = self._output.select(max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                raise AssertionError(f"the engine gave no answer: {self.log.read_text()[-3000:]}")
            self._buffer += chunk


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))

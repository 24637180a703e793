"""Real server processes for tests: a home and a shared-memory directory of their own, the fake engine, and a proof that they are gone."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from xinference.client.presence import is_running
from xinference.deploy.footprint import Footprint, ProcessId

START_SECONDS = 60
STOP_SECONDS = 60
POLL_SECONDS = 0.05
MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def make_model(path: Path) -> Path:
    """A model directory that is enough for the fake engine."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return path


@dataclass
class ServerProcess:
    """One server process in a session of its own, as a terminal would start it.

    Args:
        module: which one, such as ``local``.
        root: its home, shared memory and log are made below this.
    """

    module: str
    root: Path
    port: int = field(default_factory=free_port)
    environment: dict[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def shm(self) -> Path:
        return self.root / "shm"

    @property
    def log(self) -> str:
        return (self.root / f"{self.module}.log").read_text()

    def start(self, *words: str) -> None:
        """Start it; see ``wait_until_serving``."""
        self.shm.mkdir(exist_ok=True)
        own = {"XINFERENCE_HOME": str(self.home), "XINFERENCE_SHM_DIR": str(self.shm), "XINFERENCE_ALLOW_FAKE_ENGINE": "1"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XINFERENCE_", "XOSCAR_"))}
        command = [sys.executable, "-m", f"xinference.deploy.{self.module}", *words]
        with (self.root / f"{self.module}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | own | {"PYTHONUNBUFFERED": "1"} | self.environment,
                start_new_session=True,
            )

    def wait_until_serving(self) -> None:
        """Wait until its API answers."""
        self.wait_for(lambda: is_running(self.endpoint), "it does not answer")

    def wait_for(self, condition: Any, complaint: str) -> None:
        """Poll with a deadline; fails at once when the process ends."""
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, f"{complaint}\n{self.log}"
            time.sleep(POLL_SECONDS)

    def footprint(self) -> Footprint:
        """What it occupies now."""
        assert self.process is not None
        return Footprint.of(ProcessId.of(psutil.Process(self.process.pid)), self.shm)

    def stop(self, number: signal.Signals = signal.SIGTERM, whole_group: bool = False) -> int:
        """Send a signal, to the process or as a terminal does to its whole group; returns the exit code."""
        assert self.process is not None
        if whole_group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return self.process.wait(timeout=STOP_SECONDS)

    def kill(self) -> None:
        """Leave nothing running, whatever the test did."""
        if self.process is not None and self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait(timeout=STOP_SECONDS)
            psutil.wait_procs(family, timeout=STOP_SECONDS)

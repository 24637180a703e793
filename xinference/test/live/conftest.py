"""One server for the whole live suite: two replicas that share their KV cache, and one plain engine as the control."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from xinference.client.sync_client import Client
from xinference.deploy.test.servers import ServerProcess
from xinference.model.llm.random_model import make_random_model

SHARED, CONTROL = "shared", "control"
CPU_CACHE_BYTES = 16 * 2**20
KV_CACHE_BYTES = 64 * 2**20
READY_SECONDS = 400.0


def sources_of(answer: dict[str, Any]) -> dict[str, int]:
    """Where the prompt's tokens came from by the request's accounting record: they add up, and usage says the same."""
    sources: dict[str, int] = answer["xinference"]["sources"]
    usage = answer["usage"]
    assert sum(sources.values()) == usage["prompt_tokens"]
    reused = sum(tokens for source, tokens in sources.items() if source not in ("handed_over", "computed"))
    assert usage["prompt_tokens_details"]["cached_tokens"] == reused
    return sources


@dataclass(frozen=True)
class Product:
    """The running server and the model's replicas."""

    server: ServerProcess
    client: Client
    replicas: tuple[str, str]

    def ask(self, prompt: list[int], replica: int | None = None, **options: Any) -> dict[str, Any]:
        """One greedy completion; ``replica`` None asks the control."""
        body = {"temperature": 0, "max_tokens": 12, "debug": True, **options}
        if replica is None:
            return dict(self.client.generate(CONTROL, prompt, **body))
        answer = dict(self.client.generate(SHARED, prompt, replica_uid=self.replicas[replica], **body))
        sources_of(answer)  # every request has a record that adds up
        return answer

    def status(self, replica: int) -> dict[str, Any]:
        """What /xavier says of one replica."""
        return next(found for found in self.client.xavier(SHARED)["replicas"] if found["replica_uid"] == self.replicas[replica])


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Two replicas with Xavier and a plain engine of the same model, all on the CPU."""
    model = make_random_model(tmp_path_factory.mktemp("models") / "tiny")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="xinference-live-") as shm:
        # Many tests kill replicas: each time counts for itself, so that none is given up and the wait before a relaunch stays short.
        environment = {"XINFERENCE_SHM_DIR": shm, "XINFERENCE_RESTART_WINDOW_SECONDS": "1"}
        server = ServerProcess("local", tmp_path_factory.mktemp("server"), environment=environment)
        server.start("--port", str(server.port))
        try:
            server.wait_until_serving()
            with Client(server.endpoint, answer_seconds=READY_SECONDS) as client:
                engine = {"kv_cache_memory_bytes": KV_CACHE_BYTES, "max_model_len": 2048}
                common = {"model_path": str(model), "engine_config": engine}
                client.launch(
                    model_uid=SHARED, replica=2, enable_xavier=True, xavier_cpu_cache_bytes=CPU_CACHE_BYTES, wait_ready=True, **common
                )
                client.launch(model_uid=CONTROL, replica=1, wait_ready=True, **common)
                uids = sorted(found["replica_uid"] for found in client.replicas(SHARED))
                yield Product(server, client, (uids[0], uids[1]))
                client.terminate(SHARED, 0.0)
                assert list(Path(shm).iterdir()) == [], "a terminated model left files in shared memory"
        finally:
            server.stop()
            server.kill()

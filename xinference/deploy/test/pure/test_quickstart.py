"""The quick start on a server that runs already, faked: what is launched, what is proven, what is left alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from xinference.client.test.fakes import serving
from xinference.deploy.cli import cli, run
from xinference.deploy.quickstart import cpu_dtype
from xinference.deploy.test.sharing import SharingServer

LAST_LINE = "demo: 1472 of 1500 prompt tokens came from the other replica's cache"


class QuickStart(Protocol):
    def __call__(self, *words: str) -> tuple[int, str, str]: ...


@pytest.fixture
def server() -> SharingServer:
    return SharingServer()


@pytest.fixture
def quickstart(
    server: SharingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[QuickStart]:
    """Runs the command against the fake server; returns exit code, stdout and stderr."""
    monkeypatch.setenv("XINFERENCE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "model").mkdir()
    with serving(server) as address:

        def call(*words: str) -> tuple[int, str, str]:
            port = address.rpartition(":")[2]
            code = run(cli, ["quickstart", "--port", port, "--model-path", str(tmp_path / "model"), *words], "xinference")
            out, err = capsys.readouterr()
            return code, out, err

        yield call


def test_the_last_line_says_how_many_tokens_came_from_the_other_replica(quickstart: QuickStart) -> None:
    code, out, _ = quickstart()
    assert code == 0
    assert out.splitlines()[-1] == LAST_LINE
    assert "from peer_cpu" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("done")] == ["launch", "warm-up", "prompt", "prompt"]


def test_every_run_sends_a_prompt_of_its_own(quickstart: QuickStart, server: SharingServer) -> None:
    assert quickstart()[0] == 0
    assert quickstart()[0] == 0
    assert len(server.owner_by_prompt) == 2
    launches = [target for method, target, _, _ in server.seen if (method, target) == ("POST", "/v1/models")]
    assert len(launches) == 1


def test_a_count_that_vllm_does_not_confirm_is_not_a_proof(quickstart: QuickStart, server: SharingServer) -> None:
    server.lies_by = 32
    code, out, _ = quickstart()
    assert code == 1
    assert "not proven: the accounting says 1472 tokens, vLLM's own counter says 1504" in out


def test_a_run_without_sharing_fails(quickstart: QuickStart, server: SharingServer) -> None:
    server.shares = False
    code, out, _ = quickstart()
    assert code == 1
    assert out.splitlines()[-1].startswith("demo: 0 of 1500")


def test_somebody_elses_server_is_left_running_without_the_model(quickstart: QuickStart, server: SharingServer) -> None:
    code, out, _ = quickstart("--exit")
    assert code == 0
    assert out.splitlines()[-1] == LAST_LINE
    assert server.models == {}


def test_a_model_that_ran_before_is_not_stopped_at_exit(quickstart: QuickStart, server: SharingServer) -> None:
    quickstart()
    quickstart("--exit")
    assert list(server.models) == ["demo"]


def test_a_launch_that_fails_is_reported_and_stopped_all_the_same(quickstart: QuickStart, server: SharingServer) -> None:
    server.fails["demo"] = "the weights are damaged"
    code, _, err = quickstart("--exit")
    assert code == 1
    assert "the weights are damaged" in err
    assert server.models == {}


def test_a_demo_model_without_sharing_is_not_taken_for_the_demonstration(quickstart: QuickStart, server: SharingServer) -> None:
    quickstart()
    server.models["demo"]["xavier"] = False
    code, _, err = quickstart()
    assert code == 1
    assert "xinference terminate demo" in err


def test_the_result_can_be_had_as_json(quickstart: QuickStart) -> None:
    code, out, _ = quickstart("-o", "json")
    found = json.loads(out)
    assert code == 0
    assert found["verdict"] == LAST_LINE
    assert found["problems"] == found["remains"] == []
    assert set(found["seconds"]) == {"launch", "warm-up", "prompt to demo-0", "prompt to demo-1"}


@pytest.mark.parametrize(
    ("flags", "dtype"), [({"avx2"}, "float32"), ({"avx2", "avx512f"}, "float32"), ({"avx512_bf16"}, "bfloat16"), ({"amx_bf16"}, "bfloat16")]
)
def test_the_demo_computes_in_what_the_processor_is_fast_at(flags: set[str], dtype: str) -> None:
    assert cpu_dtype(frozenset(flags)) == dtype

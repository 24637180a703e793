"""The API against its own /openapi.json: cases that another program makes of it, valid, invalid and in sequences.

More of them: ``XINFERENCE_SCHEMA_EXAMPLES=200 XINFERENCE_SCHEMA_SEED=7 pytest -s xinference/api/test/cpu/test_schemathesis.py``.
"""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from xinference.api.auth import ADMIN
from xinference.api.config import ApiConfig
from xinference.api.keys import ApiKey, KeyRing
from xinference.api.test.bench import ANSWER, WHOLE
from xinference.api.test.fakes import FakeCluster, ScriptedReplica, Served, answering, model, replica, serving, streaming
from xinference.core.spec import parse_spec
from xinference.errors import ModelNotFound

EXAMPLES = os.environ.get("XINFERENCE_SCHEMA_EXAMPLES", "2")
SEED = os.environ.get("XINFERENCE_SCHEMA_SEED", "1")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "missing_required_header",
    "ignored_auth",
)
QUICK = ApiConfig(xavier_stream_seconds=0.001, event_poll_seconds=0.001, log_poll_seconds=0.001)
RING = KeyRing((ApiKey.of("root", ADMIN),))


class Cluster(FakeCluster):
    """Reads launches as the supervisor does. Its news end: each third look finds the model gone."""

    looks = 0

    async def launch_model(self, spec: dict[str, Any]) -> dict[str, Any]:
        parse_spec(spec)
        return await super().launch_model(spec)

    async def plan_model(self, spec: dict[str, Any]) -> dict[str, Any]:
        parse_spec(spec)
        return await super().plan_model(spec)

    def _note(self, name: str, *args: Any) -> None:
        super()._note(name, *args)
        if name in ("events", "logs", "xavier_status"):
            self.looks += 1
            if self.looks % 3 == 0:
                raise ModelNotFound("the model is gone")


async def engine(request: Any, body: Any) -> Any:
    """A replica that answers as it is asked, whole or as a stream."""
    return await (streaming(*WHOLE) if body.get("stream") else answering(ANSWER))(request, body)


@asynccontextmanager
async def api(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Served]]:
    """A server that asks for keys, with one model."""
    cluster = Cluster()
    async with ScriptedReplica(engine).serving(tmp_path / "s"):
        await cluster.put(model(), replica("m-0", tmp_path / "s"))
        async with serving(cluster, keys=RING, config=QUICK) as served:
            yield cluster, served


async def examined(served: Served, tmp_path: Path, *words: str) -> tuple[int, str]:
    """Exit code and report of an examination."""
    (tmp_path / "schemathesis.toml").write_text('[parameters]\n"path.uid" = "m"\n"path.request_id" = "r"\n')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", "--no-color"),
        *("--header", "Authorization: Bearer root", "--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing,stateful"),
        *("--seed", SEED, "--max-examples", EXAMPLES, "--request-timeout", "10", *words),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    report, _ = await process.communicate()
    return await process.wait(), report.decode()


@pytest.mark.timeout(0 if "XINFERENCE_SCHEMA_EXAMPLES" in os.environ else 600)
async def test_the_api_is_what_its_document_says(tmp_path: Path) -> None:
    print(f"schemathesis: seed {SEED}, {EXAMPLES} examples of each operation")
    async with api(tmp_path) as (_, served):
        operations = sum(len(operations) for operations in served.app.openapi()["paths"].values())
        code, report = await examined(served, tmp_path)
    assert code == 0, report
    assert re.findall(r"Tested: (\d+)", report) == [str(operations)], report


async def test_a_fault_would_be_found(tmp_path: Path) -> None:
    async with api(tmp_path) as (cluster, served):
        cluster.fails["list_requests"] = RuntimeError("planted")  # type: ignore[assignment]
        code, report = await examined(served, tmp_path, "--include-path", "/v1/requests")
    assert code == 1, report
    assert "internal error" in report

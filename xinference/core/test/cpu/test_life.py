"""A model's life with real processes: launched, described, scaled, restarted, terminated, and nothing left."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from xinference.core.test.clusters import Cluster, running_cluster, until
from xinference.errors import Conflict, InvalidRequest, ModelNotFound, NotFound


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path) as running:
        yield running


async def ask(uds: str, prompt: str = "one two three", max_tokens: int = 4) -> dict[str, Any]:
    """A completion straight from a replica's socket."""
    async with (
        aiohttp.ClientSession("http://replica", connector=aiohttp.UnixConnector(uds)) as session,
        session.post("/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": max_tokens}) as response,
    ):
        assert response.status == 200
        answer: dict[str, Any] = await response.json()
        return answer


async def test_a_launch_serves_on_private_sockets_and_a_termination_leaves_nothing(cluster: Cluster) -> None:
    await cluster.launch()
    model = await cluster.supervisor.describe_model("m")
    assert (model["state"], model["replica"], model["xavier"], model["cause"]) == ("ready", 2, True, None)
    for replica in model["replicas"]:
        assert os.stat(replica["address"]).st_mode & 0o777 == 0o600
        assert (await ask(replica["address"]))["usage"]["completion_tokens"] == 4
    assert len([name for name in cluster.files() if name.endswith(".ctl")]) == 2
    assert await cluster.supervisor.terminate_model("m", 0.0) == {"model_uid": "m", "terminated": True}
    cluster.assert_nothing_is_left()
    with pytest.raises(ModelNotFound):
        await cluster.supervisor.describe_model("m")
    assert (await cluster.stages())[-1] == "terminated"


async def test_the_route_table_names_the_sockets_and_changes_are_waited_for(cluster: Cluster) -> None:
    before = await cluster.supervisor.route_changes(0, 0.0)
    waiting = asyncio.create_task(cluster.supervisor.route_changes(before["version"], 30.0))
    await cluster.launch(replica=1, enable_xavier=False, xavier_cpu_cache_bytes=None)
    assert (await waiting)["version"] > before["version"]
    table = await cluster.supervisor.route_table("m")
    assert [replica["state"] for replica in table["replicas"]] == ["ready"]
    assert os.path.exists(table["replicas"][0]["endpoint"]["uds"])


async def test_a_launch_that_fails_stays_listed_with_its_cause_and_log_and_holds_nothing(cluster: Cluster) -> None:
    configs = [{}, {"engine_config": {"fail_start": "cannot find the weights"}}]
    await cluster.launch("failed", replica_config=configs)
    model = await cluster.supervisor.describe_model("m")
    assert model["state"] == "failed"
    assert "cannot find the weights" in model["cause"]
    assert "cannot find the weights" in (await cluster.supervisor.logs("m", "m-1", 50))["text"]
    cluster.assert_nothing_is_left()
    await cluster.launch()


async def test_peers_are_written_to_the_control_pages_and_a_clear_is_confirmed(cluster: Cluster) -> None:
    await cluster.launch()

    async def attached() -> bool:
        status = await cluster.supervisor.xavier_status("m")
        return all(peer["attached"] for replica in status["replicas"] for peer in replica["peers"])

    await until(attached)
    cleared = await cluster.supervisor.xavier_clear("m")
    assert (cleared["status"], cleared["epoch"], cleared["pending"]) == ("cleared", 2, [])
    status = await cluster.supervisor.xavier_status("m")
    assert [replica["epoch_confirmed"] for replica in status["replicas"]] == [2, 2]


async def test_scaling_up_and_down_keeps_the_others_serving(cluster: Cluster) -> None:
    await cluster.launch()
    assert (await cluster.supervisor.scale_model("m", 3))["replicas"] == ["m-2"]
    await cluster.until_state("ready", "m-2")
    before = await cluster.replica("m-0")
    removed = (await cluster.supervisor.scale_model("m", 1))["replicas"]
    assert removed == ["m-2", "m-1"]

    async def only_one() -> bool:
        return len(await cluster.supervisor.list_replicas("m")) == 1

    await until(only_one)
    assert (await cluster.replica("m-0"))["incarnation"] == before["incarnation"]
    assert len(cluster.sockets()) == 1
    assert all(".m-0." in name for name in cluster.files())


async def test_a_restart_brings_a_new_incarnation_that_adopts_the_segment(cluster: Cluster) -> None:
    await cluster.launch()
    before = await cluster.replica("m-0")
    for _ in range(3):
        await ask(before["address"], "a prompt of many words " * 40, 1)

    async def saved() -> int:
        status = await cluster.supervisor.xavier_status("m")
        return int(status["replicas"][0]["tiers"]["cpu"]["blocks"])

    blocks = await until(saved)
    await cluster.supervisor.restart_replica("m", "m-0")

    async def again() -> bool:
        replica = await cluster.replica("m-0")
        return replica["state"] == "ready" and bool(replica["incarnation"] != before["incarnation"])

    await until(again)
    status = await cluster.supervisor.xavier_status("m")
    assert status["replicas"][0]["counters"]["adopted_blocks"] >= blocks
    assert (await cluster.replica("m-0"))["restarts"] == 1


async def test_a_request_has_its_record(cluster: Cluster) -> None:
    await cluster.launch()
    uds = (await cluster.replica("m-0"))["address"]
    request = "0123456789abcdef0123456789abcdef"
    async with aiohttp.ClientSession("http://replica", connector=aiohttp.UnixConnector(uds)) as session:
        body = {"model": "m", "prompt": "one two three four", "max_tokens": 2}
        body["kv_transfer_params"] = {"xavier": {"v": 1, "request": request}}
        async with session.post("/v1/completions", json=body) as response:
            usage = (await response.json())["usage"]
    record = await cluster.supervisor.request_record("m", "m-0", request, 1.0)
    assert record is not None
    assert record["prompt_tokens"] == usage["prompt_tokens"] == sum(record["sources"].values())
    assert (record["replica_uid"], record["model_uid"], record["cached_tokens"]) == ("m-0", "m", 0)
    assert request in [row["request_id"] for row in await cluster.supervisor.list_requests(None, 10)]
    assert await cluster.supervisor.request_record("m", "m-0", "f" * 32, 0.01) is None


async def test_what_cannot_be_done_is_an_error_with_its_kind(cluster: Cluster) -> None:
    for spec, kind in [
        ({"replica": 1, "enable_xavier": True, "model_path": "/m"}, InvalidRequest),
        ({"model_path": "/nowhere"}, InvalidRequest),
    ]:
        with pytest.raises(kind):
            await cluster.supervisor.launch_model(spec)
    await cluster.launch(replica=1, enable_xavier=False, xavier_cpu_cache_bytes=None)
    with pytest.raises(Conflict):
        await cluster.launch()
    with pytest.raises(Conflict):
        await cluster.supervisor.remove_replica("m", "m-0", 0.0)
    with pytest.raises(NotFound):
        await cluster.supervisor.restart_replica("m", "m-9")
    with pytest.raises(InvalidRequest):
        await cluster.supervisor.scale_model("m", 0)
    with pytest.raises(InvalidRequest):
        await cluster.supervisor.xavier_clear("m")
    with pytest.raises(ModelNotFound):
        await cluster.supervisor.terminate_model("other", 0.0)


async def test_a_stop_takes_running_models_with_it(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        await cluster.launch()
    cluster.assert_nothing_is_left()

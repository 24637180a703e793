"""The API's copy of the routes: what it takes over, what it asks for, whom it gives up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from xinference.api.config import ApiConfig
from xinference.api.errors import ControlUnreachable
from xinference.api.route_table import RouteTable
from xinference.api.test.fakes import FakeCluster, model, replica
from xinference.errors import ModelNotFound

AWAY = ControlUnreachable("away")


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def following(cluster: FakeCluster) -> AsyncIterator[RouteTable]:
    """A table that follows the cluster and has caught up with it."""
    table = RouteTable(cluster, ApiConfig(route_retry_seconds=0.0))
    task = asyncio.create_task(table.run())
    try:
        await until(lambda: table.connected)
        yield table
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def two_replicas() -> FakeCluster:
    cluster = FakeCluster()
    await cluster.put(model(), replica("m-0", "/0"), replica("m-1", "/1", state="draining"))
    return cluster


def ready(table: RouteTable, uid: str = "m") -> list[str]:
    routes = table.get(uid)
    return [] if routes is None else [each.replica_uid for each in routes.ready]


async def test_changes_arrive_without_being_asked_for() -> None:
    cluster = await two_replicas()
    async with following(cluster) as table:
        assert ready(table) == ["m-0"]
        await cluster.put(model(), replica("m-0", "/0"), replica("m-1", "/1"))
        await until(lambda: ready(table) == ["m-0", "m-1"])
        assert cluster.asked("route_table") == []


async def test_a_replica_without_an_address_is_not_ready() -> None:
    cluster = FakeCluster()
    await cluster.put(model(), replica("m-0", None))
    async with following(cluster) as table:
        assert ready(table) == []


async def test_a_known_model_is_found_without_a_call() -> None:
    cluster = await two_replicas()
    async with following(cluster) as table:
        assert (await table.find("m")).uid == "m"
        assert cluster.asked("route_table") == []


async def test_an_unknown_model_is_asked_for() -> None:
    async with following(FakeCluster()) as table:
        with pytest.raises(ModelNotFound):
            await table.find("other")


async def test_what_was_asked_for_is_kept_until_the_poll_is_as_new() -> None:
    cluster = await two_replicas()
    async with following(cluster) as table:
        cluster.models["new"], cluster.tables["new"] = model("new"), [replica("new-0", "/2")]
        cluster.version += 1
        known = cluster.version
        assert ready(table, "new") == []
        await table.find("new")
        assert ready(table, "new") == ["new-0"]
        # An answer that is older than what was asked for arrives late.
        table._take({"version": known - 0.5, "models": {}})
        assert ready(table, "new") == ["new-0"]
        table._take({"version": known + 1, "models": {}})
        assert ready(table, "new") == []


@pytest.mark.parametrize("error", [AWAY, RuntimeError("a fault of ours")])
async def test_a_poll_that_fails_is_repeated_and_the_copy_stays(error: Any) -> None:
    cluster = await two_replicas()
    async with following(cluster) as table:
        cluster.fails["route_changes"] = error
        await cluster.put(model(), replica("m-0", "/0"))
        polls = len(cluster.asked("route_changes"))
        await until(lambda: len(cluster.asked("route_changes")) > polls + 2)
        assert ready(table) == ["m-0"]
        del cluster.fails["route_changes"]
        await cluster.put(model(), replica("m-2", "/2"))
        await until(lambda: ready(table) == ["m-2"])


async def test_without_a_supervisor_the_copy_answers_for_what_it_knows() -> None:
    cluster = await two_replicas()
    async with following(cluster) as table:
        cluster.fails["route_table"] = AWAY
        assert (await table.find("m")).ready
        with pytest.raises(ControlUnreachable):
            await table.find("other")


async def test_a_supervisor_that_was_started_anew_is_followed_from_its_beginning() -> None:
    cluster = await two_replicas()
    cluster.version = 50
    async with following(cluster) as table:
        cluster.fails["route_changes"] = AWAY
        await cluster.put(model(), replica("m-0", "/0"))
        await until(lambda: not table.connected)
        del cluster.fails["route_changes"]
        cluster.version = 1
        await cluster.put(model(), replica("m-9", "/9"))
        await until(lambda: ready(table) == ["m-9"])


@pytest.mark.parametrize(
    ("after", "over"),
    [
        ([replica("m-0", "/0")], False),
        ([replica("m-0", "/0", state="draining")], False),
        ([replica("m-0", "/0", state="lost")], True),
        ([replica("m-0", "/0", state="failed")], True),
        ([replica("m-0", "/0", incarnation="2")], True),
        ([], True),
    ],
)
async def test_a_start_of_a_replica_is_over_when_its_model_says_so(after: Any, over: bool) -> None:
    cluster = await two_replicas()
    async with following(cluster) as table:
        first = (await table.find("m")).ready[0]
        with table.watch("m", first) as gone:
            await cluster.put(model(state="degraded"), *after)
            await until(lambda: table.get("m").model["state"] == "degraded")  # type: ignore[union-attr]
            assert gone.done() == over


async def test_a_replica_of_a_model_that_nobody_mentions_is_not_given_up() -> None:
    """A supervisor that was started anew knows of no models at first; their streams go on."""
    cluster = await two_replicas()
    async with following(cluster) as table:
        first = (await table.find("m")).ready[0]
        with table.watch("m", first) as gone:
            cluster.models.clear()
            await cluster.put(model("other"))
            await until(lambda: table.get("m") is None)
            assert not gone.done()


async def test_several_requests_watch_one_replica() -> None:
    cluster = await two_replicas()
    async with following(cluster) as table:
        first = (await table.find("m")).ready[0]
        with table.watch("m", first) as one:
            with table.watch("m", first) as other:
                assert one is other
            await cluster.put(model())
            await until(lambda: one.done())
        assert not table._watched

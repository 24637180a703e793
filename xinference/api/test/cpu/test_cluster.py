"""The supervisor's methods over real actor calls: arguments, errors, and a supervisor that is gone."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import xoscar as xo

from xinference.api.cluster import SupervisorClient
from xinference.api.config import ApiConfig
from xinference.api.control import ClusterClient
from xinference.api.errors import ControlUnreachable
from xinference.core.supervisor import SupervisorActor
from xinference.errors import LimitExceeded, ModelNotFound


class Supervisor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Three methods of the supervisor, in a process of its own."""

    async def describe_model(self, uid: str) -> Any:
        if uid == "missing":
            raise ModelNotFound("there is no model 'missing'")
        if uid == "limit":
            raise LimitExceeded("too much", "n", "own_code")
        return {"id": uid}

    async def events(self, uid: str, after: int, wait_seconds: float) -> Any:
        await asyncio.sleep(wait_seconds)
        return [{"seq": after + 1}]

    async def ready(self) -> bool:
        await asyncio.Event().wait()
        return True


@pytest_asyncio.fixture
async def supervisor() -> AsyncIterator[Any]:
    pool = await xo.create_actor_pool("127.0.0.1", n_process=1)
    try:
        yield await xo.create_actor(
            Supervisor, address=pool.external_address, uid="supervisor", allocate_strategy=xo.allocate_strategy.ProcessIndex(1)
        )
    finally:
        await pool.stop()


def test_the_supervisor_has_every_method_that_the_api_calls() -> None:
    for name, wanted in inspect.getmembers(ClusterClient, inspect.isfunction):
        if name.startswith("_"):
            continue
        parameters = list(inspect.signature(wanted).parameters)
        assert len(inspect.signature(getattr(SupervisorActor, name)).parameters) >= len(parameters), name
        assert list(inspect.signature(getattr(SupervisorClient, name)).parameters) == parameters, name


async def test_answers_come_back(supervisor: Any) -> None:
    assert await SupervisorClient(supervisor).describe_model("m") == {"id": "m"}


async def test_errors_come_back_as_they_were_raised(supervisor: Any) -> None:
    client = SupervisorClient(supervisor)
    with pytest.raises(ModelNotFound) as missing:
        await client.describe_model("missing")
    assert type(missing.value) is ModelNotFound
    assert str(missing.value) == "there is no model 'missing'"
    with pytest.raises(LimitExceeded) as limit:
        await client.describe_model("limit")
    assert (limit.value.message, limit.value.param, limit.value.code) == ("too much", "n", "own_code")


async def test_a_long_poll_may_last_as_long_as_it_was_asked_to(supervisor: Any) -> None:
    client = SupervisorClient(supervisor, ApiConfig(control_seconds=0.2))
    assert await client.events("m", 3, 0.4) == [{"seq": 4}]


async def test_a_supervisor_that_hangs_is_unreachable(supervisor: Any) -> None:
    with pytest.raises(ControlUnreachable) as caught:
        await SupervisorClient(supervisor, ApiConfig(control_seconds=0.1)).ready()
    assert (caught.value.status, caught.value.code) == (503, "supervisor_unavailable")


async def test_a_supervisor_that_died_is_unreachable() -> None:
    pool = await xo.create_actor_pool("127.0.0.1", n_process=1, auto_recover=False)
    try:
        place = xo.allocate_strategy.ProcessIndex(1)
        actor = await xo.create_actor(Supervisor, address=pool.external_address, uid="supervisor", allocate_strategy=place)
        client = SupervisorClient(actor)
        assert await client.describe_model("m")
        for process in list(pool.sub_processes.values()):
            asyncio.get_running_loop().call_later(0.1, process.kill)
        with pytest.raises(ControlUnreachable):
            await asyncio.gather(*(client.events("m", 0, 5.0) for _ in range(3)))
    finally:
        await pool.stop()

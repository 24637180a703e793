"""The supervisor actor as a ClusterClient: every call has a deadline, and a supervisor that is away has one error of its own."""

from collections.abc import Awaitable
from typing import Any

from xinference.api.config import ApiConfig
from xinference.api.control import Json
from xinference.api.errors import ControlUnreachable
from xinference.core.calls import call
from xinference.core.errors import Unreachable
from xinference.errors import XinferenceError


class SupervisorClient:
    """Calls the supervisor.

    Args:
        supervisor: a reference to the actor.
        config: for the deadlines.
    """

    def __init__(self, supervisor: Any, config: ApiConfig | None = None) -> None:
        self._supervisor = supervisor
        self._seconds = (config or ApiConfig()).control_seconds

    async def _ask(self, answer: Awaitable[Any], more_seconds: float = 0.0) -> Any:
        """Await a method of the supervisor.

        Args:
            more_seconds: how long the call is asked to wait, beside the time that any call may take.

        Raises:
            ControlUnreachable: it did not answer.
            XinferenceError: what the method raised.
        """
        try:
            return await call(answer, self._seconds + more_seconds)
        except Unreachable as error:
            raise ControlUnreachable(f"the supervisor does not answer: {error.message}") from error
        except XinferenceError as error:
            raise _original(error) from None

    async def launch_model(self, spec: Json) -> Json:
        answer: Json = await self._ask(self._supervisor.launch_model(spec))
        return answer

    async def plan_model(self, spec: Json) -> Json:
        answer: Json = await self._ask(self._supervisor.plan_model(spec))
        return answer

    async def terminate_model(self, uid: str, drain_seconds: float) -> Json:
        answer: Json = await self._ask(self._supervisor.terminate_model(uid, drain_seconds), drain_seconds)
        return answer

    async def cancel_launch(self, uid: str) -> bool:
        answer: bool = await self._ask(self._supervisor.cancel_launch(uid))
        return answer

    async def list_models(self) -> list[Json]:
        answer: list[Json] = await self._ask(self._supervisor.list_models())
        return answer

    async def describe_model(self, uid: str) -> Json:
        answer: Json = await self._ask(self._supervisor.describe_model(uid))
        return answer

    async def scale_model(self, uid: str, replica: int) -> Json:
        answer: Json = await self._ask(self._supervisor.scale_model(uid, replica))
        return answer

    async def add_replicas(self, uid: str, count: int) -> Json:
        answer: Json = await self._ask(self._supervisor.add_replicas(uid, count))
        return answer

    async def remove_replica(self, uid: str, replica_uid: str, drain_seconds: float) -> Json:
        answer: Json = await self._ask(self._supervisor.remove_replica(uid, replica_uid, drain_seconds), drain_seconds)
        return answer

    async def restart_replica(self, uid: str, replica_uid: str) -> Json:
        answer: Json = await self._ask(self._supervisor.restart_replica(uid, replica_uid))
        return answer

    async def events(self, uid: str, after: int, wait_seconds: float) -> list[Json]:
        answer: list[Json] = await self._ask(self._supervisor.events(uid, after, wait_seconds), wait_seconds)
        return answer

    async def logs(self, uid: str, replica_uid: str | None, tail: int, after: int | None) -> Json:
        answer: Json = await self._ask(self._supervisor.logs(uid, replica_uid, tail, after))
        return answer

    async def route_table(self, uid: str) -> Json:
        answer: Json = await self._ask(self._supervisor.route_table(uid))
        return answer

    async def route_changes(self, known_version: int, wait_seconds: float) -> Json:
        answer: Json = await self._ask(self._supervisor.route_changes(known_version, wait_seconds), wait_seconds)
        return answer

    async def report_replica_failure(self, uid: str, replica_uid: str, incarnation: str) -> None:
        await self._ask(self._supervisor.report_replica_failure(uid, replica_uid, incarnation))

    async def xavier_status(self, uid: str) -> Json:
        answer: Json = await self._ask(self._supervisor.xavier_status(uid))
        return answer

    async def xavier_clear(self, uid: str) -> Json:
        answer: Json = await self._ask(self._supervisor.xavier_clear(uid))
        return answer

    async def request_record(self, uid: str, replica_uid: str, request_hex: str, wait_seconds: float) -> Json | None:
        answer: Json | None = await self._ask(self._supervisor.request_record(uid, replica_uid, request_hex, wait_seconds), wait_seconds)
        return answer

    async def list_requests(self, uid: str | None, limit: int) -> list[Json]:
        answer: list[Json] = await self._ask(self._supervisor.list_requests(uid, limit))
        return answer

    async def cluster(self) -> Json:
        answer: Json = await self._ask(self._supervisor.cluster())
        return answer

    async def workers(self) -> list[Json]:
        answer: list[Json] = await self._ask(self._supervisor.workers())
        return answer

    async def devices(self) -> list[Json]:
        answer: list[Json] = await self._ask(self._supervisor.devices())
        return answer

    async def ready(self) -> bool:
        answer: bool = await self._ask(self._supervisor.ready())
        return answer


def _original(error: XinferenceError) -> XinferenceError:
    """An error of another process as it was raised: xoscar puts the process's address before its text.

    xoscar makes a subclass of the error's class for that, of the same name; the class behind it is the error's own.
    """
    kinds = [kind for kind in type(error).__mro__ if kind.__name__ == type(error).__name__ and issubclass(kind, XinferenceError)]
    return kinds[-1](error.message, error.param, error.code)

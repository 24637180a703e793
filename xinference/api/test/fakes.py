"""What the API talks to, in small: a control plane in dictionaries, a replica that says what it is told, and a served app."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from fastapi import FastAPI

from xinference.api.app import create_app
from xinference.api.config import ApiConfig
from xinference.api.key_store import KeyStore
from xinference.api.keys import KeyRing
from xinference.api.server import ApiServer, server_config
from xinference.errors import ModelNotFound, XinferenceError
from xinference.settings import Limits, Settings

Json = dict[str, Any]
OPEN_RING = KeyRing(required=False)


def model(uid: str = "m", state: str = "ready", xavier: bool = False, replica: int = 1) -> Json:
    return {
        "id": uid, "object": "model", "created": 1_790_000_000, "owned_by": "xinference", "max_model_len": 4096, "state": state,
        "replica": replica, "xavier": xavier, "model_name": uid, "spec": {"model_path": "/models/m"}, "plan": {}, "replicas": [],
        "cause": None,
    }  # fmt: skip


def replica(uid: str, path: Path | str | None, state: str = "ready", incarnation: str = "1") -> Json:
    endpoint = None if path is None else {"uds": str(path)}
    return {"replica_uid": uid, "state": state, "endpoint": endpoint, "incarnation": incarnation}


class FakeCluster:
    """A ClusterClient on dictionaries. ``calls`` holds what was asked of it; ``fails`` maps a method to the error it raises."""

    def __init__(self) -> None:
        self.models: dict[str, Json] = {}
        self.tables: dict[str, list[Json]] = {}
        self.version = 1
        self.changed = asyncio.Condition()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fails: dict[str, XinferenceError] = {}
        self.records: dict[str, Json] = {}
        self.history: dict[str, list[Json]] = {}
        self.log_lines: list[str] = []
        self.status: Json = {"enabled": True, "replicas": []}
        self.recent: list[Json] = []
        self.is_ready = True
        self.answer_records: Callable[[str], Json | None] = self.records.get

    async def put(self, described: Json, *replicas: Json) -> None:
        """Set a model and its replicas; a change that the API hears of."""
        async with self.changed:
            self.models[described["id"]] = {**described, "replicas": list(replicas)}
            self.tables[described["id"]] = list(replicas)
            self.version += 1
            self.changed.notify_all()

    async def happen(self, uid: str, stage: str, state: str = "launching", message: str = "") -> None:
        """Add an event."""
        async with self.changed:
            events = self.history.setdefault(uid, [])
            events.append(
                {
                    "seq": len(events) + 1,
                    "time": 1.0,
                    "stage": stage,
                    "replica_uid": None,
                    "message": message,
                    "state": state,
                    "progress": 0.5,
                }
            )
            self.changed.notify_all()

    def _note(self, name: str, *args: Any) -> None:
        self.calls.append((name, args))
        if name in self.fails:
            raise self.fails[name]

    def _model(self, uid: str) -> Json:
        if uid not in self.models:
            raise ModelNotFound(f"there is no model '{uid}'")
        return self.models[uid]

    async def launch_model(self, spec: Json) -> Json:
        self._note("launch_model", spec)
        uid = spec.get("model_uid", "launched")
        self.models[uid] = model(uid, state="launching")
        return self.models[uid]

    async def plan_model(self, spec: Json) -> Json:
        self._note("plan_model", spec)
        return {"model_uid": spec.get("model_uid"), "replicas": []}

    async def terminate_model(self, uid: str, drain_seconds: float) -> Json:
        self._note("terminate_model", uid, drain_seconds)
        self._model(uid)
        return {"model_uid": uid, "terminated": True}

    async def cancel_launch(self, uid: str) -> bool:
        self._note("cancel_launch", uid)
        return bool(self._model(uid)["state"] == "launching")

    async def list_models(self) -> list[Json]:
        self._note("list_models")
        return list(self.models.values())

    async def describe_model(self, uid: str) -> Json:
        self._note("describe_model", uid)
        return self._model(uid)

    async def scale_model(self, uid: str, replica: int) -> Json:
        self._note("scale_model", uid, replica)
        return {"model_uid": uid, "replica": replica}

    async def add_replicas(self, uid: str, count: int) -> Json:
        self._note("add_replicas", uid, count)
        return {"model_uid": uid, "added": count}

    async def remove_replica(self, uid: str, replica_uid: str, drain_seconds: float) -> Json:
        self._note("remove_replica", uid, replica_uid, drain_seconds)
        return {"model_uid": uid, "removed": replica_uid}

    async def restart_replica(self, uid: str, replica_uid: str) -> Json:
        self._note("restart_replica", uid, replica_uid)
        return {"model_uid": uid, "restarted": replica_uid}

    async def events(self, uid: str, after: int, wait_seconds: float) -> list[Json]:
        self._note("events", uid, after)
        self._model(uid)
        found: list[Json] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds), self.changed:
                while not (found := [event for event in self.history.get(uid, []) if event["seq"] > after]):
                    await self.changed.wait()
        return found

    async def logs(self, uid: str, replica_uid: str | None, tail: int, after: int | None) -> Json:
        self._note("logs", uid, replica_uid, tail, after)
        self._model(uid)
        start = max(0, len(self.log_lines) - tail) if after is None else after
        return {"text": "".join(self.log_lines[start:]), "next": len(self.log_lines)}

    def _table(self, uid: str) -> Json:
        return {"version": self.version, "model": self._model(uid), "replicas": self.tables.get(uid, [])}

    async def route_table(self, uid: str) -> Json:
        self._note("route_table", uid)
        return self._table(uid)

    async def route_changes(self, known_version: int, wait_seconds: float) -> Json:
        self._note("route_changes", known_version)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds), self.changed:
                while self.version == known_version:
                    await self.changed.wait()
        return {"version": self.version, "models": {uid: self._table(uid) for uid in self.models}}

    async def report_replica_failure(self, uid: str, replica_uid: str, incarnation: str) -> None:
        self._note("report_replica_failure", uid, replica_uid, incarnation)

    async def xavier_status(self, uid: str) -> Json:
        self._note("xavier_status", uid)
        self._model(uid)
        return self.status

    async def xavier_clear(self, uid: str) -> Json:
        self._note("xavier_clear", uid)
        return {"status": "cleared", "epoch": 2, "pending": [], "bytes_freed": 7}

    async def request_record(self, uid: str, replica_uid: str, request_hex: str, wait_seconds: float) -> Json | None:
        self._note("request_record", uid, replica_uid, request_hex)
        record = self.answer_records(request_hex)
        if record is None:
            await asyncio.sleep(wait_seconds)
        return record

    async def list_requests(self, uid: str | None, limit: int) -> list[Json]:
        self._note("list_requests", uid, limit)
        return self.recent[:limit]

    async def cluster(self) -> Json:
        return {"workers": ["w0"]}

    async def workers(self) -> list[Json]:
        return [{"worker_id": "w0"}]

    async def devices(self) -> list[Json]:
        return []

    async def ready(self) -> bool:
        self._note("ready")
        return self.is_ready

    def asked(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of all calls of one method."""
        return [args for called, args in self.calls if called == name]


Script = Callable[[web.Request, Json], Awaitable[web.StreamResponse]]


@dataclass
class ScriptedReplica:
    """A replica on a Unix socket that runs a script for each POST. ``left`` counts requests whose client went away."""

    script: Script
    received: list[tuple[str, Json, dict[str, str]]] = field(default_factory=list)
    left: int = 0
    metrics: str = ""

    @asynccontextmanager
    async def serving(self, path: Path) -> AsyncIterator["ScriptedReplica"]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{tail:.*}", self._post)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.received.append((request.path, body, {name.lower(): value for name, value in request.headers.items()}))
        try:
            return await self.script(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left += 1
            raise

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text=self.metrics)


def chunk(text: str | None = None, finish: str | None = None) -> Json:
    """One chunk of a streamed chat completion, as an engine sends it."""
    delta: Json = {"role": "assistant", "content": ""} if text is None and finish is None else {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def usage_chunk(prompt: int = 10, completion: int = 2, cached: int | None = 4) -> Json:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": usage}


async def start_stream(request: web.Request) -> web.StreamResponse:
    """An open event stream."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def send_event(response: web.StreamResponse, value: Any) -> None:
    """One event: a JSON value, or text such as [DONE]."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    await response.write(f"data: {text}\n\n".encode())


def streaming(*events: Any) -> Script:
    """A script that streams these events at once."""

    async def script(request: web.Request, _: Json) -> web.StreamResponse:
        response = await start_stream(request)
        for event in events:
            await send_event(response, event)
        return response

    return script


def answering(body: Any, status: int = 200) -> Script:
    """A script that answers with one JSON value, or with text."""

    async def script(_: web.Request, __: Json) -> web.StreamResponse:
        return web.Response(text=body, status=status) if isinstance(body, str) else web.json_response(body, status=status)

    return script


@dataclass
class Served:
    """An app behind a real port."""

    app: FastAPI
    server: ApiServer
    url: str
    port: int


@asynccontextmanager
async def serving(
    cluster: FakeCluster,
    *,
    keys: KeyRing = OPEN_RING,
    limits: Limits | None = None,
    config: ApiConfig | None = None,
    settings: Settings | None = None,
    store: KeyStore | None = None,
) -> AsyncIterator[Served]:
    """The app on a free port of 127.0.0.1."""
    app = create_app(cluster, settings or Settings(), limits or Limits(), keys, config=config, store=store)
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY where it is named alone: else 40 ms an answer
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = ApiServer(server_config(app), app)
    task = asyncio.create_task(server.serve([listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.001)
    try:
        yield Served(app, server, f"http://127.0.0.1:{port}", port)
    finally:
        server.end_now()
        await task

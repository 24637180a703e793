"""A server of the REST contract, small enough to be read: models are dictionaries, engines repeat their prompt.

``FakeServer`` is pure: a request in, an answer out. ``mock_transport`` puts it behind either face of the client without a socket;
``serving`` puts it behind a real one, for whatever runs in another process.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx2

KEY = "key-of-the-fake"
GATE_SECONDS = 30.0
STAGES = ("planned", "engine_starting", "ready")


@dataclass
class Answer:
    """Status, body (JSON value, text, or events with a stream flag)."""

    status: int = 200
    body: Any = None
    stream: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    def payload(self) -> bytes:
        if self.stream:
            return "".join(event if event.startswith(":") else f"data: {event}\n\n" for event in self.body).encode()
        return self.body.encode() if isinstance(self.body, str) else json.dumps(self.body).encode()

    def content_type(self) -> str:
        if self.stream:
            return "text/event-stream; charset=utf-8"
        return "text/plain; charset=utf-8" if isinstance(self.body, str) else "application/json"


def refusal(status: int, code: str | None, message: str, param: str | None = None) -> Answer:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Answer(status, {"error": {"message": message, "type": kind, "param": param, "code": code}})


@dataclass
class FakeServer:
    """The contract on dictionaries.

    Args:
        key: API key that is asked for, or None.
        fails: model uids whose launch fails, with the cause.
        holds: model uids whose launch stays in its first stage until it is cancelled.
        stubborn: those of them whose cancellation never comes to its end.
        gate: launches are answered only while it is set.
        hold_seconds: how long the event stream of a held launch stays open without an event.
        cuts: how many event streams break off after one event.
    """

    key: str | None = None
    fails: dict[str, str] = field(default_factory=dict)
    holds: set[str] = field(default_factory=set)
    stubborn: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    hold_seconds: float = 0.0
    cuts: int = 0
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seen: list[tuple[str, str, Any, dict[str, str]]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.gate.set()

    def answer(self, method: str, target: str, body: Any, headers: dict[str, str]) -> Answer:
        """Answer one request. ``target`` is path and query, header names are lower case."""
        url = urlsplit(target)
        params = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.seen.append((method, target, body, headers))
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}" and url.path != "/health":
            return refusal(401, "invalid_api_key", "no valid API key was sent")
        if (method, url.path) == ("POST", "/v1/models"):
            self.gate.wait(timeout=GATE_SECONDS)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        with self.changed:
            found = self._route(method, parts, params, body or {}, headers)
        found.headers.setdefault("x-request-id", "request-1")
        return found

    def _route(self, method: str, parts: list[str], params: dict[str, str], body: dict[str, Any], headers: dict[str, str]) -> Answer:
        match (method, *parts):
            case ("GET", "health"):
                return Answer(body={"status": "ok"})
            case ("GET", "v1", "models"):
                return Answer(body={"object": "list", "data": list(self.models.values())})
            case ("POST", "v1", "models"):
                return self._launch(body, params.get("dry_run") == "true")
            case ("POST", "v1", "chat" | "completions", *_):
                return self._complete(body, headers)
            case ("GET", "v1", "requests"):
                return Answer(body={"data": []})
            case ("GET", "v1", "cluster"):
                return Answer(body={"workers": [{"worker_id": "worker-0", "state": "ready"}]})
            case ("GET", "v1", "limits"):
                row = {"name": "choices", "value": 4, "default": 8, "description": "upper bound of `n`", "refused": 3}
                return Answer(body={"data": [row]})
            case (_, "v1", "models", uid, *rest):
                if uid not in self.models:
                    return refusal(404, "model_not_found", f"there is no model '{uid}'", "model")
                return self._of_model(method, uid, rest, params, body)
        return refusal(404, "not_found", "there is no such path")

    def _of_model(self, method: str, uid: str, rest: list[str], params: dict[str, str], body: dict[str, Any]) -> Answer:
        model = self.models[uid]
        match (method, *rest):
            case ("GET",):
                return Answer(body=model)
            case ("DELETE",):
                del self.models[uid]
                return Answer(body={"model_uid": uid, "terminated": True})
            case ("POST", "cancel"):
                held = uid in self.holds
                if held and uid not in self.stubborn:
                    self.holds.discard(uid)
                    self._event(uid, "cancelled", "cancelled by the user", 1.0)
                return Answer(body={"cancelled": held})
            case ("GET", "events"):
                return self._events(uid, int(params.get("after", 0)))
            case ("GET", "replicas"):
                return Answer(body={"data": model["replicas"]})
            case ("POST", "scale"):
                model["replicas"] = [replica(uid, index) for index in range(body["replica"])]
                return Answer(202, {"model_uid": uid, "replica": body["replica"]})
            case ("GET", "logs"):
                return self._logs(params)
            case ("GET", "xavier"):
                return Answer(body=xavier_status(model["replicas"], model["xavier"]))
            case ("POST", "xavier", "clear"):
                return Answer(body={"status": "cleared", "epoch": 2, "pending": [], "bytes_freed": 4096})
        return refusal(404, "not_found", "there is no such path")

    def _launch(self, body: dict[str, Any], dry_run: bool) -> Answer:
        uid = body.get("model_uid") or "model-0"
        count = int(body.get("replica", 1))
        if body.get("enable_xavier") and count < 2:
            return refusal(400, None, "sharing needs at least two replicas", "enable_xavier")
        if uid in self.models:
            return refusal(409, "conflict", f"'{uid}' exists already", "model_uid")
        if dry_run:
            return Answer(body=plan(uid, count, bool(body.get("enable_xavier"))))
        xavier = bool(body.get("enable_xavier"))
        self.models[uid] = {"id": uid, "object": "model", "created": 1, "owned_by": "xinference", "state": "creating", "replica": count}
        self.models[uid] |= {"max_model_len": 2048, "xavier": xavier, "model_name": body.get("model_name"), "cause": None, "spec": body}
        self.models[uid] |= {"replicas": [replica(uid, index) for index in range(count)], "plan": plan(uid, count, xavier)}
        self._event(uid, "planned", "plan made", 0.1)
        if uid in self.fails:
            self.models[uid] |= {"state": "failed", "cause": self.fails[uid]}
            self._event(uid, "failed", self.fails[uid], 1.0)
        elif uid not in self.holds:
            self.models[uid]["state"] = "ready"
            self._event(uid, "engine_starting", "starting 'é\u2028'", 0.5)
            self._event(uid, "ready", "serving", 1.0)
        return Answer(202, {"model_uid": uid, "events": f"/v1/models/{uid}/events"})

    def _event(self, uid: str, stage: str, message: str, progress: float) -> None:
        log = self.events.setdefault(uid, [])
        event = {"seq": len(log) + 1, "time": 1.0, "stage": stage, "replica_uid": None, "message": message}
        log.append(event | {"state": self.models[uid]["state"], "progress": progress})
        self.changed.notify_all()

    def _events(self, uid: str, after: int) -> Answer:
        if uid in self.holds and after >= len(self.events[uid]):
            self.changed.wait(timeout=self.hold_seconds)
        pending = [json.dumps(event, ensure_ascii=False) for event in self.events[uid] if event["seq"] > after]
        if self.cuts > 0:
            self.cuts -= 1
            pending = pending[:1]
        return Answer(body=[": keep-alive\n\n", *pending], stream=True)

    def _logs(self, params: dict[str, str]) -> Answer:
        lines = [f"line {index} of {params.get('replica', 'all')}" for index in range(int(params.get("tail", 200)))]
        if params.get("follow") == "true":
            return Answer(body=lines, stream=True)
        return Answer(body="\n".join(lines) + "\n")

    def _complete(self, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        if body["model"] not in self.models:
            return refusal(404, "model_not_found", f"there is no model '{body['model']}'", "model")
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        usage: dict[str, Any] = {"prompt_tokens": 64, "completion_tokens": 2, "total_tokens": 66}
        usage["prompt_tokens_details"] = {"cached_tokens": 32}
        extra = {"xinference": {"replica": headers.get("x-xinference-replica", "replica-0"), "sources": {"local": 32, "computed": 32}}}
        debug = extra if headers.get("x-xinference-debug") == "1" else {}
        if not body.get("stream"):
            choice = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
            return Answer(body={"choices": [choice | {"index": 0, "finish_reason": "stop"}], "usage": usage} | debug)
        if text == "die":
            return Answer(body=[chunk(body, "half"), '{"error": {"message": "the engine died", "code": "engine_dead"}}'], stream=True)
        if text == "cut":
            return Answer(body=[chunk(body, "half")], stream=True)
        last = json.dumps({"choices": [], "usage": usage} | debug)
        return Answer(body=[*(chunk(body, word + " ") for word in text.split(" ")), last, "[DONE]"], stream=True)


def chunk(body: dict[str, Any], text: str) -> str:
    choice = {"index": 0, "text": text} if "prompt" in body else {"index": 0, "delta": {"content": text}}
    return json.dumps({"choices": [choice]})


def replica(uid: str, index: int) -> dict[str, Any]:
    found = {"replica_uid": f"{uid}-{index}", "state": "ready", "cause": None, "worker_id": "worker-0", "address": "127.0.0.1:1"}
    return found | {"incarnation": "a1", "pid": 4242 + index, "restarts": 0, "since": 1.0, "running": 0, "waiting": 0}


def plan(uid: str, count: int, xavier: bool) -> dict[str, Any]:
    cache = {"cpu_cache_bytes": 1 << 20, "host_total_bytes": 2 << 20, "blocks": 32, "tokens": 1024, "file_bytes": 1 << 20}
    places = [{"replica_uid": f"{uid}-{index}", "worker_id": "worker-0", "devices": []} for index in range(count)]
    return {
        "model_uid": uid,
        "replicas": [place | {"gpu_memory_utilization": None} for place in places],
        "kv": {"bytes_per_token": 1024, "block_size": 32, "bytes_per_block": 32768},
        "kv_cache_bytes": 64 << 20,
        "xavier": cache | {"arithmetic": "1 MiB / 32 KiB a block = 32 blocks = 1,024 tokens"} if xavier else None,
        "command": ["python", "-m", "engine"],
    }


def xavier_status(replicas: list[dict[str, Any]], enabled: bool) -> dict[str, Any]:
    tier = {"budget_bytes": 1 << 20, "file_bytes": 1 << 20, "book_bytes": 100, "used_bytes": 65536, "blocks": 2, "capacity_blocks": 32}
    tier |= {"block_bytes": 32768, "tokens_per_block": 32}
    uids = [found["replica_uid"] for found in replicas]
    return {
        "enabled": enabled,
        "epoch": 1,
        "config": {},
        "replicas": [
            {
                "replica_uid": uid,
                "state": "ready",
                "namespace": "0123456789abcdef",
                "tiers": {"cpu": tier},
                "sources": {"local": 10, "peer_cpu": 20, "computed": 70},
                "counters": {"saves_blocks": 2, "evictions": 0},
                "peers": [{"replica_uid": peer, "attached": True, "reason": None} for peer in uids if peer != uid],
            }
            for uid in uids
        ],
        "totals": {},
    }


def mock_transport(server: FakeServer) -> httpx2.MockTransport:
    """The server behind either face of the client, without a socket."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content) if request.content else None
        found = server.answer(request.method, request.url.raw_path.decode(), body, dict(request.headers))
        return httpx2.Response(found.status, content=found.payload(), headers=found.headers | {"content-type": found.content_type()})

    return httpx2.MockTransport(handle)


@contextmanager
def serving(server: FakeServer) -> Iterator[str]:
    """The server on a free port of the loopback; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            size = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(size)) if size else None
            found = server.answer(self.command, self.path, body, {key.lower(): value for key, value in self.headers.items()})
            payload = found.payload()
            self.send_response(found.status)
            for key, value in (found.headers | {"content-type": found.content_type(), "content-length": str(len(payload))}).items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_DELETE = _handle

        def log_message(self, *_: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_address[1]}"
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()

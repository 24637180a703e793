"""Secrets and prompts are planted everywhere they may be given, and searched for everywhere they could come out, at debug level."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from xinference.client.sync_client import Client
from xinference.deploy.test.servers import ServerProcess, make_model
from xinference.errors import XinferenceError

SERVER_TOKEN = "hf-canary-of-the-server-3141"
SERVER_PASSWORD = "correct horse canary 2718"
ENVIRONMENT = {"HF_TOKEN": SERVER_TOKEN, "SMTP_PASSWORD": SERVER_PASSWORD, "MY_SECRET": "canary+of/base64=="}
LAUNCHED = {
    "HF_TOKEN": "hf-canary-of-the-launch-1618",
    "VLLM_S3_SECRET_X": "launch canary with spaces",
    "TORCH_PASSWORD": "torch-canary-5772",
}
PROMPT = "canaryprompt zebra quagga"
TOOL_ARGUMENT = "canarytool okapi"
SALT = "canarysalt-tapir"
WRONG_KEY = "xin-canary-wrong-key-0123456789abcdef"


class CommandLines:
    """Collects the command lines of a process and all below it, as ``ps`` shows them, while something runs."""

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self.seen: set[str] = set()

    def __enter__(self) -> "CommandLines":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def look(self) -> None:
        for pid in self._pids():
            try:
                family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
                self.seen |= {" ".join(process.cmdline()) for process in family}
            except psutil.Error:
                continue

    def _collect(self) -> None:
        while not self._over.wait(0.05):
            self.look()


@dataclass
class Planted:
    """A server that secrets were given to, and everything that it showed."""

    server: ServerProcess
    model_path: Path
    secrets: dict[str, str] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)

    @property
    def admin_key(self) -> str:
        return (self.server.home / "admin.key").read_text().strip()

    def http(self, method: str, path: str, key: str | None = None, **options: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key or self.admin_key}", **options.pop("headers", {})}
        with httpx2.Client(trust_env=False, timeout=30) as client:
            return client.request(method, self.server.endpoint + path, headers=headers, **options)

    def refused(self, name: str, path: str, body: Any, **options: Any) -> None:
        """A request that must fail; its whole answer is kept."""
        response = self.http("POST", path, json=body, **options)
        assert response.status_code >= 400, (name, response.text)
        self.shown[f"error: {name}"] = f"{response.headers}{response.text}"

    def found(self) -> dict[str, list[str]]:
        """Where each secret came out."""
        places = {name: [place for place, text in self.shown.items() if value in text] for name, value in self.secrets.items()}
        return {name: where for name, where in places.items() if where}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    root = tmp_path_factory.mktemp("canaries")
    server = ServerProcess("local", root, environment=ENVIRONMENT)
    server.start("--port", str(server.port), "--supervisor-port", "0", "--require-key", "--log-level", "debug")
    found = Planted(server, make_model(root / "model"))
    tools: list[int] = []

    def pids() -> list[int]:
        assert server.process is not None
        return [server.process.pid, *tools]

    try:
        server.wait_until_serving()
        with CommandLines(pids) as lines:
            launch(found, tools)
            keys = make_keys(found)
            ask(found, keys)
            fail(found)
            look_around(found)
            lines.look()
        found.shown["command lines"] = "\n".join(lines.seen)
        server.stop()
        found.shown["log"] = server.log
        found.shown["files"] = files_of(server.home)
        found.secrets |= {"admin key": found.admin_key, "cluster key": (server.home / "cluster.key").read_text().strip()}
        yield found
    finally:
        server.kill()


def launch(planted: Planted, tools: list[int]) -> None:
    """By command line, with secrets that the tool takes from its own environment."""
    planted.secrets |= {f"server's {name}": value for name, value in ENVIRONMENT.items()}
    planted.secrets |= {f"launch's {name}": value for name, value in LAUNCHED.items()}
    words = ["launch", "-u", "m", "--model-path", str(planted.model_path), "--model-engine", "fake", "--replica", "2", "--enable-xavier"]
    words += ["--xavier-cpu-cache-bytes", "1MiB", *(word for name in LAUNCHED for word in ("--env", name)), "-o", "json"]
    own = {"XINFERENCE_ENDPOINT": planted.server.endpoint, "XINFERENCE_API_KEY": planted.admin_key}
    tool = subprocess.Popen(
        [sys.executable, "-m", "xinference.deploy", *words],
        env={**os.environ, **LAUNCHED, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    tools.append(tool.pid)
    out, err = tool.communicate(timeout=60)
    assert tool.returncode == 0, err + planted.server.log
    assert set(json.loads(out)["spec"]["envs"]) == set(LAUNCHED)
    planted.shown["launch"] = out + err


def make_keys(planted: Planted) -> list[str]:
    keys = [planted.http("POST", "/v1/keys", json={"name": name}).json() for name in ("one", "two")]
    planted.http("DELETE", f"/v1/keys/{keys[1]['id']}").raise_for_status()
    planted.secrets |= {"key in use": keys[0]["key"], "revoked key": keys[1]["key"], "wrong key": WRONG_KEY}
    return [key["key"] for key in keys]


def ask(planted: Planted, keys: list[str]) -> None:
    """Requests that are answered; the answers are for the client alone."""
    planted.secrets |= {word: word for word in (*PROMPT.split(), *TOOL_ARGUMENT.split(), SALT)}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": TOOL_ARGUMENT})}}
    messages = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "tool_calls": [call], "content": None},
        {"role": "tool", "tool_call_id": "c", "content": TOOL_ARGUMENT},
        {"role": "user", "content": PROMPT * 20},
    ]
    for stream in (False, True):
        for path, body in (("/v1/chat/completions", {"messages": messages}), ("/v1/completions", {"prompt": PROMPT * 20})):
            for steer in ("m-0", "m-1"):
                body = {"model": "m", "max_tokens": 4, "stream": stream, "cache_salt": SALT, "user": PROMPT, **body}
                headers = {"x-xinference-replica": steer, "x-xinference-debug": "1"}
                assert planted.http("POST", path, json=body, headers=headers).status_code == 200
    assert planted.http("POST", "/tokenize", keys[0], json={"model": "m", "prompt": PROMPT}).status_code == 200


def fail(planted: Planted) -> None:
    """Requests that are refused at every stage, by the API and by the engine; keys that are refused; a launch that fails."""
    messages = [{"role": "user", "content": PROMPT}]
    wrong = {
        "a wrong type": {"model": "m", "messages": [{"role": "user", "content": {"text": PROMPT}}]},
        "a media part": {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PROMPT}}]}]},
        "a number": {"model": "m", "messages": messages, "temperature": PROMPT},
        "a limit": {"model": "m", "messages": messages, "stop": [PROMPT] * 9},
        "the engine's range": {"model": "m", "messages": messages, "temperature": 99.0},
        "too long": {"model": "m", "messages": [{"role": "user", "content": PROMPT * 3000}]},
        "no model": {"model": "none", "messages": messages},
        "a reserved field": {"model": "m", "messages": messages, "kv_transfer_params": {"x": PROMPT}},
        "tools": {
            "model": "m",
            "messages": messages,
            "tools": [{"type": "function", "function": {"name": 1, "description": TOOL_ARGUMENT}}],
        },
        "a salt": {"model": "m", "messages": messages, "cache_salt": {"x": SALT}},
    }
    for name, body in wrong.items():
        planted.refused(name, "/v1/chat/completions", body)
    planted.refused("a wrong key", "/v1/chat/completions", {"model": "m", "messages": messages}, key=WRONG_KEY)
    planted.refused("a launch", "/v1/models", {"model_path": "/nowhere", "envs": {"LD_SECRET": LAUNCHED["HF_TOKEN"]}})
    planted.refused("an argument", "/v1/models", {"model_path": "/nowhere", "hf_token": LAUNCHED["HF_TOKEN"]})
    response = planted.http(
        "POST",
        "/v1/chat/completions",
        content=b'{"model": "m", "messages": "' + PROMPT.encode(),
        headers={"content-type": "application/json"},
    )
    planted.shown["error: cut JSON"] = response.text
    body = {
        "model_uid": "broken",
        "model_path": str(planted.model_path),
        "model_engine": "fake",
        "fail_start": "no memory",
        "envs": LAUNCHED,
    }
    with Client(planted.server.endpoint, planted.admin_key) as client:
        with pytest.raises(XinferenceError) as caught:
            client.launch(wait_ready=True, **body)
        planted.shown["a launch that failed"] = str(caught.value)


def look_around(planted: Planted) -> None:
    """Everything that administrators can read."""
    paths = [
        "/metrics",
        "/openapi.json",
        "/version",
        "/v1/models",
        "/v1/requests?limit=1000",
        "/v1/cluster",
        "/v1/workers",
        "/v1/devices",
        "/v1/keys",
    ]
    for uid in ("m", "broken"):
        paths += [f"/v1/models/{uid}{below}" for below in ("", "/events", "/logs?tail=10000", "/replicas", "/xavier")]
    paths += [f"/v1/requests/{request['request_id']}" for request in planted.http("GET", "/v1/requests").json()["data"][:20]]
    for path in paths:
        response = planted.http("GET", path)
        assert response.status_code == 200 or path == "/v1/models/broken/xavier", (path, response.text)
        planted.shown[path] = f"{response.headers}{response.text}"


def files_of(home: Path) -> str:
    """What lies in the home beside the two keys that are kept there."""
    kept = {"admin.key", "cluster.key"}
    return "\n".join(path.read_text(errors="replace") for path in home.rglob("*") if path.is_file() and path.name not in kept)


def test_no_secret_and_no_prompt_comes_out_anywhere(planted: Planted) -> None:
    assert len(planted.secrets) >= 14
    assert planted.found() == {}


def test_the_search_looks_at_what_was_said(planted: Planted) -> None:
    """Every place that was searched holds what it is for, so that an empty one is not taken for a clean one."""
    assert "DEBUG" in planted.shown["log"]
    assert "was created with scopes" in planted.shown["log"]
    assert "xinference_requests_total" in planted.shown["/metrics"]
    assert all(f'"{name}":"[redacted]"' in planted.shown["/v1/models/m"] for name in LAUNCHED)
    assert "serving" in planted.shown["/v1/models/m/logs?tail=10000"]
    assert '"ready"' in planted.shown["/v1/models/m/events"]
    assert '"prompt_tokens"' in planted.shown["/v1/requests?limit=1000"]
    assert "xinference.model.llm.fake.server" in planted.shown["command lines"]
    assert "--env HF_TOKEN" in planted.shown["command lines"]
    assert "sha256" in planted.shown["files"]
    assert sum(name.startswith("error: ") for name in planted.shown) >= 14
    assert "broken" in planted.shown["/v1/models"]

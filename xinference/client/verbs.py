"""What both faces of the client can ask for in one request, written once."""

from abc import ABC, abstractmethod
from typing import Any

from xinference.client import calls
from xinference.client.calls import Call, Json
from xinference.client.completions import chat_call, generate_call
from xinference.client.connection import Connection
from xinference.client.launching import launch_body


class Verbs(ABC):
    """One method per request. Each returns the answer's JSON value in the synchronous face, and an awaitable of it in the asynchronous
    one; each raises XinferenceError (see client/errors.py)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def endpoint(self) -> str:
        return self._connection.endpoint

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine."""
        return self._connection.is_local

    @abstractmethod
    def _send(self, call: Call) -> Any:
        """The JSON value that a call is answered with, or an awaitable of it."""

    @abstractmethod
    def _text(self, call: Call) -> Any:
        """The text that a call is answered with, or an awaitable of it."""

    # Models

    def models(self) -> Any:
        """A list of all models, those that failed to launch included."""
        return self._send(calls.models())

    def model(self, model_uid: str) -> Any:
        """One model with its spec, plan, replicas and cause of failure."""
        return self._send(calls.model(model_uid))

    def plan(self, **fields: Any) -> Any:
        """What ``launch`` with these fields would do: devices, bytes per block, budgets. Starts nothing."""
        return self._send(calls.launch(launch_body(fields), dry_run=True))

    def terminate(self, model_uid: str, drain_seconds: float | None = None) -> Any:
        """Stop a model; open requests get ``drain_seconds`` to finish (None: the server's default)."""
        return self._send(calls.terminate(model_uid, drain_seconds))

    def cancel(self, model_uid: str) -> Any:
        """Cancel a launch; False when it was over already."""
        return self._send(calls.cancel(model_uid))

    # Replicas

    def replicas(self, model_uid: str) -> Any:
        """A list of a model's replicas with their states and causes."""
        return self._send(calls.replicas(model_uid))

    def scale(self, model_uid: str, replica: int) -> Any:
        """Bring a model to this many replicas; returns before they are ready."""
        return self._send(calls.scale(model_uid, replica))

    def add_replicas(self, model_uid: str, count: int = 1) -> Any:
        """Add replicas; returns before they are ready."""
        return self._send(calls.add_replicas(model_uid, count))

    def remove_replica(self, model_uid: str, replica_uid: str, drain_seconds: float | None = None) -> Any:
        """Drain and stop one replica."""
        return self._send(calls.remove_replica(model_uid, replica_uid, drain_seconds))

    def restart_replica(self, model_uid: str, replica_uid: str) -> Any:
        """Stop one replica's engine and start it again; returns before it is ready."""
        return self._send(calls.restart_replica(model_uid, replica_uid))

    def logs(self, model_uid: str, replica_uid: str | None = None, tail: int = 200) -> Any:
        """The last lines of an engine's log, as text."""
        return self._text(calls.logs(model_uid, replica_uid, tail, follow=False))

    # Shared cache, requests, cluster

    def xavier(self, model_uid: str) -> Any:
        """The shared cache of a model: budgets, tiers, counters, where prompt tokens came from."""
        return self._send(calls.xavier(model_uid))

    def clear(self, model_uid: str) -> Any:
        """Empty the shared cache of a model on all replicas."""
        return self._send(calls.clear(model_uid))

    def requests(self, model_uid: str | None = None, limit: int | None = None) -> Any:
        """A list of recent requests with their phases and token sources."""
        return self._send(calls.requests(model_uid, limit))

    def request(self, request_id: str) -> Any:
        """One recent request."""
        return self._send(calls.request(request_id))

    def abort(self, model_uid: str, request_id: str) -> Any:
        """Abort a running request; False when it was over already."""
        return self._send(calls.abort(model_uid, request_id))

    def read(self, path: str) -> Any:
        """The answer of a plain GET: ``/v1/workers``, ``/v1/devices``, ``/version``."""
        return self._send(Call("GET", path))

    def cluster(self) -> Any:
        """The cluster's workers, devices and versions."""
        return self.read("/v1/cluster")

    def limits(self) -> Any:
        """A list of what the server accepts, with how many requests each limit has refused."""
        return self._send(calls.limits())

    def metrics(self) -> Any:
        """All metrics in Prometheus' text format."""
        return self._text(Call("GET", "/metrics"))

    # API keys

    def keys(self) -> Any:
        """A list of all API keys, without their secrets."""
        return self._send(calls.keys())

    def create_key(self, name: str, **fields: Any) -> Any:
        """Make an API key. The answer's ``key`` is the secret; no later answer has it.

        Args:
            fields: scopes (a list of inference, monitor, admin), models, expires_in_seconds, requests_per_minute, concurrent_requests.
        """
        return self._send(calls.create_key({"name": name, **fields}))

    def revoke_key(self, key_id: str) -> Any:
        """Refuse an API key from now on, and end what it has running."""
        return self._send(calls.revoke_key(key_id))

    # Inference, for the command line

    def chat(self, model_uid: str, messages: list[Json], **options: Any) -> Any:
        """One chat completion; ``options`` are fields of the OpenAI request, and ``replica_uid`` (steers) and ``debug``."""
        return self._send(chat_call(model_uid, messages, options))

    def generate(self, model_uid: str, prompt: str | list[int], **options: Any) -> Any:
        """One text completion; options as for ``chat``."""
        return self._send(generate_call(model_uid, prompt, options))

    def tokenize(self, model_uid: str, prompt: str) -> Any:
        """A text's token ids (``tokens``) and their ``count``."""
        return self._send(calls.tokenize(model_uid, prompt))

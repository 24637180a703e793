"""Every request of the API as a value: what both faces of the client send. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

REPLICA_HEADER: Final = "x-xinference-replica"
DEBUG_HEADER: Final = "x-xinference-debug"

Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One request.

    Args:
        method: HTTP method.
        path: absolute path, ids already quoted.
        params: query; None values are left out.
        body: JSON body, or None for a request without one.
        headers: beside the client's own.
        field: the field of the answer that is wanted, None for the whole of it.
        needs: fields without which a whole answer is none of this API.
        patience_seconds: how much longer than usual the server may take, because it was asked to wait.
    """

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Json | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    field: str | None = None
    needs: tuple[str, ...] = ()
    patience_seconds: float = 0.0

    def query(self) -> dict[str, str]:
        """The query as text; booleans in JSON's spelling."""
        shown = {key: value for key, value in self.params.items() if value is not None}
        return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in shown.items()}


def model_path(model_uid: str, *parts: str) -> str:
    """Path of a model or of something below it. Ids are quoted whole: they may hold a slash."""
    return "/".join(["/v1/models", quote(model_uid, safe=""), *(quote(part, safe="") for part in parts)])


def models() -> Call:
    return Call("GET", "/v1/models", field="data")


def model(model_uid: str) -> Call:
    return Call("GET", model_path(model_uid), needs=("id", "state"))


def launch(spec: Json, dry_run: bool) -> Call:
    return Call("POST", "/v1/models", params={"dry_run": True} if dry_run else {}, body=spec, needs=("model_uid",))


def terminate(model_uid: str, drain_seconds: float | None) -> Call:
    return Call(
        "DELETE", model_path(model_uid), params={"drain": drain_seconds}, needs=("model_uid",), patience_seconds=drain_seconds or 0.0
    )


def cancel(model_uid: str) -> Call:
    return Call("POST", model_path(model_uid, "cancel"), field="cancelled")


def events(model_uid: str, after: int, follow: bool) -> Call:
    return Call("GET", model_path(model_uid, "events"), params={"after": after, "follow": True if follow else None})


def replicas(model_uid: str) -> Call:
    return Call("GET", model_path(model_uid, "replicas"), field="data")


def add_replicas(model_uid: str, count: int) -> Call:
    return Call("POST", model_path(model_uid, "replicas"), body={"count": count})


def remove_replica(model_uid: str, replica_uid: str, drain_seconds: float | None) -> Call:
    path = model_path(model_uid, "replicas", replica_uid)
    return Call("DELETE", path, params={"drain": drain_seconds}, patience_seconds=drain_seconds or 0.0)


def restart_replica(model_uid: str, replica_uid: str) -> Call:
    return Call("POST", model_path(model_uid, "replicas", replica_uid, "restart"))


def scale(model_uid: str, replica: int) -> Call:
    return Call("POST", model_path(model_uid, "scale"), body={"replica": replica})


def logs(model_uid: str, replica_uid: str | None, tail: int, follow: bool) -> Call:
    return Call("GET", model_path(model_uid, "logs"), params={"replica": replica_uid, "tail": tail, "follow": follow})


def abort(model_uid: str, request_id: str) -> Call:
    return Call("POST", model_path(model_uid, "requests", request_id, "abort"), field="aborted")


def xavier(model_uid: str) -> Call:
    return Call("GET", model_path(model_uid, "xavier"), needs=("enabled",))


def clear(model_uid: str) -> Call:
    return Call("POST", model_path(model_uid, "xavier", "clear"), needs=("status",))


def requests(model_uid: str | None, limit: int | None) -> Call:
    return Call("GET", "/v1/requests", params={"model": model_uid, "limit": limit}, field="data")


def request(request_id: str) -> Call:
    return Call("GET", f"/v1/requests/{quote(request_id, safe='')}")


def limits() -> Call:
    return Call("GET", "/v1/limits", field="data")


def keys() -> Call:
    return Call("GET", "/v1/keys", field="data")


def create_key(fields: Json) -> Call:
    return Call("POST", "/v1/keys", body={name: value for name, value in fields.items() if value is not None}, needs=("id", "key"))


def revoke_key(key_id: str) -> Call:
    return Call("DELETE", f"/v1/keys/{quote(key_id, safe='')}", needs=("id",))


def completion(path: str, body: Json, replica_uid: str | None, debug: bool, patience_seconds: float) -> Call:
    """An inference request; ``replica_uid`` steers it, ``debug`` asks where its prompt tokens came from."""
    headers = {}
    if replica_uid is not None:
        headers[REPLICA_HEADER] = replica_uid
    if debug:
        headers[DEBUG_HEADER] = "1"
    return Call("POST", path, body=body, headers=headers, patience_seconds=patience_seconds)


def tokenize(model_uid: str, prompt: str) -> Call:
    return Call("POST", "/tokenize", body={"model": model_uid, "prompt": prompt})

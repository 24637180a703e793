"""Models and their replicas: list, launch, scale, stop. The work is the supervisor's; nothing is decided here."""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from xinference.api.body import decode
from xinference.api.control import ClusterClient, Json
from xinference.api.errors import RequestAborted
from xinference.api.openapi import request_body
from xinference.api.routing import ModelRoute, is_admin, key_use, scoped_router, state_of
from xinference.api.schemas import ReplicaCount, Scale
from xinference.api.watch import while_connected
from xinference.core.engine_arguments import canonical
from xinference.core.spec import LaunchSpec
from xinference.errors import LaunchCancelled, LaunchFailed
from xinference.model.llm.engine_log import REDACTED, SECRET_NAME

# What a key that may only ask models sees of one: the rest tells of paths and machines.
PUBLIC_FIELDS: Final = ("id", "object", "created", "owned_by", "max_model_len", "state", "replica", "xavier", "model_name")
FINAL_STAGES: Final = frozenset({"ready", "failed", "terminated", "cancelled"})

router: Final[APIRouter] = scoped_router()
Drain = Annotated[float | None, Query(ge=0, le=3600, description="seconds that open requests get to finish")]


@router.get("/v1/models", summary="All models")
async def list_models(request: Request) -> Json:
    models = await state_of(request).cluster.list_models()
    if is_admin(request):
        return {"object": "list", "data": models}
    allowed = key_use(request).key.models
    return {"object": "list", "data": [public_part(model) for model in models if allowed is None or model["id"] in allowed]}


@router.post(
    "/v1/models", summary="Launch a model, or plan its launch", status_code=202, response_model=None, openapi_extra=request_body(LaunchSpec)
)
async def launch_model(request: Request, dry_run: bool = False) -> Response:
    api = state_of(request)
    spec = decode(await request.body(), api.limits.json_depth)
    asked = {canonical(name): value for name, value in spec.items()}  # a dry run by any spelling must not launch
    if dry_run or asked.get("dry_run") is True:
        return JSONResponse(await api.cluster.plan_model(spec))
    model = await api.cluster.launch_model(spec)
    uid = model["id"]
    accepted = {"model_uid": uid, "events": f"/v1/models/{uid}/events"}
    if asked.get("wait_ready") is not True:
        return JSONResponse(accepted, status_code=202)
    # A client that leaves has stopped waiting; the launch goes on, and can be cancelled by its own verb.
    state = await while_connected(request.receive, wait_ready(api.cluster, uid, api.config.event_poll_seconds))
    return JSONResponse({**accepted, "state": state})


async def wait_ready(cluster: ClusterClient, uid: str, poll_seconds: float) -> str:
    """Wait for a launch to end; returns the model's state.

    Raises:
        LaunchFailed, LaunchCancelled: it ended without a ready model.
    """
    seen = 0
    while True:
        for event in await cluster.events(uid, seen, poll_seconds):
            seen = event["seq"]
            if event["stage"] in FINAL_STAGES:
                return _launched(uid, event)


def _launched(uid: str, event: Json) -> str:
    if event["stage"] == "ready":
        return str(event["state"])
    if event["stage"] == "failed":
        raise LaunchFailed(event["message"] or f"the launch of '{uid}' failed")
    raise LaunchCancelled(f"the launch of '{uid}' was {event['stage']}")


@router.post("/v1/models/{uid:path}/cancel", summary="Cancel a launch")
async def cancel_launch(request: Request, uid: str) -> Json:
    return {"cancelled": await state_of(request).cluster.cancel_launch(uid)}


@router.get("/v1/models/{uid:path}/replicas", summary="A model's replicas")
async def list_replicas(request: Request, uid: str) -> Json:
    model = await state_of(request).cluster.describe_model(uid)
    return {"data": model["replicas"]}


@router.post("/v1/models/{uid:path}/replicas", summary="Add replicas", status_code=202)
async def add_replicas(request: Request, uid: str, body: ReplicaCount | None = None) -> Json:
    return await state_of(request).cluster.add_replicas(uid, body.count if body is not None else 1)


@router.delete("/v1/models/{uid:path}/replicas/{replica_uid}", summary="Drain and stop a replica")
async def remove_replica(request: Request, uid: str, replica_uid: str, drain: Drain = None) -> Json:
    api = state_of(request)
    return await api.cluster.remove_replica(uid, replica_uid, api.settings.drain_seconds if drain is None else drain)


@router.post("/v1/models/{uid:path}/replicas/{replica_uid}/restart", summary="Restart a replica's engine", status_code=202)
async def restart_replica(request: Request, uid: str, replica_uid: str) -> Json:
    return await state_of(request).cluster.restart_replica(uid, replica_uid)


@router.post("/v1/models/{uid:path}/scale", summary="Bring a model to a number of replicas", status_code=202)
async def scale_model(request: Request, uid: str, body: Scale) -> Json:
    return await state_of(request).cluster.scale_model(uid, body.replica)


@router.post("/v1/models/{uid:path}/requests/{request_id}/abort", summary="Abort an open request")
async def abort_request(request: Request, uid: str, request_id: str) -> Json:
    gateway = state_of(request).gateway
    aborted = gateway.abort(uid, request_id, RequestAborted("the request was aborted by an administrator"))
    if not aborted:
        await gateway.table.find(uid)  # a model that is not there is an error; a request that is over is none
    return {"aborted": aborted}


@router.post("/v1/models/{uid:path}/xavier/clear", summary="Empty a model's shared cache")
async def clear_cache(request: Request, uid: str) -> Json:
    return await state_of(request).cluster.xavier_clear(uid)


@router.get("/v1/models/{uid:path}/xavier", summary="A model's shared cache: budgets, tiers, counters")
async def cache_status(request: Request, uid: str) -> Json:
    return await state_of(request).cluster.xavier_status(uid)


# Paths of whole models: an id may hold slashes and so matches what lies below it; the app asks these routes last.
model_router: Final[APIRouter] = scoped_router(ModelRoute)


@model_router.get("/v1/models/{uid:path}", summary="One model")
async def describe_model(request: Request, uid: str) -> Json:
    key_use(request).key.check_model(uid)
    model = await state_of(request).cluster.describe_model(uid)
    return without_secrets(model) if is_admin(request) else public_part(model)


@model_router.delete("/v1/models/{uid:path}", summary="Stop a model")
async def terminate_model(request: Request, uid: str, drain: Drain = None) -> Json:
    api = state_of(request)
    return await api.cluster.terminate_model(uid, api.settings.drain_seconds if drain is None else drain)


def without_secrets(model: Json) -> Json:
    """A model as administrators see it: with the names of all environment variables of its engines, but no value that is secret."""
    spec = model.get("spec") or {}
    if not spec.get("envs"):
        return model
    shown = {name: REDACTED if SECRET_NAME.search(name) else value for name, value in spec["envs"].items()}
    return {**model, "spec": {**spec, "envs": shown}}


def public_part(model: Json) -> Json:
    """A model as everybody may see it."""
    return {name: model[name] for name in PUBLIC_FIELDS if name in model}

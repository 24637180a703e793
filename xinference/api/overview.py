"""Recent requests, and the machines behind the models."""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request

from xinference.api.control import Json
from xinference.api.errors import ControlUnreachable
from xinference.api.history import Past, combined, listing
from xinference.api.routing import AppState, scoped_router, state_of
from xinference.errors import ModelNotFound, NotFound

router: Final[APIRouter] = scoped_router()


@router.get("/v1/requests", summary="Recent requests, and where their tokens came from")
async def list_requests(request: Request, model: str | None = None, limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> Json:
    api = state_of(request)
    pasts = [past for past in api.gateway.history if model is None or past.model_uid == model]
    try:
        records = await api.cluster.list_requests(model, limit)
    except (ModelNotFound, ControlUnreachable):
        # What passed through this API is known all the same, also of a model that has been stopped since.
        if not pasts:
            raise
        records = []
    return {"data": listing(pasts, records, limit)}


@router.get("/v1/requests/{request_id}", summary="One recent request, by the x-request-id of its answer or by its accounting id")
async def show_request(request: Request, request_id: str) -> Json:
    api = state_of(request)
    past = api.gateway.history.find(request_id)
    if past is not None:
        return combined(past, await _record(api, past))
    for record in await api.cluster.list_requests(None, api.settings.request_records):
        if record["request_id"] == request_id:
            return listing((), (record,), 1)[0]
    raise NotFound(f"request '{request_id}' is not among the recent ones")


async def _record(api: AppState, past: Past) -> Json | None:
    """What the request's replica accounted for it, if it is still there and its model keeps records."""
    routes = api.gateway.table.get(past.model_uid)
    if past.replica_uid is None or routes is None or not routes.shares_cache:
        return None
    try:
        return await api.cluster.request_record(past.model_uid, past.replica_uid, past.request_hex, 0.0)
    except (ModelNotFound, NotFound, ControlUnreachable):
        return None


@router.get("/v1/cluster", summary="The whole cluster")
async def show_cluster(request: Request) -> Json:
    return await state_of(request).cluster.cluster()


@router.get("/v1/workers", summary="The workers")
async def list_workers(request: Request) -> Json:
    return {"data": await state_of(request).cluster.workers()}


@router.get("/v1/limits", summary="What the server accepts, and how many requests each limit has refused")
async def list_limits(request: Request) -> Json:
    api = state_of(request)
    rows = [
        {
            "name": name,
            "value": getattr(api.limits, name),
            "default": field.default,
            "description": field.description,
            "refused": api.metrics.num_refused(name),
        }
        for name, field in type(api.limits).model_fields.items()
    ]
    return {"data": rows}


@router.get("/v1/devices", summary="The devices")
async def list_devices(request: Request) -> Json:
    return {"data": await state_of(request).cluster.devices()}

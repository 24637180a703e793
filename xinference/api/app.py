"""The API as one ASGI app.

edge (identity, keys, sizes) ── health, administration, news, overview ──> cluster: ClusterClient ──> supervisor
                             └─ openai ──> exchange ──> a replica's socket
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from xinference.api import administration, health, news, overview
from xinference.api.auth import KeyRing
from xinference.api.body import KINDS
from xinference.api.config import ApiConfig
from xinference.api.control import ClusterClient
from xinference.api.edge import Edge, error_response, hosts_of
from xinference.api.errors import MethodNotAllowed
from xinference.api.gateway import Gateway, Router
from xinference.api.history import History
from xinference.api.metrics import ApiMetrics
from xinference.api.openai import openai_router
from xinference.api.openapi import Documented
from xinference.api.routing import AppState, methods_of
from xinference.core.spec import LaunchSpec
from xinference.errors import InvalidRequest, NotFound, XinferenceError
from xinference.settings import Limits, Settings


def create_app(
    cluster: ClusterClient,
    settings: Settings,
    limits: Limits,
    keys: KeyRing,
    *,
    router: Router | None = None,
    config: ApiConfig | None = None,
) -> FastAPI:
    """Build the app. Starts nothing; its lifespan follows the route table.

    Args:
        cluster: the supervisor.
        keys: which keys are accepted, and whether any is needed.
        router: chooses replicas.
        config: timings, for tests.
    """
    config = config or ApiConfig()
    metrics, history = ApiMetrics(), History(settings.request_records)
    gateway = Gateway(cluster, limits, config, metrics, history, router)
    app = Documented(
        components=(*(kind.schema for kind in KINDS), LaunchSpec),
        title="Xinference",
        version=version("xinference"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan(gateway),
        redirect_slashes=False,
    )
    app.state.api = AppState(cluster, settings, limits, keys, config, metrics, gateway)
    for routes in (health.router, openai_router(), news.router, administration.router, administration.model_router, overview.router):
        app.include_router(routes)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    hosts = hosts_of(settings.host, settings.allowed_hosts)
    app.add_middleware(Edge, keys=keys, limits=limits, config=config, metrics=metrics, allowed_hosts=hosts)
    return app


def _lifespan(gateway: Gateway) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(gateway.table.run())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await gateway.close()

    return lifespan


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses."""
    refused = cast(HTTPException, error)
    if refused.status_code == 404:
        return _response(NotFound(f"there is no {request.method} {request.url.path}"))
    if refused.status_code == 405:
        allowed = methods_of(request)
        words = f"{request.url.path} does not take {request.method}; it takes {', '.join(sorted(allowed))}"
        return _response(MethodNotAllowed(words, allowed=allowed))
    return _response(InvalidRequest(str(refused.detail)))


async def _validation_error(request: Request, error: Exception) -> Response:
    """Parameters and bodies that the framework checks."""
    first = cast(RequestValidationError, error).errors()[0]
    if first["type"] == "json_invalid":
        return _response(InvalidRequest("the request body is not valid JSON", code="invalid_json"))
    param = ".".join(str(step) for step in first["loc"][1:]) or None
    return _response(InvalidRequest(f"'{param}': {first['msg']}" if param else first["msg"], param=param))


def _response(error: XinferenceError) -> Response:
    status, raw_headers, content = error_response(error)
    response = Response(content, status)
    response.raw_headers = raw_headers
    return response

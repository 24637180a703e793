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

from xinference.api import administration, health, key_routes, news, overview
from xinference.api.body import KINDS
from xinference.api.config import ApiConfig
from xinference.api.control import ClusterClient
from xinference.api.edge import Edge, error_response, hosts_of
from xinference.api.errors import MethodNotAllowed
from xinference.api.gateway import Gateway, Router
from xinference.api.history import History
from xinference.api.key_book import KeyBook
from xinference.api.key_store import KeyStore
from xinference.api.keys import KeyRing
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
    store: KeyStore | None = None,
) -> FastAPI:
    """Build the app. Starts nothing; its lifespan follows the route table.

    Args:
        cluster: the supervisor.
        keys: which keys are accepted, and whether any is needed.
        router: chooses replicas.
        config: timings, for tests.
        store: where keys are kept that administrators make; None if nowhere.
    """
    config = config or ApiConfig()
    metrics, history = ApiMetrics(), History(settings.request_records)
    gateway, book = Gateway(cluster, limits, config, metrics, history, router), KeyBook(keys, store)
    app = Documented(
        components=(*(kind.schema for kind in KINDS), LaunchSpec),
        title="Xinference",
        version=version("xinference"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan(gateway, book),
        redirect_slashes=False,
    )
    app.state.api = AppState(cluster, settings, limits, keys, config, metrics, gateway, book)
    models = (administration.router, administration.model_router)
    for routes in (health.router, openai_router(), news.router, *models, overview.router, key_routes.router):
        app.include_router(routes)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    hosts = hosts_of(settings.host, settings.allowed_hosts)
    app.add_middleware(Edge, keys=keys, limits=limits, config=config, metrics=metrics, allowed_hosts=hosts)
    return app


def _lifespan(gateway: Gateway, book: KeyBook) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = [asyncio.create_task(gateway.table.run()), asyncio.create_task(book.run())]
        try:
            yield
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await book.close()
            await gateway.close()

    return lifespan


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses."""
    refused = cast(HTTPException, error)
    if isinstance(refused.__cause__, XinferenceError):
        return _response(refused.__cause__)  # of reading the body, which the framework takes for a fault of its parser
    if refused.status_code == 404:
        return _response(NotFound(f"there is no {request.method} {request.url.path}"))
    if refused.status_code == 405:
        allowed = methods_of(request)
        words = f"{request.url.path} does not take {request.method}; it takes {', '.join(sorted(allowed))}"
        return _response(MethodNotAllowed(words, allowed=allowed))
    if refused.status_code == 400:
        # All that the framework says of a body that is no JSON, no UTF-8, or deeper than its parser goes.
        return _response(InvalidRequest("the request body is not valid JSON", code="invalid_json"))
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

"""The proxied endpoints: OpenAI's, and the engine's tokenizer."""

import time
from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from xinference.api.body import KINDS, Kind, prepare
from xinference.api.edge import REQUEST_ID, new_request_id
from xinference.api.exchange import Ask, Exchange
from xinference.api.openapi import request_body
from xinference.api.routing import is_admin, key_use, scoped_router, state_of
from xinference.errors import InsufficientScope

REPLICA_HEADER: Final = "x-xinference-replica"
DEBUG_HEADER: Final = "x-xinference-debug"


def openai_router() -> APIRouter:
    """One route for each kind of request."""
    router = scoped_router()
    for kind in KINDS:
        router.add_api_route(
            kind.path,
            _endpoint(kind),
            methods=["POST"],
            name=kind.name,
            summary=kind.summary,
            response_model=None,
            openapi_extra=request_body(kind.schema, streams=kind.generates),
        )
    return router


def _endpoint(kind: Kind) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await proxied(kind, request)

    return endpoint


async def proxied(kind: Kind, request: Request) -> Response:
    """Check a request and hand it to a replica."""
    received = time.monotonic()
    api = state_of(request)
    carried = request.scope["state"]
    steer = request.headers.get(REPLICA_HEADER)
    if steer is not None and not is_admin(request):
        raise InsufficientScope(f"the header {REPLICA_HEADER} needs an API key with scope 'admin'", param=REPLICA_HEADER)
    use = key_use(request)
    request_hex = carried["request_id"] if not carried["has_own_request_id"] else new_request_id()
    tenant = use.key.key_id if api.settings.isolate_tenants else None
    prepared = prepare(kind, await request.body(), request_hex, api.limits, tenant)
    use.key.check_model(prepared.model)
    if not carried["has_own_request_id"] and prepared.request_id is not None and REQUEST_ID.fullmatch(prepared.request_id):
        carried["request_id"] = prepared.request_id
    ask = Ask(
        kind=kind,
        prepared=prepared,
        request_id=carried["request_id"],
        request_hex=request_hex,
        received=received,
        steer=steer,
        debug=request.headers.get(DEBUG_HEADER) == "1",
    )
    exchange = Exchange(api.gateway, ask)
    use.on_revoked(exchange.end)
    return exchange

"""Routes that know what scope they need, and the state that handlers find in the app."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from xinference.api.auth import ADMIN, KeyRing, required_scope
from xinference.api.config import ApiConfig
from xinference.api.control import ClusterClient
from xinference.api.gateway import Gateway
from xinference.api.metrics import ApiMetrics
from xinference.core.model_uid import ROUTE_WORDS
from xinference.errors import InsufficientScope
from xinference.settings import Limits, Settings


@dataclass(frozen=True)
class AppState:
    """What handlers work with; ``app.state.api``."""

    cluster: ClusterClient
    settings: Settings
    limits: Limits
    keys: KeyRing
    config: ApiConfig
    metrics: ApiMetrics
    gateway: Gateway


def state_of(request: Request) -> AppState:
    """The app's state."""
    state: AppState = request.app.state.api
    return state


def is_admin(request: Request) -> bool:
    """Whether the request's key has scope admin."""
    return ADMIN in request.scope["state"]["scopes"]


class ScopedRoute(APIRoute):
    """Refuses requests whose key lacks the scope of the route. Public routes are those that the edge lets through without a key."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        needed = required_scope(scope["method"], self.path)
        if needed is not None and needed not in scope["state"]["scopes"]:
            raise InsufficientScope(f"this needs an API key with scope '{needed}'")
        await super().handle(scope, receive, send)


class ModelRoute(ScopedRoute):
    """A route of a whole model, whose id may hold slashes: it leaves alone what lies below a model.

    Else it would take ``GET /v1/models/demo/xavier/clear`` for a model of that name, and hide that the path takes POST.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is not Match.NONE and not ROUTE_WORDS.isdisjoint(child["path_params"]["uid"].split("/")):
            return Match.NONE, {}
        return match, child


def scoped_router(route_class: type[ScopedRoute] = ScopedRoute) -> APIRouter:
    """A router all of whose routes check their scope."""
    return APIRouter(route_class=route_class)


def methods_of(request: Request) -> frozenset[str]:
    """The methods that the routes of a request's path take."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, APIRoute) and route.matches(dict(request.scope))[0] is not Match.NONE:
            found |= route.methods
    return frozenset(found)

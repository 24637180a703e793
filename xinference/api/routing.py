"""Routes that know what scope they need, and the state that handlers find in the app."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from xinference.api.auth import scopes_for
from xinference.api.config import ApiConfig
from xinference.api.control import ClusterClient
from xinference.api.gateway import Gateway
from xinference.api.key_book import KeyBook
from xinference.api.keys import KeyRing, KeyUse
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
    book: KeyBook


def state_of(request: Request) -> AppState:
    """The app's state."""
    state: AppState = request.app.state.api
    return state


def is_admin(request: Request) -> bool:
    """Whether the request's key has scope admin."""
    return key_use(request).key.is_admin


def key_use(request: Request) -> KeyUse:
    """The request's hold on its key."""
    use: KeyUse = request.scope["state"]["key"]
    return use


class ScopedRoute(APIRoute):
    """Refuses requests whose key lacks the scope of the route. Public routes are those that the edge lets through without a key."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        opening = scopes_for(scope["method"], self.path)
        use: KeyUse = scope["state"]["key"]
        if opening is not None and opening.isdisjoint(use.key.scopes):
            words = " or ".join(f"'{name}'" for name in sorted(opening))
            raise InsufficientScope(f"this needs an API key with scope {words}; yours has {', '.join(sorted(use.key.scopes))}")
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

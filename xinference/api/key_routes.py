"""API keys over HTTP: made, listed and revoked by administrators."""

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from xinference.api.auth import INFERENCE
from xinference.api.control import Json
from xinference.api.routing import scoped_router, state_of
from xinference.errors import InvalidRequest

MAX_MODELS: Final = 128
MAX_LIFETIME_SECONDS: Final = 10 * 366 * 24 * 3600
MAX_LIMIT: Final = 1_000_000

router: Final[APIRouter] = scoped_router()
Limit = Annotated[int, Field(ge=0, le=MAX_LIMIT)]
ModelUid = Annotated[str, Field(min_length=1, max_length=255)]


class NewKey(BaseModel):
    """What a key is to be."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}$", description="for people; no two keys have one name")
    scopes: list[Literal["inference", "monitor", "admin"]] = Field(default=["inference"], min_length=1, max_length=3)
    models: list[ModelUid] | None = Field(default=None, min_length=1, max_length=MAX_MODELS, description="the only models it may ask")
    expires_in_seconds: int | None = Field(default=None, ge=1, le=MAX_LIFETIME_SECONDS)
    requests_per_minute: Limit | None = Field(default=None, description="0: no limit; null: the server's")
    concurrent_requests: Limit | None = Field(default=None, description="0: no limit; null: the server's")


class KeyFacts(BaseModel):
    """A key without its secret. Times are unix seconds."""

    id: str
    name: str
    state: Literal["active", "expired"]
    scopes: list[str]
    models: list[str] | None
    created: float | None
    expires: float | None
    last_used: float | None
    requests_per_minute: int | None
    concurrent_requests: int | None


class MadeKey(KeyFacts):
    """A key with its secret, which is shown this once."""

    key: str
    enforced: bool = Field(description="whether this server asks for keys at all")


class KeyList(BaseModel):
    object: Literal["list"] = "list"
    data: list[KeyFacts]


class RevokedKey(BaseModel):
    id: str
    revoked: bool


@router.post("/v1/keys", summary="Make an API key; its secret is shown this once", status_code=201, response_model=MadeKey)
async def create_key(request: Request, body: NewKey) -> Json:
    if body.models is not None and set(body.scopes) != {INFERENCE}:
        raise InvalidRequest("'models' can only bound a key whose one scope is 'inference': the others show or change all models", "models")
    asked = body.model_dump(exclude={"expires_in_seconds"})
    asked["scopes"] = tuple(dict.fromkeys(body.scopes))
    asked["models"] = None if body.models is None else tuple(dict.fromkeys(body.models))
    return await state_of(request).book.create(asked, body.expires_in_seconds)


@router.get("/v1/keys", summary="All API keys, without their secrets", response_model=KeyList)
async def list_keys(request: Request) -> Json:
    return {"data": await state_of(request).book.rows()}


@router.delete("/v1/keys/{key_id}", summary="Revoke an API key at once; what it has running is ended", response_model=RevokedKey)
async def revoke_key(request: Request, key_id: str) -> Json:
    return await state_of(request).book.revoke(key_id)

"""/openapi.json, with the bodies that handlers read themselves."""

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from xinference.api.auth import scopes_for
from xinference.api.schemas import ErrorBody

Json = dict[str, Any]
_REF = "#/components/schemas/{model}"


def request_body(schema: type[BaseModel], streams: bool = False) -> Json:
    """The part of an operation that describes a body which the handler reads itself. ``document`` adds the schema it refers to."""
    ok: Json = {"description": "The answer", "content": {"application/json": {"schema": {"type": "object"}}}}
    if streams:
        ok["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": _REF.format(model=schema.__name__)}}}},
        "responses": {"200": ok},
    }


class Documented(FastAPI):
    """An app whose schema holds further components, and the error shape for every operation.

    Args:
        components: bodies that handlers read themselves.
    """

    def __init__(self, components: tuple[type[BaseModel], ...], **options: Any) -> None:
        self._components: tuple[type[BaseModel], ...] = (*components, ErrorBody)
        super().__init__(**options)

    def openapi(self) -> Json:
        if not self.openapi_schema:
            self.openapi_schema = _document(super().openapi(), self._components)
            _declare_scopes(self.openapi_schema, {route.path_format: route.path for route in self.routes if isinstance(route, APIRoute)})
        return self.openapi_schema


def _document(document: Json, components: tuple[type[BaseModel], ...]) -> Json:
    parts = document.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for model in components:
        schema = model.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    error = {"description": "Any error", "content": {"application/json": {"schema": {"$ref": _REF.format(model=ErrorBody.__name__)}}}}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = error
    return document


def _declare_scopes(document: Json, declared: dict[str, str]) -> None:
    """Say with every operation which scopes open it, each by itself; the schema language has no word for that of a bearer key.

    Args:
        declared: path as the document shows it -> path as its route was declared.
    """
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            scopes = scopes_for(method.upper(), declared[path])
            operation["security"] = [{"key": []}] if scopes is not None else []
            operation["x-scopes"] = sorted(scopes or ())

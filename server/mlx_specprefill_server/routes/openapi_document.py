"""The OpenAPI document: all endpoints with their bodies and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

REFERENCE = "#/components/schemas/{model}"
ERROR: dict[str, Any] = {
    "title": "Error",
    "description": "OpenAI's error object, or Anthropic's below /v1/messages.",
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"]}},
}
LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
REFUSED = {
    "description": "Refused, or failed.",
    "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}},
}


def openapi_document(app: FastAPI, routers: Sequence[APIRouter]) -> dict[str, Any]:
    """Return the description of all routers' endpoints."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas: dict[str, Any] = {"Error": ERROR}
    for route in (route for router in routers for route in router.routes if isinstance(route, APIRoute)):
        for operation in document["paths"].get(route.path_format, {}).values():
            _complete(operation, route, schemas)
    document["components"] = {
        "schemas": schemas,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    return document


def _complete(operation: dict[str, Any], route: APIRoute, schemas: dict[str, Any]) -> None:
    """Add the body, and the errors that every endpoint can answer."""
    operation["responses"].pop("422", None)
    operation["responses"]["200"] = {"description": "As the documentation says."}
    operation["responses"] |= {"4XX": REFUSED, "5XX": REFUSED}
    operation["security"] = [{}, {"key": []}]
    for dependency in route.dependant.dependencies:
        model = getattr(dependency.call, "body_model", None)
        if model is not None:
            schema = {"$ref": REFERENCE.format(model=_add(model, schemas))}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}


def _add(model: type[BaseModel], schemas: dict[str, Any]) -> str:
    schema = model.model_json_schema(ref_template=REFERENCE, schema_generator=Lenient)
    for name, part in {**schema.pop("$defs", {}), model.__name__: schema}.items():
        part = _rename_limits(part)
        if schemas.setdefault(name, part) != part:
            raise ValueError(f"two bodies of the API have a part called {name}")
    return model.__name__


def _rename_limits(schema: Any) -> Any:
    """Give the limits of a validated value their JSON schema names. Pydantic leaves its own."""
    if isinstance(schema, dict):
        return {LIMITS.get(name, name): _rename_limits(value) for name, value in schema.items()}
    return [_rename_limits(value) for value in schema] if isinstance(schema, list) else schema


class Lenient(GenerateJsonSchema):
    """A schema generator that describes a field as any value if only a validator knows its form."""

    def handle_invalid_for_json_schema(self, schema: core_schema.CoreSchema, error_info: str) -> JsonSchemaValue:
        return {}

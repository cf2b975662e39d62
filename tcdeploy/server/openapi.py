"""Builds /openapi.json from the route table and the pydantic request models."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

REF_TEMPLATE = "#/components/schemas/{model}"
JSON_ERROR = {
    "description": "Error",
    "content": {"application/json": {"schema": {"$ref": REF_TEMPLATE.format(model="Error")}}},
}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_document(
    title: str, version: str, routes: Sequence[Route], request_models: Mapping[str, type[BaseModel]]
) -> dict[str, Any]:
    """OpenAPI 3.1. `request_models` maps a path to the model of its JSON body."""
    models = [(model, "validation") for model in request_models.values()]
    _, schemas = models_json_schema(models, ref_template=REF_TEMPLATE)  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _operation(route, request_models.get(route.path))
            paths.setdefault(route.path_format, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": ERROR_SCHEMA}},
    }


def _operation(route: Route, request_model: type[BaseModel] | None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": inspect.getdoc(route.endpoint) or route.name,
        "responses": {"200": {"description": "Success"}, "default": JSON_ERROR},
    }
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if request_model is not None:
        schema = {"$ref": REF_TEMPLATE.format(model=request_model.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation

"""Builds /openapi.json from the route table, the pydantic models of requests, and openapi_schemas.py.

Combinations of fields are not described.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from tcdeploy import __version__
from tcdeploy.server.http.openapi_schemas import COMPONENTS

REF_TEMPLATE = "#/components/schemas/{model}"
SCHEME = "apiKey"  # name of the security scheme
PARAMETERS: dict[str, list[dict[str, Any]]] = {  # of the query, by path
    "/ready": [{
        "name": "level", "in": "query", "schema": {"enum": ["warm"]},
        "description": "warm: 503 until every bucket is compiled",
    }],
    "/status": [{
        "name": "history", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
        "description": "number of samples of the graphs to return, one per 2 s",
    }],
}  # fmt: skip


class Content(NamedTuple):
    """The body of a successful response."""

    schema: str = ""  # name of a component; "": text, or no body
    chunk_schema: str = ""  # of the events of a stream; "": responses are not streamed
    text_type: str = ""  # media type of a text body
    error_schema: str = "Error"


CONTENTS = {  # by path, or by method and path
    "/ready": Content("Readiness"),
    "/metrics": Content(text_type="text/plain"),
    "/": Content(text_type="text/html"),
    "/docs": Content(text_type="text/html"),
    "/version": Content("Version"),
    "/status": Content("Status"),
    "/v1/models": Content("ModelList"),
    "/v1/models/{name}": Content("Model"),
    "/tokenizer_info": Content("TokenizerInfo"),
    "/tokenize": Content("Tokens"),
    "/detokenize": Content("Text"),
    "/v1/completions": Content("Completion", "CompletionChunk"),
    "/v1/chat/completions": Content("ChatCompletion", "ChatCompletionChunk"),
    "/v1/responses": Content("ResponsesResponse", "ResponsesEvent"),
    "/v1/responses/{response_id}": Content("ResponsesResponse"),
    "DELETE /v1/responses/{response_id}": Content("DeletedResponse"),
    "/v1/messages": Content("MessagesResponse", "MessagesEvent", error_schema="MessagesError"),
    "/v1/messages/count_tokens": Content("MessagesTokens", error_schema="MessagesError"),
}
# OpenAPI links: path -> path parameter of the linked operations, where its value is in the response, operation ids.
LINKS = {
    "/v1/models": ("name", "$response.body#/data/0/id", ("model",)),
    "/v1/responses": ("response_id", "$response.body#/id", ("retrieve_response", "delete_response")),
}
ERRORS_OF_BODIES = {
    400: "A field is not valid; `param` names it",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The content type is not application/json",
}
LOADING = "The server is loading, draining or full; `Retry-After` is in seconds"


def openapi_document(
    routes: Sequence[Route], request_models: Mapping[str, type[BaseModel]], public_paths: Sequence[str] | None,
    vocab_size: int | None,
) -> dict[str, Any]:  # fmt: skip
    """The OpenAPI 3.1 document. request_models: path -> model of its JSON body. public_paths: paths that need no API
    key; None: no path needs one. vocab_size: None while the model is loading.
    """
    models = [(model, "validation") for model in request_models.values()]
    _, schemas = models_json_schema(models, ref_template=REF_TEMPLATE)  # type: ignore[arg-type]
    components = schemas["$defs"]
    if common := components.keys() & COMPONENTS.keys():
        raise ValueError(f"requests and responses have schemas of the same name: {sorted(common)}")
    if vocab_size is not None:
        components["TokenId"]["maximum"] = vocab_size - 1
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            needs_key = public_paths is not None and route.path not in public_paths
            success = CONTENTS.get(f"{method} {route.path_format}") or CONTENTS.get(route.path_format, Content())
            operation = _operation(route, request_models.get(route.path), success, needs_key)
            paths.setdefault(route.path_format, {})[method.lower()] = operation
    described: dict[str, Any] = {"schemas": {**components, **COMPONENTS}}
    if public_paths is not None:
        described["securitySchemes"] = {SCHEME: {"type": "http", "scheme": "bearer"}}
    info = {"title": "tcdeploy", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": described}


def _operation(
    route: Route, request_model: type[BaseModel] | None, success: Content, needs_key: bool
) -> dict[str, Any]:
    summary, _, description = (inspect.getdoc(route.endpoint) or route.name).partition("\n")
    responses = _responses(route.path_format, success, request_model is not None, needs_key)
    operation: dict[str, Any] = {"operationId": route.name, "summary": summary, "responses": responses}
    if description:
        operation["description"] = description.strip()
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.param_convertors
    ]
    if parameters := [*parameters, *PARAMETERS.get(route.path, [])]:
        operation["parameters"] = parameters
    if request_model is not None:
        content = {"application/json": {"schema": _reference(request_model.__name__)}}
        operation["requestBody"] = {"required": True, "content": content}
    if needs_key:
        operation["security"] = [{SCHEME: []}]
    return operation


def _responses(path: str, content: Content, has_body: bool, needs_key: bool) -> dict[str, Any]:
    error = partial(_error, schema=content.error_schema)
    success: dict[str, Any] = {"description": "Success"}
    if content.schema:
        success["content"] = {"application/json": {"schema": _reference(content.schema)}}
    if content.text_type:
        success["content"] = {content.text_type: {"schema": {"type": "string"}}}
    if content.chunk_schema:
        success["description"] = "Success; with `stream`, events"
        success["content"]["text/event-stream"] = {"schema": _event_schema(content)}
    if path in LINKS:
        parameter, location, operations = LINKS[path]
        success["links"] = {name: {"operationId": name, "parameters": {parameter: location}} for name in operations}
    errors: dict[int, dict[str, Any]] = {}
    if path == "/ready":
        errors[400] = error("The level is not known")
        errors[503] = {"description": "Why the server is not ready", "content": success["content"]}
    elif path == "/health":
        errors[503] = {"description": "The engine is dead, or a canary has failed"}
    elif path == "/status":
        errors[400] = error("A parameter is not valid")
    elif content.schema and path != "/version":
        errors = {status: error(text) for status, text in (ERRORS_OF_BODIES if has_body else {}).items()}
        if path.startswith("/v1/"):
            errors[404] = error("The model or the response does not exist")
        errors[503] = error(LOADING, {"retry-after": {"schema": {"type": "integer"}}})
    if needs_key:
        errors[401] = error(
            "The API key is missing or wrong", {"www-authenticate": {"required": True, "schema": {"const": "Bearer"}}}
        )
    return {"200": success, **{str(status): errors[status] for status in sorted(errors)}, "default": error("Error")}


def _event_schema(content: Content) -> dict[str, Any]:
    """Schema of each event of a stream: an object with the fields of the event."""
    chunk = {"anyOf": [_reference(content.chunk_schema), _reference(content.error_schema)]}
    json_text = {"type": "string", "contentMediaType": "application/json", "contentSchema": chunk}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, json_text]}}}


def _error(description: str, headers: dict[str, Any] | None = None, schema: str = "Error") -> dict[str, Any]:
    content = {"application/json": {"schema": _reference(schema)}}
    return {"description": description, "content": content, **({"headers": headers} if headers else {})}


def _reference(component: str) -> dict[str, Any]:
    return {"$ref": REF_TEMPLATE.format(model=component)}

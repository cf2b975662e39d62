"""The HTTP API: OpenAI's completions, chat completions and models, vLLM's tokenizer routes, and operations.

The routes of OpenAI's Responses API and of Anthropic's Messages API are in server/apis/, and generation.py runs the
requests that generate text. FastAPI is not used, because bodies are read and validated here and openapi.py is short.
"""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tcdeploy import __version__
from tcdeploy.server.apis.anthropic.protocol import CountTokensRequest
from tcdeploy.server.apis.anthropic.routes import MESSAGES, messages_routes
from tcdeploy.server.apis.openai.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    bad_request,
)
from tcdeploy.server.apis.responses.routes import RESPONSES, responses_routes
from tcdeploy.server.generate.generation import GenerationApi, admitted_body, generation_route
from tcdeploy.server.http.middleware import (
    UNAUTHENTICATED_PATHS,
    AuthMiddleware,
    RootPath,
    error_response,
    routing_error,
)
from tcdeploy.server.http.openapi import openapi_document
from tcdeploy.server.observe import status
from tcdeploy.server.observe.request_log import RequestLog
from tcdeploy.server.service import ServerState

COMPLETIONS = GenerationApi("/v1/completions", "completions", "Create a completion (OpenAI's API).", CompletionRequest)
CHAT_COMPLETIONS = GenerationApi(
    "/v1/chat/completions", "chat_completions", "Create a chat completion (OpenAI's API).", ChatRequest
)
REQUEST_MODELS: dict[str, type[BaseModel]] = {
    **{api.path: api.body_type for api in (COMPLETIONS, CHAT_COMPLETIONS, RESPONSES, MESSAGES)},
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def make_app(state: ServerState) -> RequestLog:
    routes = [
        *_operations_routes(state),
        *_model_routes(state),
        *(generation_route(state, api) for api in (COMPLETIONS, CHAT_COMPLETIONS)),
        *responses_routes(state),
        *messages_routes(state),
    ]
    documented = list(routes)

    @functools.cache
    def document(vocab_size: int | None) -> dict[str, Any]:
        public_paths = UNAUTHENTICATED_PATHS if state.settings.api_keys else None
        content = openapi_document(documented, REQUEST_MODELS, public_paths, vocab_size)
        if state.settings.root_path:
            content["servers"] = [{"url": state.settings.root_path}]
        return content

    async def openapi(_: Request) -> Response:
        return JSONResponse(document(state.service.limits.vocab_size if state.service else None))

    async def handle_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code in (404, 405):  # of the router
            error = routing_error(routes, request.method, request.scope["path"])
            if request.method == "OPTIONS" and error.status == 405:  # not a preflight request of CORS
                return Response(status_code=204, headers={"allow": f"{error.headers['allow']}, OPTIONS"})
        return error_response(error, request.scope["path"])

    routes.append(Route("/openapi.json", openapi, methods=["GET"]))
    app = Starlette(
        routes=routes,
        exception_handlers=dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), handle_error),
    )
    app.router.redirect_slashes = False  # the address of a redirect would lack the root path of a proxy
    settings = state.settings
    wrapped: ASGIApp = AuthMiddleware(app, settings.api_keys)
    if settings.allowed_origins:  # answers preflight requests, which browsers send without the key
        wrapped = CORSMiddleware(
            wrapped, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    if settings.root_path:
        wrapped = RootPath(wrapped, settings.root_path)
    record = state.telemetry.record if state.telemetry else None
    return RequestLog(wrapped, routes, state.metrics, settings.log_requests, record)


def _operations_routes(state: ServerState) -> list[Route]:
    page_html = status.page()
    page_headers = status.page_headers(page_html)

    async def health(_: Request) -> Response:
        """200 if the process and its engine are alive; with --canary-strict, 503 once a canary has failed."""
        return Response(status_code=200 if state.is_healthy else 503)

    async def ready(request: Request) -> Response:
        """200 if requests are answered: buckets are checked, and the warm-up requests have completed. Otherwise 503.

        With `?level=warm`, 503 until every bucket runs its programs; they may be compiled later with --start eager.
        While the server loads, the body says where the start is: the stage, its steps (numbered from 1), the seconds
        since the start, and an estimate of the seconds left from an earlier warm start of the plan, or null.
        """
        level = request.query_params.get("level")
        if level not in (None, "warm"):
            raise bad_request("level must be warm, or left out", "level")
        reason = state.unwarm_reason if level else state.unready_reason
        if state.engine_thread.failure:
            reason = "the engine died"
        return JSONResponse(state.readiness(reason), 503 if reason else 200)

    async def version(_: Request) -> Response:
        """The version of tcdeploy."""
        return JSONResponse({"version": __version__})

    async def page(_: Request) -> Response:
        """A page with the server's figures, a chat and the list of routes."""
        return HTMLResponse(page_html, headers=page_headers)

    async def docs(request: Request) -> Response:
        """The list of routes, on the same page as /."""
        return await page(request)

    async def status_document(request: Request) -> Response:
        """The figures that the page at / shows; with `?history=N`, also the last N samples of its graphs."""
        document = status.status_json(state.figures(), state.metrics.recent)
        if (history := request.query_params.get("history")) is not None:
            if not history.isdecimal() or len(history) > 9:
                raise bad_request("history must be a number of samples: 1 to 9 digits", "history")
            document["history"] = state.history.json(int(history))
        return JSONResponse(document)

    async def metrics(_: Request) -> Response:
        """Prometheus metrics."""
        return Response(state.metrics.text(), media_type="text/plain; version=0.0.4")

    endpoints = {
        "/health": health, "/ready": ready, "/version": version, "/": page, "/docs": docs,
        "/status": status_document, "/metrics": metrics,
    }  # fmt: skip
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in endpoints.items()]


def _model_routes(state: ServerState) -> list[Route]:
    async def models(_: Request) -> Response:
        """The served model, as a list."""
        service = state.require_service()
        return JSONResponse({"object": "list", "data": [service.model_card(name) for name in service.model_names]})

    async def model(request: Request) -> Response:
        """The served model, by name."""
        service = state.require_service()
        service.check_model(request.path_params["name"])
        return JSONResponse(service.model_card(request.path_params["name"]))

    async def tokenizer_info(_: Request) -> Response:
        """Special tokens and the chat template. lm-eval reads it before it uses /tokenize."""
        return JSONResponse(state.require_service().prompt_tokenizer.info())

    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of chat messages."""
        async with admitted_body(state, request, TokenizeRequest) as (tokenizer, body):
            ids = await tokenizer.tokenize(body)
            return Response(await tokenizer.tokens_json(ids), media_type="application/json")

    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        async with admitted_body(state, request, DetokenizeRequest) as (tokenizer, body):
            return JSONResponse({"prompt": await tokenizer.detokenize(body.tokens)})

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]

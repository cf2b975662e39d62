"""The HTTP API: OpenAI's completions, chat completions and models, vLLM's tokenizer routes, and operations.

A completion request passes authentication, the body limit, schema validation, admission, the tokenizer, the model's
limits, and then the engine. Each stage rejects with OpenAI's error format and names the field. Starlette routes the
requests; FastAPI is not used, because bodies are read and validated here and openapi.py is 70 lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tcdeploy import __version__
from tcdeploy.errors import TcdeployError
from tcdeploy.server import status
from tcdeploy.server.active_request import ActiveRequest, full_body
from tcdeploy.server.admission import BodyReservation
from tcdeploy.server.hot_path import direct_route, read_body
from tcdeploy.server.near_routes import routing_error
from tcdeploy.server.openapi import openapi_document
from tcdeploy.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    bad_request,
)
from tcdeploy.server.request_log import RequestLog, set_usage
from tcdeploy.server.request_parsing import SMALL_BODY_BYTES, RequestT, parse
from tcdeploy.server.root_path import RootPath
from tcdeploy.server.server_state import ServerState
from tcdeploy.server.sse import EventStream
from tcdeploy.server.tokenization import PromptTokenizer
from tcdeploy.server.validation import check
from tcdeploy.server.worker import EngineDeadError

UNAUTHENTICATED_PATHS = ("/health", "/ready", "/", "/docs")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
REQUEST_MODELS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
log = logging.getLogger("tcdeploy.server")


def make_app(state: ServerState) -> ASGIApp:
    async def completions(request: Request) -> Response:
        """OpenAI's completions."""
        return await _complete(state, request, CompletionRequest)

    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions."""
        return await _complete(state, request, ChatRequest)

    routes = [
        *_operations_routes(state),
        *_model_routes(state),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    ]
    documented = list(routes)

    @functools.cache
    def document(vocab_size: int | None) -> dict[str, Any]:
        public_paths = UNAUTHENTICATED_PATHS if state.settings.api_keys else None
        content = openapi_document("tcdeploy", __version__, documented, REQUEST_MODELS, public_paths, vocab_size)
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
        return _error_response(error)

    routes.append(Route("/openapi.json", openapi, methods=["GET"]))
    app = Starlette(
        routes=routes,
        exception_handlers=dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), handle_error),
    )
    app.router.redirect_slashes = False  # the address of a redirect would lack the root path of a proxy
    direct_routes = {}
    if state.settings.hot_path.direct_routes:
        direct_routes = {
            "/v1/completions": direct_route(completions, _logged_error_response),
            "/v1/chat/completions": direct_route(chat_completions, _logged_error_response),
        }
    settings = state.settings
    wrapped: ASGIApp = _AuthMiddleware(app, settings.api_keys, direct_routes)
    if settings.allowed_origins:  # answers preflight requests, which browsers send without the key
        wrapped = CORSMiddleware(
            wrapped, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    if settings.root_path:
        wrapped = RootPath(wrapped, settings.root_path)
    return RequestLog(wrapped, routes, state.metrics, settings.log_requests)


def _operations_routes(state: ServerState) -> list[Route]:
    page_html = status.page()
    page_headers = status.page_headers(page_html)

    async def health(_: Request) -> Response:
        """200 if the process and its engine are alive; with --canary-strict, 503 once a canary has failed."""
        return Response(status_code=200 if state.is_healthy else 503)

    async def ready(request: Request) -> Response:
        """200 if requests are answered: buckets are checked, and the warm-up requests have completed. Otherwise 503.

        With `?level=warm`, 503 until every bucket runs its programs; they may be compiled later with --start eager.
        """
        level = request.query_params.get("level")
        if level not in (None, "warm"):
            return PlainTextResponse("level must be warm, or left out", 400)
        reason = state.unwarm_reason if level else state.unready_reason
        if state.worker.failure:
            reason = "the engine died"
        return PlainTextResponse(reason or "ready", 503 if reason else 200)

    async def version(_: Request) -> Response:
        """The version of tcdeploy."""
        return JSONResponse({"version": __version__})

    async def page(_: Request) -> Response:
        """A page with the server's figures, a chat and the list of routes."""
        return HTMLResponse(page_html, headers=page_headers)

    async def docs(_: Request) -> Response:
        """The list of routes, on the same page as /."""
        return HTMLResponse(page_html, headers=page_headers)

    async def status_document(request: Request) -> Response:
        """The figures that the page at / shows; with `?history=N`, also the last N samples of its graphs."""
        document = status.status_json(state.figures(), state.metrics.recent)
        if (history := request.query_params.get("history")) is not None:
            if not history.isdecimal() or len(history) > 9:
                raise bad_request("history must be a number of samples", "history")
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
        return JSONResponse(state.require_service().tokenizer.info())

    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of chat messages."""
        async with _admitted_body(state, request, TokenizeRequest) as (tokenizer, body):
            ids = await tokenizer.tokenize(body)
            return Response(await tokenizer.tokens_json(ids), media_type="application/json")

    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        async with _admitted_body(state, request, DetokenizeRequest) as (tokenizer, body):
            return JSONResponse({"prompt": await tokenizer.detokenize(body.tokens)})

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


@contextlib.asynccontextmanager
async def _admitted_body(
    state: ServerState, request: Request, request_type: type[RequestT]
) -> AsyncIterator[tuple[PromptTokenizer, RequestT]]:
    """Read the body of a request that needs only the tokenizer, and admit it until the end of the block.

    It counts as one choice. The body is read first, so that clients which send no body cannot fill the queue.
    """
    service = state.require_service()
    service.admission.check_open()
    with BodyReservation(service.admission) as reservation:
        body = await _parse_body(state, request, request_type, reservation)
        service.admission.acquire(1)
        try:
            yield service.tokenizer, body
        finally:
            service.admission.release(1)


async def _complete(
    state: ServerState, raw_request: Request, request_type: type[CompletionRequest] | type[ChatRequest]
) -> Response:
    with BodyReservation(state.admission) as reservation:
        request = await _parse_body(state, raw_request, request_type, reservation)
        check(request)
        state.admission.check_open()
        service = state.require_service()
        service.count_unknown_fields(request)
        service.check_model(request.model)
        num_choices = request.num_choices * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
        if not num_choices:
            raise bad_request("prompt is an empty list", "prompt")
        service.admission.acquire(num_choices)
        active, stream = None, None
        try:
            prompts = await service.tokenizer.prompts(request)
            constraint = await service.constraint(request, prompts)
            active = await ActiveRequest.create(service, request, prompts, constraint)
            reservation.release()
            set_usage(raw_request.scope, active.logged_usage)
            await active.submit()
            if request.stream:
                stream = EventStream(active, service.settings.stall_timeout)
                return stream
            body = await _run_until_disconnect(raw_request, full_body(active))
            return Response(body, media_type="application/json")
        except EngineDeadError as error:
            raise ApiError(503, str(error), code=error.code) from None
        except TcdeployError as error:
            raise bad_request(error.message, None) from None
        finally:
            if active is None:
                service.admission.release(num_choices)
            elif stream is None:
                active.close()  # a stream closes it when it ends


async def _parse_body(
    state: ServerState, request: Request, request_type: type[RequestT], reservation: BodyReservation
) -> RequestT:
    """The validated JSON body. Raises ApiError 400, 408, 413 or 415, and 503 if too many bytes wait."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"the content type is {content_type[:80]!r}; it must be application/json")
    body = await read_body(request, state.settings.max_body_bytes, state.settings.hot_path, reservation)
    if len(body) <= SMALL_BODY_BYTES:
        return parse(request_type, body)
    state.admission.check_open()  # the limits of large bodies depend on the model
    return await state.parser.parse(request_type, body, state.require_service().json_limits)


async def _run_until_disconnect(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`. Cancels it and raises ClientDisconnect if the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        disconnect.cancel()
        task.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _AuthMiddleware:
    """Checks the API key, and dispatches POSTs of `direct_routes`.

    Plain ASGI: Starlette's BaseHTTPMiddleware would switch tasks for each event of a stream.
    """

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], direct_routes: dict[str, ASGIApp]) -> None:
        self._app, self._api_keys, self._direct_routes = app, api_keys, direct_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        app = self._app
        if scope["method"] == "POST":
            app = self._direct_routes.get(scope["path"], app)
        if (
            self._api_keys
            and scope["path"] not in UNAUTHENTICATED_PATHS
            and not _has_key(Request(scope), self._api_keys)
        ):
            app = _error_response(
                ApiError(401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                         code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            )  # fmt: skip
        await app(scope, receive, send)


def _has_key(request: Request, keys: tuple[str, ...]) -> bool:
    """Whether the request has one of the keys. The comparison time does not depend on which key matches."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    matches = [hmac.compare_digest(credentials.strip().encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)


def _logged_error_response(error: Exception) -> Response:
    """As `_error_response`, and logs unexpected errors: uvicorn logs only those of Starlette's routes."""
    if not isinstance(error, (ApiError, ClientDisconnect)):
        log.error("a request failed", exc_info=error)
    return _error_response(error)


def _error_response(error: Exception) -> Response:
    """The response to any exception, with OpenAI's error body."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    if not isinstance(error, ApiError):
        error = ApiError(500, f"{type(error).__name__}: {error}")
    return JSONResponse(error.body, error.status, error.headers)

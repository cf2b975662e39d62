"""The routes: OpenAI's completions, chat completions and models, and what operating a server takes.

A request passes, in order: the key, the size of its body, its shape (protocol.py), admission, the tokenizer, the limits
of the model, the engine. Each of these refuses in OpenAI's words and by the name of the field.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic.json_schema import models_json_schema
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tcdeploy import __version__
from tcdeploy.errors import TcdeployError
from tcdeploy.server import status
from tcdeploy.server.http import is_whole
from tcdeploy.server.validation import check
from tcdeploy.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Shape,
    TokenizeRequest,
    parse,
    refusal,
)
from tcdeploy.server.active_request import EventStream, Running, until_gone, whole
from tcdeploy.server.service import Service
from tcdeploy.server.worker import EngineDied

BODY_SECONDS = 60.0
OPEN_PATHS = ("/health", "/ready")  # without a key
REFERENCE = "#/components/schemas/{model}"
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
BODIES = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
log = logging.getLogger("tcdeploy.server")


def make_app(service: Service) -> ASGIApp:
    app = FastAPI(title="tcdeploy", version=__version__)
    app.add_exception_handler(ApiError, lambda _, error: _answer(error))  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, lambda _, error: _answer(_named(error)))  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, _to_nobody)
    app.add_exception_handler(Exception, lambda _, error: _answer(_ours(error)))

    @app.get("/health")
    async def health() -> Response:
        """The process and its engine live."""
        return Response(status_code=503 if service.worker.failure else 200)

    @app.get("/ready")
    async def ready() -> Response:
        """The weights are loaded, and every bucket is warm and checked."""
        reason = "the engine died" if service.worker.failure else service.admission.closed_because
        return PlainTextResponse(reason or "ready", 503 if reason else 200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/", response_class=HTMLResponse)
    async def look() -> str:
        return status.page()

    @app.get("/status")
    async def figures() -> dict[str, Any]:
        """What the page at / shows."""
        return status.status(service)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        service.require_ready()
        return {"object": "list", "data": [service.model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.require_ready()
        service.check_model(name)
        return service.model_card()

    @app.post("/tokenize", openapi_extra=_takes(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, Any]:
        asked = await _read(service, request, TokenizeRequest)
        service.require_ready()
        ids = await service.tokenize(asked)
        return {"tokens": ids, "count": len(ids), "max_model_len": service.limits.context}

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, str]:
        asked = await _read(service, request, DetokenizeRequest)
        service.require_ready()
        return {"prompt": await service.detokenize(asked.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What lm-eval's remote tokenizer asks before it uses the two above."""
        service.require_ready()
        return service.tokenizer_info()

    @app.post("/v1/completions", openapi_extra=_takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await _complete(service, request, await _read(service, request, CompletionRequest))

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatRequest))
    async def chat(request: Request) -> Response:
        return await _complete(service, request, await _read(service, request, ChatRequest))

    app.openapi = lambda: _described(app)  # type: ignore[method-assign]
    return _Guard(app, service, {"/v1/completions": completions, "/v1/chat/completions": chat})


async def _complete(service: Service, request: Request, asked: CompletionRequest | ChatRequest) -> Response:
    check(asked)
    service.note_unknown(asked)
    service.check_model(asked.model)
    answers = asked.choices * (len(asked.prompts) if isinstance(asked, CompletionRequest) else 1)
    if not answers:
        raise refusal("there is no prompt", "prompt")
    service.admission.enter(answers)
    running, stream = None, None
    try:
        prompts = await service.prompts(asked)
        running = Running(service, asked, prompts, await service.constraint(asked, prompts))
        await running.begin()
        if asked.stream:
            stream = EventStream(running, service.stall_timeout)
            return stream
        return JSONResponse(await until_gone(request, whole(running)))
    except EngineDied as error:
        raise ApiError(503, str(error), code=error.code) from None
    except TcdeployError as error:
        raise refusal(error.message, None) from None
    finally:
        if running is None:
            service.admission.leave(answers)
        elif stream is None:
            running.close()  # a stream does so when it ends


async def _read(service: Service, request: Request, kind: type[Shape]) -> Shape:
    """The body, no more of it than is allowed and for no longer. Raises ApiError 408, 413, 415 or 400."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"the body is {content_type[:80]}, and must be application/json")
    if is_whole(request.scope):  # a timer costs 0.05 ms where nothing else has run for some milliseconds
        return parse(kind, await _body(request, service.max_body_bytes))
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _body(request, service.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body took more than {BODY_SECONDS:.0f} s") from None
    return parse(kind, body)


async def _body(request: Request, most_bytes: int) -> bytes:
    """As `request.stream()` reads it, without a generator: 0.012 ms instead of 0.028, after a rest."""
    body, is_more = bytearray(), True
    while is_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > most_bytes:
            raise ApiError(413, f"the body is larger than {most_bytes} bytes")
        is_more = message.get("more_body", False)
    return bytes(body)


class _Guard:
    """The key, and a request id on the answer. Bare ASGI: the framework's kind wakes a task for each event.

    `shortcuts` are endpoints that ask the framework for nothing: its routes describe them, and are passed by.
    """

    def __init__(self, app: ASGIApp, service: Service, shortcuts: dict[str, Endpoint]) -> None:
        self._app, self._service = app, service
        self._shortcuts: dict[str, ASGIApp] = {path: _direct(endpoint) for path, endpoint in shortcuts.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        key, app = self._service.api_key, self._app
        if scope["method"] == "POST":
            app = self._shortcuts.get(scope["path"], app)
        if key and scope["path"] not in OPEN_PATHS and not _has_key(request, key):
            app = _answer(ApiError(401, "the API key is missing or wrong", code="invalid_api_key"))
        await app(scope, receive, send_named)


def _direct(endpoint: Endpoint) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await endpoint(Request(scope, receive, send))
        except ApiError as error:
            response = _answer(error)
        except ClientDisconnect:
            response = _to_nobody()
        except Exception as error:
            log.exception("a request failed")
            response = _answer(_ours(error))
        await response(scope, receive, send)

    return app


def _to_nobody(*_: object) -> Response:
    return Response(status_code=499)


def _has_key(request: Request, key: str) -> bool:
    return hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {key}".encode())


def _answer(error: ApiError) -> JSONResponse:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return JSONResponse(error.body, error.status, headers)


def _ours(error: Exception) -> ApiError:
    """What nobody expected."""
    return ApiError(500, f"{type(error).__name__}: {error}")


def _named(error: HTTPException) -> ApiError:
    """404 and 405 of the framework, in OpenAI's words."""
    return ApiError(error.status_code, str(error.detail))


def _takes(kind: type[Any]) -> dict[str, Any]:
    """What /openapi.json says of a body that we read ourselves."""
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _described(app: FastAPI) -> dict[str, Any]:
    """The framework's description, and the shapes of those bodies."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, shapes = models_json_schema([(kind, "validation") for kind in BODIES], ref_template=REFERENCE)
        found.setdefault("components", {}).setdefault("schemas", {}).update(shapes["$defs"])
        app.openapi_schema = found
    return app.openapi_schema

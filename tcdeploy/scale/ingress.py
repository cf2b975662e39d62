"""The ingress: an ASGI app in front of several models, where the `model` of a request chooses the model.

It reads a request's body, decompresses it, forwards the request to the server of its model, and passes the response on
as it comes. Validation, API keys and responses are the servers' own. `/v1/models` lists the models for which the
client's API key is valid. How a request reaches a server is a parameter (`Forward`), so that this module does not
import Ray.

HAProxy can ask a deployment for the replica of each request (Ray's "ingress request router"), which would keep Python
out of the response. That was rejected: it chooses among the replicas of one deployment, and so of one model.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tcdeploy.scale.forwarded_request import ForwardedRequest, Headers, PromptRequest
from tcdeploy.server.api import REQUEST_MODELS
from tcdeploy.server.apis.anthropic.protocol import messages_error_body
from tcdeploy.server.apis.openai.protocol import ApiError, bad_request
from tcdeploy.server.generate.admission import Admission, BodyReservation
from tcdeploy.server.http.json_steps import JsonLimitError, JsonLimits, JsonSteps
from tcdeploy.server.http.middleware import (
    MAX_PATH_CHARS,
    MESSAGES_PATH,
    AuthMiddleware,
    error_response,
    find_near_path,
    routing_error,
)
from tcdeploy.server.http.request_body import read_decoded_body
from tcdeploy.server.http.request_parsing import SMALL_BODY_BYTES
from tcdeploy.server.observe.request_log import REQUEST_ID
from tcdeploy.server.settings import ServerSettings

Forward = Callable[[str, ForwardedRequest], AsyncGenerator[list[Message], None]]  # to the application of a model
MAX_WAITING_BYTES = 256 << 20  # of large bodies whose responses have not ended
MAX_PROMPT_CHARS = 32 << 10  # by which a request router chooses a replica
PROMPT_FIELDS = ("system", "instructions", "prompt", "messages", "input")  # in the order of the model's prompt
FORWARDED_HEADER = b"x-tcdeploy-ingress"
BODY_HEADERS = (b"content-encoding", b"content-length")  # of the body as the client sent it
RETRY_AFTER_S = 1


@dataclass(frozen=True)
class IngressModel:
    """A model behind the ingress. `names`: in the API. `needs_prompt`: its request router reads the prompt.

    api_keys: of its server; (): it needs none.
    """

    names: tuple[str, ...]
    needs_prompt: bool = False
    api_keys: tuple[str, ...] = ()


class Ingress:
    """Call `app`. `models` by the name of their application.

    `forward(application, request)` yields the events of the response; it raises ApiError, also after the first event.
    """

    def __init__(
        self,
        models: Mapping[str, IngressModel],
        forward: Forward,
        max_body_bytes: int = ServerSettings.max_body_bytes,
    ) -> None:
        self._models, self._forward, self._bodies = models, forward, _BodyReader(max_body_bytes)
        self._applications = {name: application for application, model in models.items() for name in model.names}
        # The servers check their own keys. This check comes before a body is read.
        need_keys = all(model.api_keys for model in models.values())
        api_keys = tuple(key for model in models.values() for key in model.api_keys) if need_keys else ()
        self.app: ASGIApp = AuthMiddleware(self._make_app(), api_keys)

    def _routes(self) -> list[Route]:
        """The first segments of their paths are in ray_config.ROUTE_NAMES."""
        return [
            Route("/health", _health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/v1/models", self._list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/v1/responses/{response_id}", self._stored_response, methods=["GET", "DELETE"]),
            *(Route(path, self._generate, methods=["POST"]) for path in REQUEST_MODELS),
        ]

    def _make_app(self) -> ASGIApp:
        routes = self._routes()

        async def handle_error(request: Request, error: Exception) -> Response:
            path = request.scope["path"]
            if isinstance(error, HTTPException) and error.status_code == 405:  # of the router
                error = routing_error(routes, request.method, path)
            elif isinstance(error, HTTPException) and error.status_code == 404:
                error = self._unknown_route(request.method, path, [route.path for route in routes])
            return error_response(error, path)

        kinds = (ApiError, HTTPException, ClientDisconnect, Exception)
        app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, handle_error))
        app.router.redirect_slashes = False

        async def reject_forwarding_loops(scope: Scope, receive: Receive, send: Send) -> None:
            """Reject requests that the ingress itself has forwarded.

            If the application at /NAME is not running, Ray routes requests for /NAME to the ingress at /, which would
            forward them to itself without end.
            """
            if scope["type"] == "http" and any(name == FORWARDED_HEADER for name, _ in scope["headers"]):
                error = ApiError(503, "the model is not running", code="loading", retry_after=RETRY_AFTER_S)
                await error_response(error, "")(scope, receive, send)
            else:
                await app(scope, receive, send)

        return reject_forwarding_loops

    def _unknown_route(self, method: str, path: str, known_paths: list[str]) -> ApiError:
        near_path = find_near_path([known for known in known_paths if "{" not in known], path)
        question = f" Did you mean {near_path}?" if near_path else ""
        prefixes = " or ".join(f"/{application}/..." for application in self._models)
        message = f"unknown route {method} {path[:MAX_PATH_CHARS]}; for the other routes of a model, use {prefixes}"
        return ApiError(404, message + question, code="unknown_route")

    async def _generate(self, request: Request) -> Response:
        with contextlib.ExitStack() as memory:
            body, fields = await self._bodies.read(request, memory)
            if isinstance(fields, JsonLimitError):
                raise bad_request(fields.message, fields.field and fields.field[:MAX_PATH_CHARS])
            if isinstance(fields, ValueError):
                raise bad_request(f"the body is not valid JSON: {fields}", None, "invalid_json")
            if not isinstance(fields, dict):
                raise bad_request("the body is not a JSON object", None)
            application = self._applications.get(name) if isinstance(name := fields.get("model"), str) else None
            if application is None:
                return await self._unknown_model(request, fields.get("model"))
            forwarded = _forwarded(request, request.scope["path"], body)
            if self._models[application].needs_prompt:
                forwarded = _with_prompt(forwarded, fields)
            return _ForwardedResponse(self._forward(application, forwarded), memory.pop_all())

    async def _list_models(self, request: Request) -> Response:
        responses = await self._ask_all(request, "/v1/models")
        lists = [json.loads(response.body) for response in responses.values() if response.status == 200]
        if not lists:
            return next(iter(responses.values())).response()
        return JSONResponse({"object": "list", "data": [card for content in lists for card in content["data"]]})

    async def _model(self, request: Request) -> Response:
        application = self._applications.get(request.path_params["name"])
        if application is None:
            return await self._unknown_model(request, request.path_params["name"])
        return _ForwardedResponse(self._forward(application, _forwarded(request, request.scope["path"])))

    async def _unknown_model(self, request: Request, name: object) -> Response:
        """An error with the names that the client's API key may see; 401 if it is invalid for all models."""
        listed = await self._list_models(request)
        if listed.status_code != 200:
            return listed
        names = " and ".join(repr(card["id"]) for card in json.loads(bytes(listed.body))["data"])
        if name is None:
            raise bad_request(f"model is required; this server serves {names}", "model")
        message = f"the model {str(name)[:200]!r} does not exist; this server serves {names}"
        raise ApiError(404, message, "model", "model_not_found")

    async def _stored_response(self, request: Request) -> Response:
        """The server that has stored the response answers 200, the others 404.

        If a server cannot be reached, or refuses the client's API key, and no other has the response, its error is
        returned: it may have the response.
        """
        responses = list((await self._ask_all(request, request.scope["path"])).values())
        found = [response for response in responses if response.status < 400]
        errors = [response for response in responses if response.status != 404]
        return (found or errors or responses)[0].response()

    async def _ready(self, request: Request) -> Response:
        """200 if every model is ready."""
        for application, response in (await self._ask_all(request, "/ready")).items():
            if response.status != 200:
                return PlainTextResponse(f"{application}: {response.body.decode(errors='replace')}", response.status)
        return PlainTextResponse("ready")

    async def _ask_all(self, request: Request, path: str) -> dict[str, _BufferedResponse]:
        """The responses of all models, by application. `request` may be one with a body, which is not sent."""
        forwarded = _forwarded(request, path)
        if request.method != "DELETE":
            headers = tuple(header for header in forwarded.headers if not header[0].startswith(b"content-"))
            query = forwarded.query_string if path == request.scope["path"] else b""
            forwarded = dataclasses.replace(forwarded, method="GET", query_string=query, headers=headers)
        responses = await asyncio.gather(*(self._ask(application, forwarded) for application in self._models))
        return dict(zip(self._models, responses, strict=True))

    async def _ask(self, application: str, request: ForwardedRequest) -> _BufferedResponse:
        start: Message = {}
        body = bytearray()
        try:
            async for events in self._forward(application, request):
                for event in events:
                    start = event if event["type"] == "http.response.start" else start
                    body += event.get("body", b"")
        except ApiError as error:
            return _BufferedResponse(
                error.status, json.dumps(error.body).encode(), ((b"content-type", b"application/json"),)
            )
        return _BufferedResponse(start["status"], bytes(body), tuple(start["headers"]))


def single_model_ingress(
    application: str, forward: Forward, max_body_bytes: int = ServerSettings.max_body_bytes
) -> ASGIApp:
    """The ingress of one model: forwards every request, and extracts the prompt for the request router."""
    bodies = _BodyReader(max_body_bytes)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        response: Response
        with contextlib.ExitStack() as memory:
            try:
                body, fields = await bodies.read(request, memory)
                forwarded = _with_prompt(_forwarded(request, scope["path"], body), fields)
                response = _ForwardedResponse(forward(application, forwarded), memory.pop_all())
            except (ApiError, ClientDisconnect) as error:
                response = error_response(error, scope["path"])
        await response(scope, receive, send)

    return app


class _BodyReader:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._admission = max_bytes, Admission(0, MAX_WAITING_BYTES)

    async def read(self, request: Request, memory: contextlib.ExitStack) -> tuple[bytes, Any]:
        """The body and its content, or the ValueError of a body that is not JSON.

        The body counts as waiting until `memory` is closed. Raises ApiError 413 for a large body, 503 if too many bytes
        wait, and 408; ClientDisconnect.
        """
        reservation = memory.enter_context(BodyReservation(self._admission))
        body = bytes(await read_decoded_body(request, self._max_bytes, reservation))
        try:
            return body, await _parse_json(body)
        except ValueError as error:
            return body, error


@dataclass(frozen=True)
class _BufferedResponse:
    """A response whose body has been read completely."""

    status: int
    body: bytes
    headers: Headers

    def response(self) -> Response:
        content_type = dict(self.headers).get(b"content-type", b"application/json").decode("latin-1")
        kept = {b"www-authenticate", b"retry-after"}
        headers = {name.decode(): value.decode("latin-1") for name, value in self.headers if name in kept}
        return Response(self.body, self.status, headers, content_type)


class _ForwardedResponse(Response):
    """Sends the response events of a server to the client, until the client disconnects.

    An ApiError before the first event becomes an error response. After it, a stream of server-sent events ends with an
    error event, and any other response is cut off.
    """

    def __init__(self, events: AsyncGenerator[list[Message], None], memory: contextlib.ExitStack | None = None) -> None:
        """`memory`: is closed at the end, because the request keeps its body until then."""
        self._events, self._memory = events, memory or contextlib.ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._memory:
            await self._respond(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(scope, receive, send))
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnect.cancel()
            if not sending.done():
                sending.cancel()
                await asyncio.wait({sending})
        if not sending.cancelled():
            sending.result()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None
        try:
            async with contextlib.aclosing(self._events):
                async for events in self._events:
                    for event in events:
                        if start is None:
                            start = event = _without_request_id(event)
                        await send(event)
        except ApiError as error:
            if start is None:
                await error_response(error, scope["path"])(scope, receive, send)
            elif dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
                await send({"type": "http.response.body", "body": _error_event(error, scope["path"])})
            else:  # the connection is closed before the end of the body, which the client notices
                raise


def prompt_text(fields: Mapping[str, Any]) -> str:
    """The first MAX_PROMPT_CHARS characters of a request's instructions, prompt and messages; token ids as numbers."""
    pieces, length = [], 0
    for piece in _texts([fields.get(name) for name in PROMPT_FIELDS]):
        pieces.append(piece)
        length += len(piece)
        if length >= MAX_PROMPT_CHARS:
            break
    return "".join(pieces)[:MAX_PROMPT_CHARS]


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case int():
            yield f"{value} "
        case list():
            for item in value:
                yield from _texts(item)
        case dict():
            yield from _texts(value.get("content", value.get("text")))


async def _parse_json(body: bytes) -> Any:
    """Raises ValueError. A large body is parsed in steps, between which other requests run."""
    if len(body) <= SMALL_BODY_BYTES:
        return from_json(body)
    steps = JsonSteps(body, JsonLimits(len(body), len(body)))
    while not steps.step():
        await asyncio.sleep(0)
    return steps.value


def _forwarded(request: Request, path: str, body: bytes = b"") -> ForwardedRequest:
    """`body`: the decompressed body."""
    kept = [(bytes(name), bytes(value)) for name, value in request.scope["headers"] if name not in BODY_HEADERS]
    if body:
        kept.append((b"content-length", str(len(body)).encode()))
    headers = (*kept, (FORWARDED_HEADER, b"1"))
    return ForwardedRequest(request.method, path, request.scope["query_string"], headers, body)


def _with_prompt(request: ForwardedRequest, fields: object) -> ForwardedRequest:
    prompt = prompt_text(fields) if isinstance(fields, dict) else ""
    return PromptRequest(**request.__dict__, prompt=prompt) if prompt else request


def _without_request_id(start: Message) -> Message:
    """Ray adds the request's id to the response of the ingress too."""
    return {**start, "headers": [(name, value) for name, value in start["headers"] if name != REQUEST_ID]}


def _error_event(error: ApiError, path: str) -> bytes:
    """The last event of a stream that failed. Without it, clients would treat the stream as complete."""
    if path.startswith(MESSAGES_PATH):
        return b"event: error\ndata: " + json.dumps(messages_error_body(error)).encode() + b"\n\n"
    return b"data: " + json.dumps(error.body).encode() + b"\n\ndata: [DONE]\n\n"


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _health(_: Request) -> Response:
    return Response()

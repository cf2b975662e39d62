"""Runs a generation request of any HTTP API, from its body to its response or its stream of server-sent events.

A request passes the body limit, schema validation, admission, the tokenizer, the model's limits, and then the engine.
Each stage rejects with an ApiError that names the field. The APIs differ in the schema of the body and in the format of
the response (apis/answer.py). One other than OpenAI's completions and chats translates its body to a ChatRequest;
errors then name the fields as that API does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from tcdeploy.errors import EngineDeadError, TcdeployError
from tcdeploy.server.apis.answer import Answer
from tcdeploy.server.apis.openai.answer import ChatAnswer, CompletionAnswer
from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest, CompletionRequest, SamplingRequest, bad_request
from tcdeploy.server.apis.openai.unsupported_fields import INERT_VALUES, rename_error
from tcdeploy.server.apis.openai.validation import check_combinations
from tcdeploy.server.generate.active_request import ActiveRequest
from tcdeploy.server.generate.admission import BodyReservation
from tcdeploy.server.generate.tokenization import PromptTokenizer
from tcdeploy.server.http.request_body import read_decoded_body
from tcdeploy.server.http.request_parsing import SMALL_BODY_BYTES, RequestT, parse
from tcdeploy.server.observe.request_log import set_logged_generation
from tcdeploy.server.service import ServerState, Service
from tcdeploy.torch_compat.uvicorn.protocol import abort, is_write_paused

KEEP_ALIVE_SECONDS = 10.0
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
log = logging.getLogger("tcdeploy.server")


class TranslatedRequest(NamedTuple):
    """A request of any API as one that the engine runs, and the constructor of its `Answer`."""

    request: CompletionRequest | ChatRequest
    new_answer: Callable[[ActiveRequest], Answer]


async def _without_translation(_: ServerState, __: Request, body: Any) -> TranslatedRequest:
    return TranslatedRequest(body, ChatAnswer if isinstance(body, ChatRequest) else CompletionAnswer)


@dataclass(frozen=True)
class GenerationApi:
    """What distinguishes one HTTP API. `translate` may raise ApiError."""

    path: str
    name: str  # of the operation in /openapi.json
    summary: str
    body_type: type[SamplingRequest]
    translate: Callable[[ServerState, Request, Any], Awaitable[TranslatedRequest]] = _without_translation
    inert_values: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: INERT_VALUES)  # of unsupported fields
    field_names: Mapping[str, str] = field(default_factory=dict)  # names of ChatRequest's fields in this API


def generation_route(state: ServerState, api: GenerationApi) -> Route:
    async def endpoint(request: Request) -> Response:
        return await generate(state, request, api)

    endpoint.__doc__ = api.summary
    return Route(api.path, endpoint, methods=["POST"], name=api.name)


async def generate(state: ServerState, raw_request: Request, api: GenerationApi) -> Response:
    """The response to a request of `api`. Raises ApiError."""
    with BodyReservation(state.admission) as reservation:
        body = await parse_body(state, raw_request, api.body_type, reservation)
        translated = await api.translate(state, raw_request, body)
        try:
            check_combinations(translated.request)
            state.admission.check_open()
            service = state.require_service()
            unknown = [name for name in body.model_extra or {} if name not in api.inert_values]
            service.count_unknown_fields([*unknown, *body._unknown_nested])
            service.check_model(translated.request.model)
            return await _run(service, raw_request, translated, reservation)
        except ApiError as error:
            raise rename_error(error, api.field_names) from None


async def _run(
    service: Service, raw_request: Request, translated: TranslatedRequest, reservation: BodyReservation
) -> Response:
    request, new_answer = translated
    num_choices = request.num_choices * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
    service.admission.acquire(num_choices)
    active, stream = None, None
    try:
        prompts = await service.prompt_tokenizer.prompts(request)
        constraint = await service.constraint(request, prompts)
        active = await ActiveRequest.create(service, request, prompts, constraint)
        reservation.release()
        set_logged_generation(raw_request.scope, active.logged_generation)
        await active.submit()
        answer = new_answer(active)
        if request.stream:
            stream = EventStream(answer, service.settings.stall_timeout)
            return stream
        content = await run_until_disconnect(raw_request.receive, answer.body())
        return Response(content, media_type="application/json")
    except TcdeployError as error:
        raise engine_error(error) from None
    finally:
        if active is None:
            service.admission.release(num_choices)
        elif stream is None:
            active.close()  # a stream closes it when it ends


def engine_error(error: TcdeployError) -> ApiError:
    """503 if the engine has died; else 400, because it has refused the request."""
    if isinstance(error, EngineDeadError):
        return ApiError(503, error.message, code="engine_died")
    return bad_request(error.message, None)


@contextlib.asynccontextmanager
async def admitted_body(
    state: ServerState, request: Request, request_type: type[RequestT]
) -> AsyncIterator[tuple[PromptTokenizer, RequestT]]:
    """Read the body of a request that needs only the tokenizer, and admit it as one choice until the end of the block.
    The body is read first, so that clients which send no body cannot fill the queue.
    """
    service = state.require_service()
    service.admission.check_open()
    with BodyReservation(service.admission) as reservation:
        body = await parse_body(state, request, request_type, reservation)
        service.admission.acquire(1)
        try:
            yield service.prompt_tokenizer, body
        finally:
            service.admission.release(1)


async def parse_body(
    state: ServerState, request: Request, request_type: type[RequestT], reservation: BodyReservation
) -> RequestT:
    """The validated JSON body. Raises ApiError 400, 408, 413 or 415, and 503 if too many bytes wait."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"the content type is {content_type[:80]!r}; it must be application/json")
    body = await read_decoded_body(request, state.settings.max_body_bytes, reservation)
    if len(body) <= SMALL_BODY_BYTES:
        return parse(request_type, body)
    state.admission.check_open()  # the limits of large bodies depend on the model
    return await state.large_body_parser.parse(request_type, body, state.require_service().json_limits)


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`. If the client disconnects, cancels it, waits for its end and raises ClientDisconnect."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        disconnect.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def sse_events(answer: Answer) -> AsyncGenerator[bytes, None]:
    """All events of a stream. Errors are sent as events, because clients treat a truncated stream as complete."""
    try:
        async with contextlib.aclosing(_answer_events(answer)) as events:
            async for event in events:
                yield event
    except ApiError as error:
        yield answer.error_events(error)
    except TcdeployError as error:
        yield answer.error_events(engine_error(error))
    except Exception as error:  # without this, the stream would end without an error event
        log.exception("a stream failed")
        yield answer.error_events(ApiError(500, f"{type(error).__name__}: {error}"))
    if answer.end:
        yield answer.end


async def _answer_events(answer: Answer) -> AsyncGenerator[bytes, None]:
    """The events up to an error. An event covers several tokens if the client or the event loop is slow. Tokens of a
    tool call have no events until it is complete, which may take minutes.
    """
    if first_events := answer.first_events():
        yield first_events
    last_sent = time.monotonic()
    async with contextlib.aclosing(answer.active.deltas(KEEP_ALIVE_SECONDS)) as batches:
        async for deltas in batches:
            events = answer.events(deltas)
            if events or not deltas or time.monotonic() - last_sent >= KEEP_ALIVE_SECONDS:
                yield events or answer.keep_alive
                last_sent = time.monotonic()
    if last_events := answer.last_events():
        yield last_events


class _ClientStalled(Exception):
    """The client has not read for `stall_timeout`."""


class EventStream(StreamingResponse):
    """Streams a request's events and closes it at the end. Aborts the connection if the client stops reading."""

    def __init__(self, answer: Answer, stall_timeout_s: float) -> None:
        self._active, self._events, self._stall_timeout_s = answer.active, sse_events(answer), stall_timeout_s
        super().__init__(self._events, media_type="text/event-stream", headers=STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        try:
            await super().__call__(scope, receive, send)
        except _ClientStalled:
            log.warning("cancelled a stream: the client did not read for %.0f s", self._stall_timeout_s)
            abort(scope)
        finally:
            self._active.close()

    async def stream_response(self, send: Send) -> None:
        """Overrides Starlette's method, which is not documented: tests/server/test_faults.py fails if it is renamed.
        uvicorn's `send` waits while its write buffer is full; tokens collect in the request group meanwhile.
        """

        async def send_with_timeout(message: Message) -> None:
            if not is_write_paused(self._scope):
                await send(message)
                return
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await send(message)
            except TimeoutError:
                raise _ClientStalled from None

        try:
            await super().stream_response(send_with_timeout)
        finally:
            await self._events.aclose()

"""The ingress of a model with a request router of its own: an ASGI app that forwards requests to the router's replica.

HAProxy picks the replicas of an application's ingress itself and bypasses the request router, so such a model must not
be the ingress. `ingress_app` reads a request's body, extracts the prompt for the router, forwards the request, and
passes the response on as events (ASGI messages). `respond` runs a replica's app on a forwarded request. Validation, API
keys and responses are the replica's own. How a request reaches the replica is a parameter (`Forward`), so that this
module does not import Ray.

A deployment handle passes each token through Ray's object store. With the embedded model on 2 CPU cores behind HAProxy,
it added 7.6 ms to the first token of single requests, and 8 streams had 0.5 to 0.65 times the tokens/s. So only models
whose `request_router_config` needs a handle are reached through one. HAProxy can also ask a deployment for the replica
of each request (Ray's "ingress request router"); rejected, because the prefix-aware router learns no prompts from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tcdeploy.server.apis.anthropic.protocol import messages_error_body
from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.generate.admission import Admission, BodyReservation
from tcdeploy.server.generate.generation import run_until_disconnect
from tcdeploy.server.http.json_steps import JsonLimits, JsonSteps
from tcdeploy.server.http.middleware import MESSAGES_PATH, error_response
from tcdeploy.server.http.request_body import read_decoded_body
from tcdeploy.server.http.request_parsing import SMALL_BODY_BYTES
from tcdeploy.server.observe.request_log import REQUEST_ID

MAX_WAITING_BYTES = 256 << 20  # of large bodies whose responses have not ended
MAX_PROMPT_CHARS = 32 << 10  # by which a request router chooses a replica
PROMPT_FIELDS = ("system", "instructions", "prompt", "messages", "input")  # in the order of the model's prompt
BODY_HEADERS = (b"content-encoding", b"content-length")  # of the body as the client sent it
PATH_CHARS = "/:@!$&'()*+,;=-._~"  # need no percent-encoding in a path (RFC 3986)
_running: set[asyncio.Task[None]] = set()  # the event loop holds tasks by weak references only


@dataclass(frozen=True)
class ForwardedRequest:
    """A request whose body has arrived. `headers` have names in lower case, as in ASGI.

    prompt: the text by which a request router of Ray chooses the replica, which does not get it.
    """

    method: str
    path: str
    query_string: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    prompt: str = ""

    def __getstate__(self) -> Mapping[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "prompt"}

    def scope(self) -> Scope:
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
            "method": self.method, "path": self.path, "raw_path": quote(self.path, PATH_CHARS).encode(),
            "query_string": self.query_string, "root_path": "", "headers": list(self.headers),
            "client": None, "server": None, "extensions": {},
        }  # fmt: skip


Forward = Callable[[ForwardedRequest], AsyncGenerator[list[Message], None]]


def ingress_app(forward: Forward, max_body_bytes: int) -> ASGIApp:
    """`forward` yields the events of the response; it raises ApiError, also after the first event."""
    admission = Admission(0, MAX_WAITING_BYTES)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        with BodyReservation(admission) as reservation:  # until the response has ended: the request keeps its body
            try:
                request = await _read_request(Request(scope, receive), max_body_bytes, reservation)
            except (ApiError, ClientDisconnect) as error:
                await error_response(error, scope["path"])(scope, receive, send)
            else:
                with contextlib.suppress(ClientDisconnect):
                    await run_until_disconnect(receive, _send_all(forward(request), scope, receive, send))

    return app


async def _read_request(request: Request, max_bytes: int, reservation: BodyReservation) -> ForwardedRequest:
    """The request with its decompressed body.

    Raises ApiError 413 for a large body, 503 if too many bytes wait, and 408; ClientDisconnect.
    """
    body = bytes(await read_decoded_body(request, max_bytes, reservation))
    try:
        fields = await _parse_json(body)
    except ValueError:  # the replica's error says why
        fields = None
    headers = [(bytes(name), bytes(value)) for name, value in request.scope["headers"] if name not in BODY_HEADERS]
    if body:
        headers.append((b"content-length", str(len(body)).encode()))
    prompt = prompt_text(fields) if isinstance(fields, dict) else ""
    return ForwardedRequest(
        request.method, request.scope["path"], request.scope["query_string"], tuple(headers), body, prompt
    )


async def _parse_json(body: bytes) -> Any:
    """Raises ValueError. A large body is parsed in steps, between which other requests run."""
    if len(body) <= SMALL_BODY_BYTES:
        return from_json(body)
    steps = JsonSteps(body, JsonLimits(len(body), len(body)))
    while not steps.step():
        await asyncio.sleep(0)
    return steps.value


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


async def _send_all(batches: AsyncGenerator[list[Message], None], scope: Scope, receive: Receive, send: Send) -> None:
    """An ApiError before the first event becomes an error response. After it, a stream of server-sent events ends with
    an error event, and any other response is cut off.
    """
    start: Message | None = None
    try:
        async with contextlib.aclosing(batches):
            async for events in batches:
                for event in events:
                    if start is None:  # Ray adds the request's id to the response of the ingress too
                        headers = [(name, value) for name, value in event["headers"] if name != REQUEST_ID]
                        start = event = {**event, "headers": headers}
                    await send(event)
    except ApiError as error:
        if start is None:
            await error_response(error, scope["path"])(scope, receive, send)
        elif dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
            await send({"type": "http.response.body", "body": _error_event(error, scope["path"])})
        else:  # the connection is closed before the end of the body, which the client notices
            raise


def _error_event(error: ApiError, path: str) -> bytes:
    """The last event of a stream that failed. Without it, clients would treat the stream as complete."""
    if path.startswith(MESSAGES_PATH):
        return b"event: error\ndata: " + json.dumps(messages_error_body(error)).encode() + b"\n\n"
    return b"data: " + json.dumps(error.body).encode() + b"\n\ndata: [DONE]\n\n"


async def respond(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
    """Events of the response as `app` sends them; a list has all events that are ready.

    If the caller stops early or is cancelled, `app` gets `http.disconnect`. Raises what `app` raises.
    """
    events: asyncio.Queue[Message | None] = asyncio.Queue()
    is_body_sent, disconnected = False, asyncio.Event()

    async def receive() -> Message:
        nonlocal is_body_sent
        if not is_body_sent:
            is_body_sent = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(request.scope(), receive, events.put)
        finally:
            events.put_nowait(None)

    task = asyncio.create_task(run())
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        has_more = True
        while has_more:
            ready = [await events.get()]
            while not events.empty():
                ready.append(events.get_nowait())
            has_more = ready[-1] is not None
            if batch := [event for event in ready if event is not None]:
                yield batch
        await task
    finally:
        disconnected.set()

"""Counts each HTTP request in the metrics, and writes the access log (--log-requests).

Each line is written LOG_DELAY_S after the response: a client that sends its next request at once would otherwise wait
for it. Of prompts, it has as many characters as --log-prompts says.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tcdeploy.server.observe.metrics import Metrics
from tcdeploy.server.settings import RequestLogFormat

UNKNOWN_HANDLER = "none"
OTHER_METHOD = "other"  # clients choose the method, so unknown methods share one series
MAX_LOGGED_CHARS = 200  # of a path and of a request id, which clients choose
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
REQUEST_ID = b"x-request-id"
SCOPE_KEY = "tcdeploy.usage"
LOG_DELAY_S = 0.02
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that has disconnected before the response
log = logging.getLogger("tcdeploy.access")  # cli/process.py sends it to stderr


@dataclass(frozen=True)
class LoggedGeneration:
    """Tokens, times and parameters of a request that generated text. Other requests are logged without one."""

    prompt_tokens: int
    completion_tokens: int
    finish_reasons: tuple[str, ...]  # of the choices; "" for one that was aborted
    cached_tokens: int = 0
    first_token_seconds: float | None = None  # from admission to the first token of any choice
    seconds_per_token: float | None = None  # after the first one; the mean of the choices
    is_streamed: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters that the engine used
    prompts: tuple[str, ...] = ()  # their first characters, if they are logged


@dataclass(frozen=True)
class LoggedRequest:
    method: str
    path: str  # without the root path
    status: int
    end_time: float  # seconds since the epoch
    seconds: float
    request_id: str
    headers: Collection[tuple[bytes, bytes]]
    generation: LoggedGeneration | None


def set_logged_generation(scope: Scope, get_generation: Callable[[], LoggedGeneration]) -> None:
    """Let the access log call `get_generation` when the request has ended."""
    scope[SCOPE_KEY] = get_generation


class RequestLog:
    """ASGI middleware around the whole application, which also adds X-Request-Id to responses. The series of `routes`
    start at zero. `record`, if given, is called for each request that has ended.
    """

    def __init__(
        self, app: ASGIApp, routes: Collection[Route], metrics: Metrics, log_format: RequestLogFormat = "off",
        record: Callable[[LoggedRequest], None] | None = None,
    ) -> None:  # fmt: skip
        self._app, self._log_format, self._record = app, log_format, record
        self._ended: deque[Callable[[], None]] = deque()  # calls of `_log`
        self._is_closed = False
        self._paths = frozenset(route.path for route in routes)
        self._parameterized = {route.path.partition("{")[0]: route.path_format for route in routes if "{" in route.path}
        self._requests, self._durations = metrics.http_requests, metrics.http_durations
        for route in routes:
            for method in METHODS & (route.methods or set()) - {"HEAD"}:
                for status in ("2xx", "4xx", "5xx"):
                    self._requests.labels(route.path_format, method, status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, path = time.perf_counter(), scope["path"]  # RootPath changes the path
        status, request_id = CLIENT_CLOSED_REQUEST, b""

        async def send_with_request_id(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                # Made only now, to keep it out of the time to first token: the engine has the request already.
                status, request_id = message["status"], _request_id(scope)
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_request_id)
        finally:
            self._observe(scope, path, status, time.perf_counter() - start, request_id or _request_id(scope))

    def _observe(self, scope: Scope, path: str, status: int, seconds: float, request_id: bytes) -> None:
        method = scope["method"] if scope["method"] in METHODS else OTHER_METHOD
        handler = self._handler(scope["path"])
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._durations.labels(handler, method).observe(seconds)
        # Taken out, because uvicorn's objects of a connection form a cycle, which keeps the scope until a collection.
        get_generation = scope.pop(SCOPE_KEY, None)
        if self._log_format == "off" and self._record is None:
            return
        request = functools.partial(
            LoggedRequest, scope["method"], scope["path"], status, time.time(), seconds,
            request_id.decode("latin-1")[:MAX_LOGGED_CHARS], scope["headers"],
        )  # fmt: skip
        self._ended.append(lambda: self._log(scope, path, request(get_generation() if get_generation else None)))
        if self._is_closed:
            self._log_next()
        else:
            asyncio.get_running_loop().call_later(LOG_DELAY_S, self._log_next)

    def close(self) -> None:
        """Log the requests that have ended, and from now on each request at its end: the event loop is about to end."""
        self._is_closed = True
        while self._ended:
            self._log_next()

    def _log_next(self) -> None:
        if self._ended:  # else `close` has logged it
            self._ended.popleft()()

    def _log(self, scope: Scope, path: str, request: LoggedRequest) -> None:
        if self._log_format != "off":
            log.info(self._line(scope.get("client"), path, request))
        if self._record is not None:
            self._record(request)

    def _handler(self, path: str) -> str:
        """The label of a path: its route, so that clients cannot create series."""
        if path in self._paths:
            return path
        routes = (route for parent, route in self._parameterized.items() if path.startswith(parent))
        return next(routes, UNKNOWN_HANDLER)

    def _line(self, client: tuple[str, int] | None, path: str, request: LoggedRequest) -> str:
        fields: dict[str, Any] = {
            "client": f"{client[0]}:{client[1]}" if client else "-", "method": request.method,
            "path": path[:MAX_LOGGED_CHARS], "status": request.status, "milliseconds": round(request.seconds * 1e3, 1),
            "request_id": request.request_id,
        }  # fmt: skip
        if (generation := request.generation) is not None:
            fields["prompt_tokens"] = generation.prompt_tokens
            fields["completion_tokens"] = generation.completion_tokens
            fields["finish_reasons"] = Counter(reason or "abort" for reason in generation.finish_reasons)
            if generation.prompts:
                fields["prompts"] = generation.prompts
        if self._log_format == "json":
            return json.dumps({"time": round(request.end_time, 3), **fields})
        return _text_line(fields)


def _request_id(scope: Scope) -> bytes:
    sent = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
    return sent or uuid.uuid4().hex.encode()


def _text_line(fields: dict[str, Any]) -> str:
    """One line. What a client has chosen is quoted as in a URL, so that it cannot add lines or fields."""
    path = quote(fields["path"], safe="/:@!$&'()*+;=~")
    line = f"{fields['client']} {fields['method']} {path} {fields['status']} {fields['milliseconds']} ms"
    if "prompt_tokens" in fields:
        counts = fields["finish_reasons"].items()
        reasons = ", ".join(f"{count} {reason}" if count > 1 else reason for reason, count in counts)
        line += f", {fields['prompt_tokens']} prompt tokens, {fields['completion_tokens']} new tokens ({reasons})"
    line += f", request {quote(fields['request_id'], safe=':@+=~')}"
    if "prompts" in fields:
        line += f", prompts {json.dumps(fields['prompts'])}"
    return line

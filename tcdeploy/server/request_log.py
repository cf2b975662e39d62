"""Counts each HTTP request in the metrics, and writes the access log (--log-requests).

A line of the log names the request by X-Request-Id. The text of prompts is not logged.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tcdeploy.server.metrics import Metrics
from tcdeploy.server.settings import RequestLogFormat

UNKNOWN_HANDLER = "none"
OTHER_METHOD = "other"  # methods are chosen by clients, so those that no route has share a series
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
SCOPE_KEY = "tcdeploy.usage"
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that has disconnected before the response
log = logging.getLogger("tcdeploy.access")  # cli/process.py sends it to stderr


@dataclass(frozen=True)
class LoggedUsage:
    """What a completion request has used. A request without one is logged without tokens."""

    prompt_tokens: int
    completion_tokens: int
    finish_reasons: tuple[str, ...]  # of the choices; "" for one that was aborted


def set_usage(scope: Scope, get_usage: Callable[[], LoggedUsage]) -> None:
    """Let the access log call `get_usage` when the request has ended."""
    scope[SCOPE_KEY] = get_usage


class RequestLog:
    """ASGI middleware around the whole application. `routes`: their series start at zero."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Collection[Route],
        metrics: Metrics,
        log_format: RequestLogFormat = "off",
    ) -> None:
        self._app, self._log_format = app, log_format
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
        start = time.perf_counter()
        started: list[Message] = []

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._observe(scope, started, time.perf_counter() - start)

    def _observe(self, scope: Scope, started: list[Message], seconds: float) -> None:
        status = started[0]["status"] if started else CLIENT_CLOSED_REQUEST
        handler = self._handler(scope["path"])
        method = scope["method"] if scope["method"] in METHODS else OTHER_METHOD
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._durations.labels(handler, method).observe(seconds)
        if self._log_format != "off":
            headers = dict(started[0].get("headers", ())) if started else {}
            log.info(self._line(scope, status, seconds, headers.get(b"x-request-id", b"").decode("latin-1")))

    def _handler(self, path: str) -> str:
        """The label of a path: its route, so that clients cannot create series."""
        if path in self._paths:
            return path
        routes = (route for parent, route in self._parameterized.items() if path.startswith(parent))
        return next(routes, UNKNOWN_HANDLER)

    def _line(self, scope: Scope, status: int, seconds: float, request_id: str) -> str:
        client = scope.get("client")
        fields: dict[str, Any] = {
            "client": f"{client[0]}:{client[1]}" if client else "-",
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "milliseconds": round(seconds * 1e3, 1),
            "request_id": request_id,
        }
        if (get_usage := scope.get(SCOPE_KEY)) is not None:
            usage: LoggedUsage = get_usage()
            fields["prompt_tokens"], fields["completion_tokens"] = usage.prompt_tokens, usage.completion_tokens
            fields["finish_reasons"] = list(usage.finish_reasons)
        if self._log_format == "json":
            return json.dumps({"time": round(time.time(), 3), **fields})
        return _text_line(fields)


def _text_line(fields: dict[str, Any]) -> str:
    """One line; a path from a client cannot add another."""
    path = fields["path"].encode("unicode_escape").decode("ascii")
    line = f"{fields['client']} {fields['method']} {path} {fields['status']} {fields['milliseconds']} ms"
    if "prompt_tokens" in fields:
        reasons = ",".join(reason or "abort" for reason in fields["finish_reasons"])
        line += f", {fields['prompt_tokens']} prompt tokens, {fields['completion_tokens']} new tokens ({reasons})"
    return f"{line}, request {fields['request_id'].encode('unicode_escape').decode('ascii')}"

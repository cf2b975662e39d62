"""Server-sent events: the stream of a request, and an ASGI response that cancels clients which do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tcdeploy.errors import TcdeployError
from tcdeploy.server.active_request import ActiveRequest
from tcdeploy.server.http import abort, is_write_paused
from tcdeploy.server.protocol import ApiError, bad_request
from tcdeploy.server.worker import EngineDeadError

KEEP_ALIVE_SECONDS = 10.0
KEEP_ALIVE, DONE = b": keep-alive\n\n", b"data: [DONE]\n\n"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
log = logging.getLogger("tcdeploy.server")


async def sse_events(active: ActiveRequest) -> AsyncGenerator[bytes, None]:
    """All events of a stream. Errors are events, and [DONE] always follows: clients take a cut stream for complete."""
    try:
        async with contextlib.aclosing(_sse_deltas(active)) as events:
            async for event in events:
                yield event
    except ApiError as error:
        yield _sse_event(error.body)
    except EngineDeadError as error:
        yield _sse_event(ApiError(503, str(error), code=error.code).body)
    except TcdeployError as error:
        yield _sse_event(bad_request(error.message, None).body)
    except Exception as error:  # without this, the stream would end without an error event
        log.exception("a stream failed")
        yield _sse_event(ApiError(500, f"{type(error).__name__}: {error}").body)
    yield DONE


async def _sse_deltas(active: ActiveRequest) -> AsyncGenerator[bytes, None]:
    """One event per choice with new output. An event covers several tokens if the client or the loop is slow."""
    builder, options = active.builder, active.request.stream_options
    with_usage = options is not None and options.include_usage
    continuous_usage = options is not None and options.continuous_usage_stats
    for choice in active.choices:
        first_delta = builder.first_delta(choice)
        if first_delta is not None:
            yield _sse_event(builder.envelope([first_delta], active.usage if continuous_usage else None))
    async with contextlib.aclosing(active.deltas(KEEP_ALIVE_SECONDS)) as batches:
        async for deltas in batches:
            events = [
                _sse_event(builder.envelope([builder.delta(choice, text)], active.usage if continuous_usage else None))
                for choice, text in ((active.choices[index], text) for index, text in deltas.items())
                if text or choice.has_unsent_output
            ]
            if events or not deltas:
                yield b"".join(events) or KEEP_ALIVE
    if with_usage:
        yield _sse_event(builder.envelope([], active.usage))


def _sse_event(content: dict[str, Any]) -> bytes:
    return b"data: " + _to_json(content).encode() + b"\n\n"


class _ClientStalled(Exception):
    """The client has not read for `stall_timeout`."""


class EventStream(StreamingResponse):
    """Streams a request's events and closes it at the end. Aborts the connection if the client stops reading."""

    def __init__(self, active: ActiveRequest, stall_timeout_s: float) -> None:
        self._active, self._events, self._stall_timeout_s = active, sse_events(active), stall_timeout_s
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

        uvicorn's `send` waits while its write buffer is full. Tokens collect in the request group meanwhile.
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

"""Server-sent events: the stream of a request, and an ASGI response that cancels clients which do not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tcdeploy.errors import TcdeployError
from tcdeploy.server.apis.answer import Answer
from tcdeploy.server.apis.openai.protocol import ApiError, bad_request
from tcdeploy.torch_compat.uvicorn.protocol import abort, is_write_paused

KEEP_ALIVE_SECONDS = 10.0
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
log = logging.getLogger("tcdeploy.server")


async def sse_events(answer: Answer) -> AsyncGenerator[bytes, None]:
    """All events of a stream. Errors are sent as events, because clients treat a truncated stream as complete."""
    try:
        async with contextlib.aclosing(_answer_events(answer)) as events:
            async for event in events:
                yield event
    except ApiError as error:
        yield answer.error_events(error)
    except TcdeployError as error:
        yield answer.error_events(bad_request(error.message, None))
    except Exception as error:  # without this, the stream would end without an error event
        log.exception("a stream failed")
        yield answer.error_events(ApiError(500, f"{type(error).__name__}: {error}"))
    if answer.end:
        yield answer.end


async def _answer_events(answer: Answer) -> AsyncGenerator[bytes, None]:
    """The events up to an error. An event covers several tokens if the client or the event loop is slow.

    Tokens of a tool call have no events until it is complete, which may take minutes.
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

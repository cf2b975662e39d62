"""How a connection ends: errors of the protocol, early responses, disconnects and clients that do not read.

TCP resets a connection that is closed while received bytes are unread, and the client may then lose the response. So a
connection that ends before its request has arrived *lingers*: it is half-closed after the response, and the rest of the
request is read and dropped, within limits of bytes and time. An error of the protocol is sent after the responses to
the requests before it. `Connection` is the first base class of the protocol in torch_compat/uvicorn/protocol.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

MIN_READ_BYTES = 32 << 10  # that a client must read in each `stall_timeout_s` while more than 64 KiB are unsent
LINGER_S = 30.0  # until a lingering connection is closed
MAX_DROPPED_BODY_BYTES = 256 << 20  # that are read after a response that was sent before the end of the body
MAX_DROPPED_BYTES = 16 << 20  # that are read after bytes that are not HTTP, or exceed a limit
log = logging.getLogger("tcdeploy.server")
Timer: TypeAlias = Literal["deadline", "linger", "stall"]

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _Base
else:
    _Base = object  # `bounded_protocol` adds uvicorn's class, which only a server imports


class ConnectionObserver(Protocol):
    """Tracks which connections may be closed in favour of new ones."""

    def mark_idle(self, connection: Any) -> None:
        """No complete request of the connection waits for its response."""

    def mark_busy(self, connection: Any) -> None: ...

    def remove(self, connection: Any) -> None: ...


class Rejection(NamedTuple):
    """An error response after which the connection is closed."""

    status: int
    message: str


class Connection(_Base):
    """uvicorn's protocol with lingering close, error responses, and a time limit for clients that do not read."""

    error_body: Any  # (status, message) -> JSON
    stall_timeout_s: float
    observer: ConnectionObserver

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._has_partial_request = False  # a part of a request has arrived, and not its end
        self._open_cycles: deque[Any] = deque()  # uvicorn's cycles without a complete response; the first one runs
        self._is_draining = False
        self._keeps_alive = True  # whether the connection is kept after the response to the current request
        self._is_input_over = False  # what still arrives is dropped
        self._rejection: Rejection | None = None  # is sent after the responses of the open cycles
        self._is_lingering = False
        self._droppable_bytes = MAX_DROPPED_BYTES
        self._unsent_bytes = 0  # when the stall timer was set
        self._timers: dict[Timer, asyncio.TimerHandle] = {}  # those that run

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._cycle_transport = SimpleNamespace(  # what uvicorn's cycle uses of its transport; `close` may linger
            write=transport.write, is_closing=transport.is_closing, close=self._close_after_response
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.observer.remove(self)
        for timer in tuple(self._timers):
            self._cancel(timer)
        self._disconnect_cycles()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._open_cycles.popleft()
        if self._is_lingering:
            return
        super().on_response_complete()
        if self._has_partial_request or not self._open_cycles:
            self.observer.mark_idle(self)
        if self._rejection is not None and not self._open_cycles:
            self._send_rejection(self._rejection)

    def drain(self) -> None:
        """Close the connection after its next response, or now if it is idle after a response.

        A new connection stays open for its first request, which may be on its way.
        """
        self._is_draining, self._keeps_alive = True, False
        waits = self.cycle is None or (self.cycle.response_complete and self._has_partial_request)
        if not waits and not self._is_lingering:
            super().shutdown()

    def shutdown(self) -> None:
        self._keeps_alive = False
        if self._is_lingering:
            self.transport.close()
        else:
            super().shutdown()

    # Errors

    def _reject_request(self, rejection: Rejection) -> None:
        """End the input, and send an error in place of the response to the current request, if there is none yet."""
        self._cancel("deadline")
        if self._is_input_over or self.transport.is_closing():
            return
        self._is_input_over = True
        if not self._in_headers and not self._withdraw_cycle():
            self.transport.close()  # in the middle of a response
        elif self._open_cycles:
            self._rejection = rejection
        else:
            self._send_rejection(rejection)

    def _withdraw_cycle(self) -> bool:
        """Disconnect the application of the request whose body is incomplete. False if it has begun to respond."""
        cycle = self.cycle
        if cycle.response_started:
            return False
        self._open_cycles.pop()
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        _disconnect(cycle)
        return True

    def _send_rejection(self, rejection: Rejection) -> None:
        if self.transport.is_closing():
            return
        body = self.error_body(rejection.status, rejection.message)
        phrase = HTTPStatus(rejection.status).phrase
        head = f"HTTP/1.1 {rejection.status} {phrase}\r\ncontent-type: application/json\r\nconnection: close"
        self.transport.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        self._linger(MAX_DROPPED_BYTES)

    def _disconnect_cycles(self) -> None:
        """uvicorn disconnects only the newest cycle. The others would write to a transport that is closed."""
        for cycle in self._open_cycles:
            _disconnect(cycle)

    # Closing

    def _close_after_response(self) -> None:
        if self._has_partial_request:
            self._linger(MAX_DROPPED_BODY_BYTES)
        else:
            self.transport.close()

    def _linger(self, max_bytes: int) -> None:
        if self._is_lingering or self.transport.is_closing():
            return
        self._is_lingering = self._is_input_over = True
        self._droppable_bytes = max_bytes
        self._cancel("deadline")
        self._timers["linger"] = self.loop.call_later(LINGER_S, self.transport.abort)
        self._disconnect_cycles()
        self.pipeline.clear()
        if self.transport.can_write_eof():  # with TLS, the client closes the connection
            with contextlib.suppress(OSError):  # the client has reset the connection
                self.transport.write_eof()
        self.flow.resume_reading()
        self.observer.mark_idle(self)

    def _drop(self, size: int) -> None:
        self._droppable_bytes -= size
        if self._droppable_bytes < 0:
            self.transport.abort()

    def _cancel(self, timer: Timer) -> None:
        if handle := self._timers.pop(timer, None):
            handle.cancel()

    # Clients that do not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_stall_timer()

    def resume_writing(self) -> None:
        self._cancel("stall")
        super().resume_writing()

    def _set_stall_timer(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._timers["stall"] = self.loop.call_later(self.stall_timeout_s, self._on_stall_timer)

    def _on_stall_timer(self) -> None:
        """Disconnect a client that does not read. `close` would wait until it has read everything."""
        if self._unsent_bytes - self.transport.get_write_buffer_size() >= MIN_READ_BYTES:
            self._set_stall_timer()
            return
        log.warning("closed a connection: the client did not read for %.0f s", self.stall_timeout_s)
        self.transport.abort()


def _disconnect(cycle: Any) -> None:
    cycle.disconnected = True
    cycle.message_event.set()

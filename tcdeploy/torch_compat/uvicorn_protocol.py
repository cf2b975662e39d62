"""uvicorn's HTTP/1.1 protocol with limits, and with the server's error format.

uvicorn's own class reads a head of any size, and waits without a time limit for the rest of a request and for clients
that do not read a response, whose unsent part it keeps in memory. It uses chunked transfer encoding also for HTTP/1.0
clients, which do not support it. It parses up to 256 KiB in one call, which can contain thousands of pipelined
requests, headers or chunks, and it answers bytes that are not HTTP with plain text. The subclass relies on the parser
callbacks `on_message_begin`, `on_url`, `on_header`, `on_headers_complete`, `on_body` and `on_message_complete`, on
httptools' `on_chunk_header`, on `send_400_response`, on asyncio's `pause_writing` and `resume_writing`, and on the
attributes `scope`, `flow`, `cycle`, `pipeline`, `transport` and `loop`; of the cycle on `send`, `chunked_encoding` and
`expected_content_length`. It stops the parser with an exception in a callback. The subclass also puts three functions
into the ASGI scope's extensions.

If one of these names is missing, the server runs uvicorn's own protocol without limits, and warns.
tests/server/test_http.py and test_abuse.py fail when the class changes. server/http.py reads the extensions.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from tcdeploy.torch_compat.internal import Internal, find, mentions

PROTOCOL = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
CYCLE = "uvicorn.protocols.http.httptools_impl:RequestResponseCycle"
CALLBACKS = ("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete")
METHODS = (
    "connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing", "send_400_response",
    *CALLBACKS,
)  # fmt: skip
MAX_HEADER_BYTES = 64 << 10  # of the head, of the trailers, and (plus one packet) of chunk extensions
MAX_HEADER_LINES = 1000  # of head and trailers together
MAX_PIPELINED = 32  # requests that wait for the responses to earlier ones of their connection
MAX_TINY_CHUNKS, MIN_CHUNK_BYTES = 1024, 16  # a body may have more chunks if they are larger on average
CHUNK_FRAME_BYTES = 16  # estimate for a chunk's size and line breaks; chunk extensions count as trailers
MIN_READ_BYTES = 32 << 10  # that a client must read in each `stall_timeout_s` while more than 64 KiB are unsent
REQUEST_TIMEOUT_S = 30.0  # from the connection or the first byte of the next request; a running response extends it
ABORT, IS_WRITE_PAUSED, IS_BODY_RECEIVED = "tcdeploy.abort", "tcdeploy.is_write_paused", "tcdeploy.is_body_received"
log = logging.getLogger("tcdeploy.server")

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _Base
else:
    _Base = object  # `bounded_protocol` adds uvicorn's class, which only a server imports


def supported() -> bool:
    """True also if uvicorn is not imported, because such a process does not serve."""
    if "uvicorn" not in sys.modules:
        return True
    protocol = find(PROTOCOL)
    return (
        all(callable(getattr(protocol, name, None)) for name in METHODS)
        and mentions(protocol, "scope", "flow", "cycle", "transport", "loop", "pipeline", "response_complete")
        and hasattr(find("uvicorn.protocols.http.flow_control:FlowControl"), "pause_writing")
        and mentions(find(CYCLE), "chunked_encoding", "expected_content_length", "send")
    )


INTERNAL = Internal(
    "HTTP limits",
    "uvicorn",
    "HttpToolsProtocol",
    "request heads have no size limit and requests no time limit",
    supported,
)


def bounded_protocol(error_body: Callable[[int, str], bytes], stall_timeout_s: float) -> Any:
    """The protocol for uvicorn.Config(http=...); "auto", uvicorn's own choice, if the class is not supported.

    `error_body` makes the JSON of a response from status and message. A client that reads almost nothing of a response
    for `stall_timeout_s` is disconnected.
    """
    if not supported():
        return "auto"
    attributes = {"error_body": staticmethod(error_body), "stall_timeout_s": stall_timeout_s}
    return type("BoundedProtocol", (_Bounds, find(PROTOCOL)), attributes)


class _Bounds(_Base):
    """Closes a connection whose request exceeds a limit, or is not complete in time, with an error response."""

    error_body: Any  # (status, message) -> JSON
    stall_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._head_bytes = self._trailer_bytes = self._header_lines = 0  # of complete lines
        self._body_bytes = self._num_chunks = 0  # of the current request
        self._parsed_bytes = 0  # of the connection: lines, bodies, and frames of chunks
        self._unparsed_bytes = 0  # of the current request: received, but not counted in `_parsed_bytes`
        self._has_partial_request = False  # a part of a request has arrived, and not its end
        self._rejection: tuple[int, str, str] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0  # when the timer was set

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._cancel_stall_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_stall_timer()

    def resume_writing(self) -> None:
        self._cancel_stall_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._has_partial_request = True
        parsed_before = self._parsed_bytes
        super().data_received(data)
        if self._has_partial_request:  # most requests arrive whole and need no timer
            self._set_deadline()
        self._unparsed_bytes += len(data) - (self._parsed_bytes - parsed_before)
        if self._has_partial_request and self._unparsed_bytes > MAX_HEADER_BYTES:
            self._send_error_and_close(*_too_large("head" if self._in_headers else "trailers"))

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, or a rejected request. uvicorn also calls it after an exception in a callback."""
        self._send_error_and_close(*(self._rejection or (400, "Bad Request", "the request is not valid HTTP/1.1")))

    # Parser callbacks

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._reject(400, "Bad Request", f"more than {MAX_PIPELINED} requests are pipelined")
        super().on_message_begin()
        self._has_partial_request = True  # again, because the previous request may have ended in the same packet
        self._in_headers = True
        self._head_bytes = self._trailer_bytes = self._header_lines = 0
        self._body_bytes = self._num_chunks = self._unparsed_bytes = 0
        extensions = self.scope.setdefault("extensions", {})
        extensions[ABORT] = self.transport.abort  # type: ignore[typeddict-item,assignment]
        extensions[IS_WRITE_PAUSED] = lambda: self.flow.write_paused  # type: ignore[typeddict-item,assignment]
        extensions[IS_BODY_RECEIVED] = lambda: self._in_headers  # type: ignore[typeddict-item,assignment]

    def on_url(self, url: bytes) -> None:
        self._count_line(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a line of the head or of the trailers.

        Trailers are then dropped, because uvicorn would add them to the headers of a request that is being served.
        """
        self._count_line(len(name) + len(value) + 4)
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign,assignment]

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        self._parsed_bytes += CHUNK_FRAME_BYTES
        if self._num_chunks > MAX_TINY_CHUNKS + self._body_bytes // MIN_CHUNK_BYTES:
            self._reject(
                400, "Bad Request", f"the body has {self._num_chunks} chunks of less than {MIN_CHUNK_BYTES} bytes"
            )

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._parsed_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_headers, self._has_partial_request = True, False
        self._cancel_deadline()
        super().on_message_complete()

    def _count_line(self, size: int) -> None:
        self._parsed_bytes += size
        self._header_lines += 1
        if self._in_headers:
            self._head_bytes += size
        else:
            self._trailer_bytes += size
        if max(self._head_bytes, self._trailer_bytes) > MAX_HEADER_BYTES or self._header_lines > MAX_HEADER_LINES:
            self._reject(*_too_large("head" if self._in_headers else "trailers"))

    # Time limit and errors

    def _set_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._on_deadline)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._set_deadline()  # a response is being sent, and has its own time limit
        else:
            self._send_error_and_close(
                408, "Request Timeout", f"the request was not complete after {REQUEST_TIMEOUT_S:.0f} s"
            )

    def _set_stall_timer(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.stall_timeout_s, self._on_stall_timer)

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _on_stall_timer(self) -> None:
        """Disconnect a client that does not read. `close` would wait until it has read everything."""
        if self._unsent_bytes - self.transport.get_write_buffer_size() >= MIN_READ_BYTES:
            self._set_stall_timer()
            return
        log.warning("closed a connection: the client did not read for %.0f s", self.stall_timeout_s)
        self.transport.abort()

    def _reject(self, status: int, reason: str, message: str) -> NoReturn:
        """Stop the parser. uvicorn then calls `send_400_response`."""
        self._rejection = (status, reason, message)
        raise ValueError(message)

    def _send_error_and_close(self, status: int, reason: str, message: str) -> None:
        """Reject the current request with an error response; if one cannot be sent, only close the connection."""
        self._cancel_deadline()
        if self.transport.is_closing():
            return
        if self._can_respond():
            body = self.error_body(status, message)
            head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\nconnection: close"
            self.transport.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def _can_respond(self) -> bool:
        """Whether all earlier responses are complete and the current request's has not started.

        uvicorn creates a request's `cycle` when its head is complete.
        """
        if self.cycle is None:
            return True
        if self._in_headers:
            return self.cycle.response_complete
        return not self.pipeline and not self.cycle.response_started


def _without_chunks(cycle: Any) -> Callable[[Any], Any]:
    """A replacement for `cycle.send`. A body without a content length then ends where the connection is closed."""
    send, has_length = cycle.send, True

    async def send_without_chunks(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_without_chunks


def _too_large(part: str) -> tuple[int, str, str]:
    message = (
        f"the request's {part} must not exceed {MAX_HEADER_BYTES} bytes, and head and trailers together "
        f"{MAX_HEADER_LINES} lines"
    )
    return 431, "Request Header Fields Too Large", message

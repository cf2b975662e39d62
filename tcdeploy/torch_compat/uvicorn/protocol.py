"""uvicorn's HTTP/1.1 protocol with limits, and with the server's error format.

uvicorn's own class reads a head of any size, and waits without a time limit for the rest of a request and for clients
that do not read a response, whose unsent part it keeps in memory. It uses chunked transfer encoding also for HTTP/1.0
clients, which do not support it. It parses up to 256 KiB in one call, which can contain thousands of pipelined
requests, headers or chunks, and it answers bytes that are not HTTP with plain text. After an offer to upgrade the
connection (h2c of Java's HTTP client, WebSocket) it takes the body for the next request; here the offer is ignored, and
the request answered in HTTP/1.1 (RFC 9110, section 7.8).

`supported` has the names of uvicorn and httptools on which this module and torch_compat/uvicorn/closing.py rely. If one
of them is missing, the server runs uvicorn's own protocol without limits, and warns. tests/server/test_http.py and
test_abuse.py fail when the class changes. closing.py has the part that ends connections. The parser is stopped with an
exception in a callback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import Any, NoReturn

from tcdeploy.torch_compat.internal import find, internal, mentions
from tcdeploy.torch_compat.uvicorn.closing import Connection, ConnectionObserver, Rejection

PROTOCOL = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
CYCLE = "uvicorn.protocols.http.httptools_impl:RequestResponseCycle"
METHODS = (
    "connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing", "on_response_complete",
    "shutdown", "_unset_keepalive_if_required", "on_message_begin", "on_url", "on_header", "on_headers_complete",
    "on_body", "on_message_complete",
)  # fmt: skip
MAX_HEADER_BYTES = 64 << 10  # of the head, of the trailers, and (plus one packet) of chunk extensions
MAX_HEADER_LINES = 1000  # of head and trailers together
MAX_PIPELINED = 32  # requests that wait for the responses to earlier ones of their connection
MAX_TINY_CHUNKS, MIN_CHUNK_BYTES = 1024, 16  # a body may have more chunks if they are larger on average
CHUNK_FRAME_BYTES = 16  # estimate for a chunk's size and line breaks
REQUEST_TIMEOUT_S = 30.0  # from the connection or the first byte of the next request; a running response extends it
CONNECTION = "tcdeploy.connection"  # in the extensions of an ASGI scope: the protocol object


@internal("HTTP limits", "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol",
          "request heads have no size limit and requests no time limit")  # fmt: skip
def supported() -> bool:
    """True also if uvicorn is not imported, because such a process does not serve."""
    if "uvicorn" not in sys.modules:
        return True
    protocol = find(PROTOCOL)
    names = "scope url headers flow cycle transport loop pipeline parser response_complete should_upgrade feed_data"
    of_cycle = "send transport keep_alive disconnected message_event response_started chunked_encoding"
    return (
        all(callable(getattr(protocol, name, None)) for name in METHODS)
        and mentions(protocol, *names.split())
        and hasattr(find("uvicorn.protocols.http.flow_control:FlowControl"), "pause_writing")
        and mentions(find(CYCLE), *of_cycle.split(), "expected_content_length")
    )


def bounded_protocol(
    error_body: Callable[[int, str], bytes], stall_timeout_s: float, observer: ConnectionObserver
) -> Any:
    """The protocol for uvicorn.Config(http=...); "auto", uvicorn's own choice, if the class is not supported.
    `error_body` makes the JSON of a response from status and message. A client that reads almost nothing of a response
    for `stall_timeout_s` is disconnected.
    """
    if not supported():
        return "auto"
    import httptools

    attributes = {
        "error_body": staticmethod(error_body), "stall_timeout_s": stall_timeout_s, "observer": observer,
        "upgrade_offer": httptools.HttpParserUpgrade, "parser_error": httptools.HttpParserError,
    }  # fmt: skip
    return type("BoundedProtocol", (_Bounds, find(PROTOCOL)), attributes)


# These functions return a safe default under another server, or if uvicorn's class is not supported.


def abort(scope: MutableMapping[str, Any]) -> None:
    """Close the request's connection now; unsent data is lost."""
    if (connection := _connection(scope)) is not None:
        connection.transport.abort()


def is_write_paused(scope: MutableMapping[str, Any]) -> bool:
    """Whether `send` may wait because the client reads slowly."""
    connection = _connection(scope)
    return connection is None or connection.flow.write_paused


def is_body_received(scope: MutableMapping[str, Any]) -> bool:
    """Whether the whole body has arrived, so `receive` does not wait."""
    connection = _connection(scope)
    return connection is not None and connection._in_headers


def _connection(scope: MutableMapping[str, Any]) -> Connection | None:
    return scope.get("extensions", {}).get(CONNECTION)


class _Bounds(Connection):
    """Rejects a request that is not HTTP/1.1, exceeds a limit, or is not complete in time."""

    upgrade_offer: type[Exception]  # is raised by the parser after the head of a request that offers an upgrade
    parser_error: type[Exception]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._line_bytes = 0  # of complete lines of the current head or trailers
        self._num_lines = self._body_bytes = self._num_chunks = 0  # of the current request
        self._parsed_bytes = 0  # of the current packet: lines, bodies, and frames of chunks
        self._unparsed_bytes = 0  # of the current request: other bytes, such as incomplete lines and chunk extensions
        self._limit_error: Rejection | None = None
        self._head_without_offer = b""  # of a request that offers an upgrade, until it is parsed again

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        if self._is_input_over:
            self._drop(len(data))
            return
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._has_partial_request = True
        self._parsed_bytes = 0
        try:
            self._parse(data)
        except self.parser_error:  # also after an exception in a callback
            self._reject_request(self._limit_error or Rejection(400, "the request is not valid HTTP/1.1"))
            return
        self._unparsed_bytes += len(data) - self._parsed_bytes
        if self._has_partial_request:  # most requests arrive whole and need no timer
            self._set_deadline()
            if self._unparsed_bytes > MAX_HEADER_BYTES:
                self._reject_request(self._too_large())

    def _parse(self, data: bytes) -> None:
        """Call the parser. It stops after a head with an offer to upgrade, which a new parser gets without the offer:
        the old one accepts no request after `connection: upgrade, close`.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except self.upgrade_offer as stop:
                data = data[stop.args[0] :]
            self.parser = type(self.parser)(self)
            parsed_bytes, head, self._head_without_offer = self._parsed_bytes, self._head_without_offer, b""
            self.parser.feed_data(head)
            self._parsed_bytes = parsed_bytes

    # Parser callbacks

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parser(Rejection(400, f"more than {MAX_PIPELINED} requests are pipelined"))
        super().on_message_begin()
        self._has_partial_request = True  # again, because the previous request may have ended in the same packet
        self._in_headers = True
        self._line_bytes = self._num_lines = self._body_bytes = self._num_chunks = self._unparsed_bytes = 0
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[typeddict-item,dict-item]

    def on_url(self, url: bytes) -> None:
        self._count_line(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a line. Trailers are then dropped: uvicorn would add them to the headers of a request that is being
        served.
        """
        self._count_line(len(name) + len(value) + 4)
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request. Until its body is complete, a response announces that the connection will be closed."""
        if self.parser.should_upgrade():
            self._on_upgrade_offer()
            return
        super().on_headers_complete()
        self._in_headers, self._line_bytes = False, 0
        self._open_cycles.append(self.cycle)
        self.cycle.transport = self._cycle_transport  # type: ignore[assignment]
        self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive and not self._is_draining, False
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign,assignment]

    def _on_upgrade_offer(self) -> None:
        """Rebuild the head without the offer. The parser now calls `on_message_complete`, and then stops."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._stop_parser(Rejection(501, "CONNECT is not supported: this server is not a proxy"))
        request_line = b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())
        lines = [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self._head_without_offer = b"\r\n".join([request_line, *lines, b"\r\n"])

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        self._parsed_bytes += CHUNK_FRAME_BYTES
        if self._num_chunks > MAX_TINY_CHUNKS + self._body_bytes // MIN_CHUNK_BYTES:
            message = f"the body has {self._num_chunks} chunks of less than {MIN_CHUNK_BYTES} bytes"
            self._stop_parser(Rejection(400, message))

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._parsed_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._head_without_offer:
            return
        self._in_headers, self._has_partial_request = True, False
        self._cancel("deadline")
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
            self.observer.mark_busy(self)
        super().on_message_complete()

    def _count_line(self, size: int) -> None:
        self._line_bytes += size
        self._parsed_bytes += size
        self._num_lines += 1
        if self._line_bytes > MAX_HEADER_BYTES or self._num_lines > MAX_HEADER_LINES:
            self._stop_parser(self._too_large())

    def _too_large(self) -> Rejection:
        message = (
            f"the request's {'head' if self._in_headers else 'trailers'} must not exceed {MAX_HEADER_BYTES} bytes, and "
            f"head and trailers together {MAX_HEADER_LINES} lines"
        )
        return Rejection(431, message)

    def _stop_parser(self, rejection: Rejection) -> NoReturn:
        """End the current call of the parser, which raises `parser_error` for the exception."""
        self._limit_error = rejection
        raise ValueError(rejection.message)

    # Time limit

    def _set_deadline(self) -> None:
        if "deadline" not in self._timers:
            self._timers["deadline"] = self.loop.call_later(REQUEST_TIMEOUT_S, self._on_deadline)

    def _on_deadline(self) -> None:
        self._cancel("deadline")
        if self.cycle is not None and not self.cycle.response_complete:
            self._set_deadline()  # a response is being sent, and has its own time limit
        else:
            self._reject_request(Rejection(408, f"the request was not complete after {REQUEST_TIMEOUT_S:.0f} s"))


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

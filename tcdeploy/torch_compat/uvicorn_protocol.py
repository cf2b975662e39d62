"""uvicorn's HTTP/1.1 protocol with two limits: the size of a request's head, and the time until it is complete.

uvicorn's own class reads a head of any size and waits for the rest of a request without limit. The subclass relies on
the parser callbacks `on_message_begin`, `on_headers_complete` and `on_message_complete`, and on the attributes `scope`,
`flow`, `cycle`, `transport` and `loop`. It also puts three functions into the ASGI scope's extensions.

Without those names, the server runs uvicorn's own protocol without limits, and says so. tests/server/test_abuse.py
fails when the class changes. server/http.py reads the extensions.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tcdeploy.torch_compat.internal import Internal, find, mentions

PROTOCOL = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
CALLBACKS = ("on_message_begin", "on_headers_complete", "on_message_complete")
METHODS = ("connection_made", "connection_lost", "data_received", *CALLBACKS)
MAX_HEADER_BYTES = 64 << 10  # plus the rest of the packet that ends the head
REQUEST_TIMEOUT_S = 30.0  # from the connection or the first byte of the next request; a running response extends it
ABORT, IS_WRITE_PAUSED, IS_BODY_RECEIVED = "tcdeploy.abort", "tcdeploy.is_write_paused", "tcdeploy.is_body_received"

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
        and mentions(protocol, "scope", "flow", "cycle", "transport", "loop", "response_complete")
        and hasattr(find("uvicorn.protocols.http.flow_control:FlowControl"), "pause_writing")
    )


INTERNAL = Internal(
    "HTTP limits",
    "uvicorn",
    "HttpToolsProtocol",
    "request heads have no size limit and requests no time limit",
    supported,
)


def bounded_protocol(error_body: Callable[[int, str], bytes]) -> Any:
    """The protocol for uvicorn.Config(http=...); "auto", uvicorn's own choice, if the class is not supported.

    `error_body` makes the JSON of a response from status and message.
    """
    if not supported():
        return "auto"
    return type("BoundedProtocol", (_Bounds, find(PROTOCOL)), {"error_body": staticmethod(error_body)})


class _Bounds(_Base):
    """Closes a connection whose request head is too large, or whose request is not complete in time."""

    error_body: Any  # (status, message) -> JSON

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._in_headers = True
        self._has_partial_request = False  # a part of a request has arrived, and not its end
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
        self._has_partial_request = True
        super().data_received(data)
        if self._has_partial_request:  # most requests arrive whole and need no timer
            self._set_deadline()
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES:
            self._send_error_and_close(
                431, "Request Header Fields Too Large", f"the head is larger than {MAX_HEADER_BYTES} bytes"
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_partial_request = True  # the last request may have ended in the same packet
        extensions = self.scope.setdefault("extensions", {})
        extensions[ABORT] = self.transport.abort  # type: ignore[typeddict-item,assignment]
        extensions[IS_WRITE_PAUSED] = lambda: self.flow.write_paused  # type: ignore[typeddict-item,assignment]
        extensions[IS_BODY_RECEIVED] = lambda: self._in_headers  # type: ignore[typeddict-item,assignment]

    def on_headers_complete(self) -> None:
        self._in_headers, self._header_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers, self._has_partial_request = True, False
        self._cancel_deadline()
        super().on_message_complete()

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

    def _send_error_and_close(self, status: int, reason: str, message: str) -> None:
        """Reject with an error response. If a response is being sent, only close the connection."""
        if self.cycle is None or self.cycle.response_complete:
            body = self.error_body(status, message)
            head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\nconnection: close"
            self.transport.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

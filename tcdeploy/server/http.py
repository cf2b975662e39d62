"""uvicorn's HTTP/1.1 protocol with bounds: it reads a head of any size, and waits for the rest of a request for ever.

It subclasses uvicorn's own class; tests/server/test_abuse.py notices when that changes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tcdeploy.server.protocol import ApiError

MAX_HEADER_BYTES = 64 << 10  # and what else comes with its last packet
REQUEST_TIMEOUT_S = 30.0  # from the connection, or the first byte of the next request; longer where an answer runs
ABORT, IS_WRITE_PAUSED, IS_BODY_RECEIVED = "tcdeploy.abort", "tcdeploy.is_write_paused", "tcdeploy.is_body_received"


def abort(scope: MutableMapping[str, Any]) -> None:
    """End the connection of a request now; what was not sent is lost."""
    scope["extensions"][ABORT]()


def is_write_paused(scope: MutableMapping[str, Any]) -> bool:
    """Whether `send` may wait, because the client has much to read. Of another server's request nothing is known."""
    extension = scope.get("extensions", {}).get(IS_WRITE_PAUSED)
    return extension is None or bool(extension())


def is_body_received(scope: MutableMapping[str, Any]) -> bool:
    """Whether all of a request's body has come, so that `receive` does not wait. Of another server's: not known."""
    extension = scope.get("extensions", {}).get(IS_BODY_RECEIVED)
    return extension is not None and bool(extension())


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose next head is too large, or whose request does not come to its end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._in_headers = True
        self._has_partial_request = False  # some of a request has come, and not its end
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
        if self._has_partial_request:  # what comes whole, as most requests do, needs no timer
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
            self._set_deadline()  # whoever answers has a time-out of its own
        else:
            self._send_error_and_close(408, "Request Timeout", f"no whole request came in {REQUEST_TIMEOUT_S:.0f} s")

    def _send_error_and_close(self, status: int, reason: str, message: str) -> None:
        """An answer from before there is a request; not in the middle of another."""
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps(ApiError(status, message).body).encode()
            head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\nconnection: close"
            self.transport.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

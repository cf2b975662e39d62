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

MOST_HEAD_BYTES = 64 << 10  # and what else comes with its last packet
REQUEST_SECONDS = 30.0  # from the connection, or the first byte of the next request; longer where an answer runs
ABORT, IS_FULL, IS_WHOLE = "tcdeploy.abort", "tcdeploy.is_full", "tcdeploy.is_whole"


def abort(scope: MutableMapping[str, Any]) -> None:
    """End the connection of a request now; what was not sent is lost."""
    scope["extensions"][ABORT]()


def is_full(scope: MutableMapping[str, Any]) -> bool:
    """Whether `send` may wait, because the client has much to read. Of another server's request nothing is known."""
    asked = scope.get("extensions", {}).get(IS_FULL)
    return asked is None or bool(asked())


def is_whole(scope: MutableMapping[str, Any]) -> bool:
    """Whether all of a request's body has come, so that `receive` does not wait. Of another server's: not known."""
    asked = scope.get("extensions", {}).get(IS_WHOLE)
    return asked is not None and bool(asked())


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose next head is too large, or whose request does not come to its end."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head_bytes = 0
        self._is_in_head = True
        self._is_partial = False  # some of a request has come, and not its end
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
        self._is_partial = True
        super().data_received(data)
        if self._is_partial:  # what comes whole, as most requests do, needs no timer
            self._set_deadline()
        if self._is_in_head and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(431, "Request Header Fields Too Large", f"the head is larger than {MOST_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_partial = True  # the last request may have ended in the same packet
        extensions = self.scope.setdefault("extensions", {})
        extensions[ABORT] = self.transport.abort  # type: ignore[typeddict-item,assignment]
        extensions[IS_FULL] = lambda: self.flow.write_paused  # type: ignore[typeddict-item,assignment]
        extensions[IS_WHOLE] = lambda: self._is_in_head  # type: ignore[typeddict-item,assignment]

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head, self._is_partial = True, False
        self._drop_deadline()
        super().on_message_complete()

    def _set_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._set_deadline()  # whoever answers has a time-out of its own
        else:
            self._refuse(408, "Request Timeout", f"no whole request came in {REQUEST_SECONDS:.0f} s")

    def _refuse(self, status: int, reason: str, message: str) -> None:
        """An answer from before there is a request; not in the middle of another."""
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps(ApiError(status, message).body).encode()
            head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\nconnection: close"
            self.transport.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

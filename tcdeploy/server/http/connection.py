"""The server's HTTP/1.1 protocol, and the connection's state that it exposes to the application.

The protocol limits the size of a request's head, the time until a request is complete, and the time for which a client
does not read a response (torch_compat/uvicorn/protocol.py). It adds functions to the ASGI scope's extensions, which the
functions here read. Under another server, or if uvicorn's class is not supported, they return a safe default.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.settings import ServerSettings
from tcdeploy.torch_compat.uvicorn.closing import ConnectionObserver
from tcdeploy.torch_compat.uvicorn.protocol import ABORT, IS_BODY_RECEIVED, IS_WRITE_PAUSED, bounded_protocol


class _NoObserver:
    """For servers that accept connections without a limit."""

    def mark_idle(self, connection: Any) -> None: ...

    def mark_busy(self, connection: Any) -> None: ...

    def remove(self, connection: Any) -> None: ...


def http_protocol(
    stall_timeout_s: float = ServerSettings.stall_timeout, observer: ConnectionObserver | None = None
) -> Any:
    """The `http` argument of uvicorn.Config."""
    return bounded_protocol(_error_body, stall_timeout_s, observer or _NoObserver())


def _error_body(status: int, message: str) -> bytes:
    return json.dumps(ApiError(status, message).body).encode()


def abort(scope: MutableMapping[str, Any]) -> None:
    """Close the request's connection now; unsent data is lost. Does nothing under another server's protocol."""
    extension = scope.get("extensions", {}).get(ABORT)
    if extension is not None:
        extension()


def is_write_paused(scope: MutableMapping[str, Any]) -> bool:
    """Whether `send` may wait because the client reads slowly. True under another server's protocol."""
    extension = scope.get("extensions", {}).get(IS_WRITE_PAUSED)
    return extension is None or bool(extension())


def is_body_received(scope: MutableMapping[str, Any]) -> bool:
    """Whether the whole body has arrived, so `receive` does not wait. False under another server's protocol."""
    extension = scope.get("extensions", {}).get(IS_BODY_RECEIVED)
    return extension is not None and bool(extension())

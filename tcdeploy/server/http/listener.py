"""Accepts connections, and closes idle ones before the process runs out of file descriptors.

At its limit of connections, a new one replaces the one that has been idle for longest: one without a complete request,
one that is kept alive between two requests, or one in its TLS handshake. A connection whose complete request waits for
a response is never closed; admission control limits the number of these.

The socket is read here rather than by `loop.create_server`, which accepts all waiting connections in one call, knows
only connections whose TLS handshake has succeeded, and (in uvloop) stops listening after some errors of `accept`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.torch_compat.uvicorn.closing import ConnectionObserver
from tcdeploy.torch_compat.uvicorn.protocol import bounded_protocol

MAX_CONNECTIONS = 16_384  # an idle one takes 7 KiB
RESERVED_FILES = 256  # for all other files of the process; at most half of the limit
ACCEPTED_AT_ONCE = 64  # connections in one callback of the event loop
EVICTION_DIVISOR = 32  # at the limit, 1/32 of the connections are closed at once
MIN_IDLE_S = 0.05  # before a connection is closed for a new one
ACCEPT_RETRY_S = 0.1  # after an error of `accept`, or while no connection can be closed
HANDSHAKE_TIMEOUT_S = 30.0
LOG_INTERVAL_S = 60.0
log = logging.getLogger("tcdeploy.server")


def connection_limit() -> int:
    """Raise the process's limit of open files as far as useful, and return the connections that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - min(RESERVED_FILES, soft // 2)))


def http_protocol(stall_timeout_s: float, observer: ConnectionObserver) -> Any:
    """The `http` argument of uvicorn.Config. Its errors have the server's format."""

    def error_body(status: int, message: str) -> bytes:
        return json.dumps(ApiError(status, message).body).encode()

    return bounded_protocol(error_body, stall_timeout_s, observer)


class Listener:
    """Accepts and observes connections: asyncio protocols with the attribute `transport`."""

    def __init__(self, listening: socket.socket, max_connections: int) -> None:
        self.socket, self.port = listening, listening.getsockname()[1]
        self._max_connections = max_connections
        self._open: dict[Any, socket.socket] = {}
        self._idle: dict[Any, float] = {}  # a subset, with the time since which each is idle; the oldest comes first
        self._handshakes: set[asyncio.Task[None]] = set()
        self._is_accepting = self._is_closed = False
        self._num_evicted, self._next_log = 0, 0.0

    def start(self, new_connection: Callable[[], Any], tls: ssl.SSLContext | None) -> None:
        """Accept connections in the running event loop."""
        self._loop, self._new_connection, self._tls = asyncio.get_running_loop(), new_connection, tls
        self.socket.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop listening. Open connections stay open."""
        self._pause()
        self._is_closed = True
        self.socket.close()

    def mark_idle(self, connection: Any) -> None:
        if connection in self._open:
            self._idle.pop(connection, None)
            self._idle[connection] = self._loop.time()
            self._resume()

    def mark_busy(self, connection: Any) -> None:
        self._idle.pop(connection, None)

    def remove(self, connection: Any) -> None:
        self._idle.pop(connection, None)
        if self._open.pop(connection, None) is not None:
            self._resume()

    def _resume(self) -> None:
        if not self._is_accepting and not self._is_closed:
            self._is_accepting = True
            self._loop.add_reader(self.socket, self._accept)

    def _pause(self) -> None:
        """Stop accepting until a connection is closed or becomes idle. New ones wait in the socket's backlog."""
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self.socket)

    def _accept(self) -> None:
        if len(self._open) >= self._max_connections:
            self._make_room(max(1, self._max_connections // EVICTION_DIVISOR))
        for _ in range(min(ACCEPTED_AT_ONCE, self._max_connections - len(self._open))):
            try:
                accepted, _ = self.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no file descriptor or no memory is left
                self._make_room(1)
                return
            self._connect(accepted)

    def _connect(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connection = self._new_connection()
        self._open[connection] = accepted
        self._idle[connection] = self._loop.time()
        task = self._loop.create_task(self._attach(connection, accepted))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _attach(self, connection: Any, accepted: socket.socket) -> None:
        timeout_s = HANDSHAKE_TIMEOUT_S if self._tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # the TLS handshake failed; SSLError is an OSError
            accepted.close()
            self.remove(connection)

    def _make_room(self, count: int) -> None:
        """Close the connections that have been idle for longest, which resumes accepting. Those that became idle just
        now are kept: a request may have arrived that has not been read yet.
        """
        self._pause()
        self._loop.call_later(ACCEPT_RETRY_S, self._resume)
        newest = self._loop.time() - MIN_IDLE_S
        oldest = itertools.islice(self._idle.items(), count)
        for connection in [connection for connection, since in oldest if since <= newest]:
            del self._idle[connection]
            self._num_evicted += 1
            if connection.transport is not None:
                connection.transport.abort()
            else:  # in its TLS handshake
                with contextlib.suppress(OSError):
                    self._open[connection].shutdown(socket.SHUT_RDWR)
        if self._num_evicted and time.monotonic() > self._next_log:
            self._next_log = time.monotonic() + LOG_INTERVAL_S
            log.warning(
                "%d connections are open, the limit is %d: closed those that were idle for longest (%d so far)",
                len(self._open), self._max_connections, self._num_evicted,
            )  # fmt: skip

"""An HTTP proxy in front of a store that forwards requests, except those a test selects for a fault."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

HOP_HEADERS = ("connection", "transfer-encoding", "keep-alive", "content-length")


class Request(NamedTuple):
    method: str
    path: str
    body_bytes: int
    authorization: str


class FakeResponse(NamedTuple):
    """A fault: this response in place of the store's."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class Cut(NamedTuple):
    """A fault: the connection closes after `after` bytes of the body."""

    after: int


class Stall(NamedTuple):
    """A fault: no response until the client disconnects."""


class Drip(NamedTuple):
    """A fault: the body one byte at a time."""

    seconds: float


class NoContentLength(NamedTuple):
    """A fault: the body without Content-Length, followed by `more`."""

    more: bytes = b""


class Wait(NamedTuple):
    """Not a fault: holds requests until the barrier is full."""

    barrier: threading.Barrier


Fault = FakeResponse | Cut | Stall | Drip | NoContentLength | Wait
FaultSelector = Callable[[Request], Fault | None]


class Proxy(ThreadingHTTPServer):
    """Forwards requests one at a time, because moto fails if it stores a part while it aborts the part's upload."""

    daemon_threads = True

    def __init__(self, backend: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.backend = backend
        self.requests: list[Request] = []
        self.choose: FaultSelector = lambda request: None
        self.one_at_a_time = threading.Lock()
        self.closing = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def fail(self, fault: Fault, times: int = 10**6, method: str = "", path: str = "") -> None:
        """Apply the fault to the next requests with this method (any if empty) and this text in their path."""
        remaining = [times]

        def choose(request: Request) -> Fault | None:
            if remaining[0] == 0 or method not in ("", request.method) or path not in request.path:
                return None
            remaining[0] -= 1
            return fault

        self.requests.clear()
        self.choose = choose

    def count(self, method: str, path: str = "") -> int:
        return sum(request.method == method and path in request.path for request in self.requests)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore disconnected clients: these tests cause them."""


class Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, len(body), self.headers.get("Authorization") or "")
        self.server.requests.append(request)
        fault = self.server.choose(request)
        if isinstance(fault, Stall):
            self.server.closing.wait(20)
            self.close_connection = True
        elif isinstance(fault, FakeResponse):
            self.answer(fault.status, list(fault.headers), fault.body, len(fault.body))
        elif isinstance(fault, Wait):
            fault.barrier.wait(20)
            self.forward(body, None)
        else:
            self.forward(body, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = serve  # noqa: N815

    def forward(self, body: bytes, fault: Fault | None) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.backend, timeout=20)
        headers = {key: value for key, value in self.headers.items() if key.lower() not in HOP_HEADERS}
        with self.server.one_at_a_time, contextlib.closing(connection):
            connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            response = connection.getresponse()
            length = response.getheader("Content-Length")
            headers_to_forward = [
                (key, value) for key, value in response.getheaders() if key.lower() not in HOP_HEADERS
            ]
            content = response.read()
        if isinstance(fault, NoContentLength):
            self.answer(response.status, headers_to_forward, content + fault.more, None)
            return
        pieces: Iterator[bytes] = iter([content])
        if isinstance(fault, Cut):
            pieces = iter([content[: fault.after]])
        elif isinstance(fault, Drip):
            pieces = self.drip(content, fault.seconds)
        self.answer(response.status, headers_to_forward, pieces, int(length or len(content)))
        if isinstance(fault, Cut):
            self.close_connection = True

    def drip(self, content: bytes, seconds: float) -> Iterator[bytes]:
        for position in range(len(content)):
            if self.server.closing.is_set():
                return
            time.sleep(seconds)
            yield content[position : position + 1]

    def answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes | Iterator[bytes], length: int | None
    ) -> None:
        self.send_response_only(status)
        for key, value in headers:
            self.send_header(key, value)
        if length is None:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            for piece in [content] if isinstance(content, bytes) else content:
                self.wfile.write(piece)
                self.wfile.flush()

    def log_message(self, format: str, *arguments: object) -> None:
        """Do not log: tests read `requests`."""


@contextlib.contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        if isinstance(server, Proxy):
            server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def proxy(backend: int) -> Iterator[Proxy]:
    server = Proxy(backend)
    with served(server):
        yield server

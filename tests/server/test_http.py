"""Heads, trailers, chunks and lengths that the HTTP protocol refuses: at once, with an error object, and without leaks.

The application runs in this process, without a model.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from tcdeploy.engine.schedule.scheduler import SchedulerStats
from tcdeploy.server.api import make_app
from tcdeploy.server.generate.admission import Admission
from tcdeploy.server.http.listener import http_protocol
from tcdeploy.server.service import ServerState
from tcdeploy.server.settings import ServerSettings

BODY = b'{"prompt": "a"}'
MAX_SECONDS = 3.0


class FakeEngineThread:
    failure, canary, stats = None, None, SchedulerStats(0, 0, 0, 0, 0)


class Unobserved:
    """No connection is closed in favour of a new one."""

    def mark_idle(self, connection: Any) -> None: ...

    def mark_busy(self, connection: Any) -> None: ...

    def remove(self, connection: Any) -> None: ...


class RunningServer:
    """A server of an application whose model is loading: a valid completion is answered with 503."""

    def __init__(
        self, app: Any = None, loop_factory: Any = None, tls: tuple[str, str] = ("", ""), stall_timeout_s: float = 30.0
    ) -> None:
        """`loop_factory`: None for asyncio's event loop. `tls`: certificate and key."""
        engine_thread: Any = FakeEngineThread()
        app = app or make_app(ServerState(ServerSettings(model="tiny"), engine_thread, Admission(1)))
        self.headers: list[tuple[bytes, bytes]] = []

        async def recorded(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)
            self.headers = list(scope["headers"])

        http = http_protocol(stall_timeout_s, Unobserved())
        config = uvicorn.Config(
            recorded, interface="asgi3", http=http, ws="none", lifespan="off", log_config=None,
            ssl_certfile=tls[0] or None, ssl_keyfile=tls[1] or None,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run, args=[loop_factory], daemon=True)
        self._thread.start()

    def _run(self, loop_factory: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            self._loop = runner.get_loop()
            runner.run(self.server.serve([self._listener]))

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the server's event loop."""
        self._loop.call_soon_threadsafe(function)

    def exchange(self, *packets: bytes) -> tuple[int, bytes, float]:
        """Send the packets. Returns the status, the body of the first response, and the seconds until it came."""
        with self.connect() as connection:
            start = time.monotonic()
            for packet in packets:
                connection.sendall(packet)
                time.sleep(0.02 if len(packets) > 1 else 0)
            received = b""
            while not received.endswith(b"}"):
                part = connection.recv(1 << 16)
                if not part:
                    break
                received += part
            head, _, body = received.partition(b"\r\n\r\n")
            return int(head.split()[1]) if head else 0, body, time.monotonic() - start

    def connect(self) -> socket.socket:
        return socket.create_connection(self._listener.getsockname(), timeout=20)

    def wait_until_closed(self) -> None:
        deadline = time.monotonic() + 5
        while self.server.server_state.connections or self.server.server_state.tasks:
            assert time.monotonic() < deadline, "connections or tasks are left"
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(10)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer()
    yield running
    running.stop()


def post(*lines: str, body: bytes = BODY) -> bytes:
    length = (
        [] if any("coding" in line or "content-length" in line for line in lines) else [f"content-length: {len(body)}"]
    )
    return "\r\n".join(["POST /v1/completions HTTP/1.1", "host: x", *length, *lines]).encode() + b"\r\n\r\n" + body


def chunked(*chunks: bytes, trailers: bytes = b"", extension: bytes = b"") -> bytes:
    content = b"".join(b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    return post("transfer-encoding: chunked", body=content + b"0\r\n" + trailers + b"\r\n")


def check_refusal(server: RunningServer, status: int, *packets: bytes) -> None:
    actual, body, seconds = server.exchange(*packets)
    assert actual == status, (actual, body[:200])
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert seconds < MAX_SECONDS
    server.wait_until_closed()


def test_a_request_within_the_limits_reaches_the_application(server: RunningServer) -> None:
    for request in (
        post(), post("x: " + "a" * 60_000), post(*[f"h{number}: v" for number in range(900)]), chunked(BODY),
        chunked(*(BODY[at : at + 1] for at in range(len(BODY)))), chunked(BODY, trailers=b"t: v\r\n" * 90),
        chunked(BODY, extension=b";a=b"), post() * 20,
    ):  # fmt: skip
        status, body, _ = server.exchange(request)
        assert status == 503 and b'"loading"' in body, (status, body, request[:200])


@pytest.mark.parametrize(
    "request_bytes",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"BREW /\r\n\r\n", post("content-length: -1"),
     post("content-length: 18446744073709551616"), post("content-length: 1", "content-length: 2"),
     post("content-length: 15", "transfer-encoding: chunked"), b"GET http://[:: HTTP/1.1\r\n\r\n",
     post("transfer-encoding: chunked", body=b"xyz\r\n")],
    ids=lambda request: repr(request[-24:]),
)  # fmt: skip
def test_bytes_that_are_not_http_get_an_error_object(server: RunningServer, request_bytes: bytes) -> None:
    check_refusal(server, 400, request_bytes)


@pytest.mark.parametrize("is_split", [False, True], ids=["one packet", "two packets"])
@pytest.mark.parametrize(
    "request_bytes",
    [
        post("x: " + "a" * 70_000), post(*["x: " + "a" * 500] * 140), post(*["a: b"] * 1100),
        post().replace(b"/v1/completions", b"/" + b"a" * 70_000),
        chunked(BODY, trailers=b"t: " + b"v" * 120_000 + b"\r\n"), chunked(BODY, trailers=b"t: vvvvvvvv\r\n" * 10_000),
        chunked(BODY, extension=b";x=" + b"y" * 600_000),
        chunked(*[BODY] * 200, extension=b";x=" + b"y" * 6_000),
    ],
    ids=["line", "lines", "short lines", "path", "trailer", "trailers", "extension", "extensions"],
)  # fmt: skip
def test_a_head_or_trailers_over_the_limit_are_431(server: RunningServer, request_bytes: bytes, is_split: bool) -> None:
    packets = [request_bytes[:40_000], request_bytes[40_000:]] if is_split else [request_bytes]
    check_refusal(server, 431, *packets)


def test_trailers_do_not_become_headers(server: RunningServer) -> None:
    server.exchange(chunked(BODY[:5], BODY[5:], trailers=b"x-request-id: of the trailer\r\n"))
    time.sleep(0.05)
    assert dict(server.headers)[b"host"] == b"x" and b"x-request-id" not in dict(server.headers)


def test_thousands_of_tiny_chunks_are_400(server: RunningServer) -> None:
    check_refusal(server, 400, chunked(*[b" "] * 5000))


def test_thousands_of_pipelined_requests_close_the_connection(server: RunningServer) -> None:
    server.exchange(b"GET /version HTTP/1.1\r\n\r\n" * 5000)
    server.wait_until_closed()
    assert server.server.server_state.total_requests < 5000


@pytest.mark.parametrize("length", [2**63 - 1, 8 * 2**20 + 1])
def test_a_length_over_the_limit_is_413_before_the_body_arrives(server: RunningServer, length: int) -> None:
    check_refusal(server, 413, post(f"content-length: {length}", body=b""))


RESPONSE_BYTES = 20 << 20  # more than the kernel's buffers


async def large_response(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", str(RESPONSE_BYTES).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(RESPONSE_BYTES)})


@pytest.fixture(scope="module")
def large_response_server() -> Iterator[RunningServer]:
    running = RunningServer(large_response, stall_timeout_s=0.5)
    yield running
    running.stop()


@pytest.mark.parametrize(
    "request_bytes", [post(), post("connection: close"), post() * 3], ids=["one", "close", "three"]
)
def test_a_client_that_does_not_read_a_response_is_disconnected(
    large_response_server: RunningServer, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The response is complete for the application, so that only the protocol can release its memory."""
    with large_response_server.connect() as connection:
        connection.sendall(request_bytes)
        assert connection.recv(1) == b"H"
        large_response_server.wait_until_closed()
    assert "the client did not read for" in caplog.text


def test_a_client_that_reads_slowly_gets_the_whole_response() -> None:
    """It takes several times the limit, which is five pauses long, because a busy machine may lengthen one."""
    running, received = RunningServer(large_response, stall_timeout_s=1.5), 0
    with running.connect() as connection:
        connection.sendall(post("connection: close"))
        while part := connection.recv(1 << 20, socket.MSG_WAITALL):
            received += len(part)
            time.sleep(0.3)
    running.stop()
    assert received > RESPONSE_BYTES


async def streamed_response(scope: Any, receive: Any, send: Any) -> None:
    """The headers of the path /known announce the length of the body."""
    headers = [(b"content-length", b"6")] if scope["path"] == "/known" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in (b"one", b"two"):
        await send({"type": "http.response.body", "body": part, "more_body": part == b"one"})


@pytest.fixture(scope="module")
def streaming_server() -> Iterator[RunningServer]:
    running = RunningServer(streamed_response)
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("request_line", "header", "body"),
    [
        ("GET / HTTP/1.1", b"transfer-encoding: chunked", b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"),
        ("GET / HTTP/1.0", None, b"onetwo"),
        ("GET /known HTTP/1.0", b"content-length: 6", b"onetwo"),
        ("HEAD / HTTP/1.0", None, b""),
    ],
)
def test_a_client_of_http_1_0_gets_no_chunks(
    streaming_server: RunningServer, request_line: str, header: bytes | None, body: bytes
) -> None:
    with streaming_server.connect() as connection:
        connection.sendall(f"{request_line}\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    head, _, content = received.partition(b"\r\n\r\n")
    framing = [line for line in head.split(b"\r\n") if line.startswith((b"transfer-encoding", b"content-length"))]
    assert (framing, content) == ([header] if header else [], body)

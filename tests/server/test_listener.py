"""The limit of connections: which ones are closed for a new client. The application runs in this process."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from tcdeploy.server.http import listener as listener_module
from tcdeploy.server.http.listener import MAX_CONNECTIONS, RESERVED_FILES, Listener, http_protocol
from tests.server.conftest import wait_for
from tests.server.test_server_options import make_certificate

LIMIT = 8
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/slow":
        await asyncio.sleep(1)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class LimitedServer:
    """A server with at most LIMIT connections."""

    def __init__(self, loop_factory: Any, certificate: str | None = None, key: str | None = None) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.listener = Listener(self._socket, LIMIT)
        self.port = self.listener.port
        self.config = uvicorn.Config(
            app, interface="asgi3", http=http_protocol(30.0, self.listener), ws="none", lifespan="off",
            log_config=None, ssl_certfile=certificate, ssl_keyfile=key,
        )  # fmt: skip
        self.config.load()
        self.server = uvicorn.Server(self.config)
        self._thread = threading.Thread(target=self._run, args=[loop_factory], daemon=True)
        self._thread.start()

    def _run(self, loop_factory: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        new_connection: Any = self.config.http_protocol_class
        self.listener.start(
            lambda: new_connection(self.config, self.server.server_state, app_state={}), self.config.ssl
        )
        await self.server.serve(sockets=[])
        self.listener.close()

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(sent)
        return connection

    def wait_until_empty(self) -> None:
        """Wait until the listener has no connection left.

        The task of a handshake is removed by a callback, after its connection.
        """
        listener = self.listener
        wait_for(lambda: not (listener._open or listener._idle or listener._handshakes))

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(10)


@pytest.fixture(params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LimitedServer]:
    running = LimitedServer(request.param)
    yield running
    running.stop()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
        return False
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


IDLE = {
    "silent": b"", "half a head": b"GET / HTTP/1.1\r\nhost",
    "half a body": b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n{",
    "kept alive": GET, "half a second head": GET + b"GET / HT",
}  # fmt: skip


@pytest.mark.parametrize("sent", IDLE.values(), ids=IDLE)
def test_the_oldest_idle_connection_is_closed_for_a_new_one(
    server: LimitedServer, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack:
        idle = []
        for _ in range(LIMIT):
            idle.append(stack.enter_context(server.connect(sent)))
            time.sleep(0.02)
        for number in range(3):
            new = stack.enter_context(server.connect(GET))
            assert new.recv(100).startswith(b"HTTP/1.1 200"), number
        time.sleep(0.05)
        assert [is_open(connection) for connection in idle] == [False] * 3 + [True] * (LIMIT - 3)
    assert f"{LIMIT} connections are open, the limit is {LIMIT}" in caplog.text
    lines = [record for record in caplog.records if record.name == "tcdeploy.server"]
    assert len(lines) == 1, "one line per minute"


def test_a_connection_that_waits_for_its_response_is_not_closed(server: LimitedServer) -> None:
    """New clients wait in the backlog until one is free."""
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(server.connect(GET.replace(b"/", b"/slow", 1))) for _ in range(LIMIT)]
        time.sleep(0.2)
        start = time.monotonic()
        new = [stack.enter_context(server.connect(GET)) for _ in range(LIMIT)]
        assert all(connection.recv(100).startswith(b"HTTP/1.1 200") for connection in new)
        assert 0.3 < time.monotonic() - start < 8
        assert all(connection.recv(100).startswith(b"HTTP/1.1 200") for connection in busy)


def test_an_idle_connection_becomes_the_newest_when_it_is_used(server: LimitedServer) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(server.connect(GET)) for _ in range(LIMIT)]
        assert all(connection.recv(100) for connection in idle)
        idle[0].sendall(GET)
        assert idle[0].recv(100)
        assert stack.enter_context(server.connect(GET)).recv(100)
        time.sleep(0.05)
        assert [is_open(connection) for connection in idle] == [True, False, *[True] * (LIMIT - 2)]


def test_thousands_of_connections_leave_no_trace(server: LimitedServer) -> None:
    for _ in range(20):
        with contextlib.ExitStack() as stack:
            for number in range(2 * LIMIT):
                stack.enter_context(server.connect(list(IDLE.values())[number % len(IDLE)]))
    server.wait_until_empty()


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_tls_handshake_counts_as_idle(loop_factory: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate, key = make_certificate(tmp_path)
    running = LimitedServer(loop_factory, certificate, key)
    context = ssl.create_default_context(cafile=certificate)
    with contextlib.ExitStack() as stack:
        for sent in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello") * LIMIT:
            with contextlib.suppress(ConnectionError):
                stack.enter_context(running.connect(sent))
        for _ in range(3):
            with context.wrap_socket(running.connect(), server_hostname="127.0.0.1") as connection:
                connection.sendall(GET)
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
    running.wait_until_empty()
    assert [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"] == []
    running.stop()


def test_an_error_of_accept_closes_an_idle_connection_and_is_tried_again(
    server: LimitedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has used its file descriptors for something else. It must neither spin nor stop listening."""
    calls = 0

    class FullSocket:
        def fileno(self) -> int:
            return working.fileno()

        def accept(self) -> Any:
            nonlocal calls
            calls += 1
            raise OSError(24, "Too many open files")

    monkeypatch.setattr(listener_module, "ACCEPT_RETRY_S", 0.1)
    with server.connect(GET) as idle:
        assert idle.recv(100)
        working: Any = server.listener.socket
        server.listener.socket = FullSocket()  # type: ignore[assignment]
        with server.connect(GET) as new:
            time.sleep(0.5)
            assert 2 <= calls <= 12 and not is_open(idle)
            server.listener.socket = working
            assert new.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [(64, 4096, 4096, 4096 - RESERVED_FILES), (64, 128, 128, 64), (1024, 20_000, None, MAX_CONNECTIONS), (8, 8, 8, 4)],
)
def test_the_limit_of_open_files_is_raised_and_leaves_room_for_other_files(
    soft: int, hard: int, raised: int | None, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert listener_module.connection_limit() == connections
    assert limits[-1] == (raised or MAX_CONNECTIONS + RESERVED_FILES, hard)


def test_the_limit_of_a_real_process_is_raised() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 600));"
        "from tcdeploy.server.http.listener import connection_limit;"
        "print(connection_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "344 (600, 600)"

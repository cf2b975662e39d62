"""Offers to upgrade, bytes after a request, early responses and disconnects: what a client gets, on both event loops.

The application runs in this process. It answers with the length of the body; the path /refuse is answered before the
body is read, and /slow after 0.1 s.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tcdeploy.server.http.listener import Listener
from tcdeploy.torch_compat.uvicorn import closing
from tests.server.test_http import BODY, RunningServer, post
from tests.server.test_server_options import make_certificate

H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")
GARBAGE = b"\r\n\x16\x03\x01"
disconnected: list[str] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    length, message = 0, {"more_body": scope["path"] != "/refuse"}
    while message.get("more_body"):
        message = await receive()
        length += len(message.get("body", b""))
    if scope["path"] == "/slow":
        await asyncio.sleep(0.1)
        if (waiting := asyncio.ensure_future(receive())) in (await asyncio.wait({waiting}, timeout=0))[0]:
            disconnected.append(waiting.result()["type"])
    content = json.dumps({"length": length, "path": scope["path"], "method": scope["method"]}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]})
    await send({"type": "http.response.body", "body": content})


@pytest.fixture(scope="module", params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    running = RunningServer(app, request.param)
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def no_errors_are_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"] == []


def request(path: str = "/", *lines: str, body: bytes = BODY) -> bytes:
    return post(*lines, body=body).replace(b"/v1/completions", path.encode(), 1)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    return received


def talk(server: RunningServer, *packets: bytes, end: bytes = request("/end", "connection: close")) -> list[Any]:
    """Send the packets and `end`. Returns the responses: their content, or the status of an error."""
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for packet in (*packets, end):
            connection.sendall(packet)
            time.sleep(0.03 if len(packets) > 1 else 0)
        return responses(read_all(connection))


def responses(received: bytes) -> list[Any]:
    results: list[Any] = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        if b" 100 " in head:
            results.append(100)
            continue
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        status, content, received = int(head.split()[1]), json.loads(received[:length]), received[length:]
        results.append((content["path"], content["length"]) if status == 200 else status)
    return results


CHUNKED = request("/c", "transfer-encoding: chunked", *H2C, body=b"f\r\n" + BODY + b"\r\n0\r\n\r\n")
WEBSOCKET = ("connection: keep-alive, Upgrade", "upgrade: websocket", "sec-websocket-version: 13")
ANSWERED = [("/u", len(BODY)), ("/end", len(BODY))]


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET, ("upgrade: TLS/1.0, h2c", "connection: Upgrade"), H2C[::-1]])
def test_an_offer_to_upgrade_is_ignored(server: RunningServer, offer: tuple[str, ...]) -> None:
    whole = request("/u", *offer)
    at = len(whole) - len(BODY)
    assert talk(server, whole) == ANSWERED, "in one packet with its body and the next request"
    assert talk(server, whole[:at], whole[at:]) == ANSWERED, "the body comes later"
    assert talk(server, whole[:20], whole[20:60], whole[60 : at + 3], whole[at + 3 :]) == ANSWERED
    assert talk(server, whole * 3) == [ANSWERED[0]] * 3 + [ANSWERED[1]], "pipelined"


def test_an_offer_to_upgrade_is_ignored_with_any_framing(server: RunningServer) -> None:
    assert talk(server, CHUNKED) == [("/c", len(BODY)), ("/end", len(BODY))]
    assert talk(server, CHUNKED[:-12], CHUNKED[-12:]) == [("/c", len(BODY)), ("/end", len(BODY))]
    whole = request("/u", "expect: 100-continue", *H2C)
    assert talk(server, whole[: -len(BODY)], BODY) == [100, *ANSWERED]
    get = b"GET /g HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n\r\n"
    assert talk(server, get, end=b"") == [("/g", 0)]
    old = get.replace(b"HTTP/1.1", b"HTTP/1.0")
    assert talk(server, old, end=b"") == [("/g", 0)]


@pytest.mark.parametrize("lines", [("connection: upgrade",), ("upgrade: h2c",), ("http2-settings: AAMAAABk",)])
def test_a_part_of_an_offer_is_ignored(server: RunningServer, lines: tuple[str, ...]) -> None:
    assert talk(server, request("/u", *lines)) == ANSWERED


def test_a_head_with_an_offer_has_the_same_limits(server: RunningServer) -> None:
    assert talk(server, request("/u", *H2C, "x: " + "a" * 60_000)) == ANSWERED
    assert talk(server, request("/u", *H2C, "x: " + "a" * 70_000), end=b"") == [431]
    assert talk(server, request("/u", *H2C) * 50, end=b"")[-1] == 400


@pytest.mark.parametrize(
    ("start", "status"),
    [(b"CONNECT a.example:443 HTTP/1.1\r\nhost: a\r\n\r\n", 501), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400)],
)
def test_connect_and_the_preface_of_http_2_are_errors(server: RunningServer, start: bytes, status: int) -> None:
    assert talk(server, start, end=b"") == [status]
    assert talk(server, request("/u"), start, end=b"") == [ANSWERED[0], status]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("garbage", [GARBAGE, b"GET http://[:: HTTP/1.1\r\n\r\n"])
def test_requests_before_garbage_are_answered(server: RunningServer, count: int, garbage: bytes) -> None:
    requests, answered = request("/slow") * count, [("/slow", len(BODY))] * count
    assert talk(server, requests + garbage, end=b"") == [*answered, 400]
    assert talk(server, requests, garbage, end=b"") == [*answered, 400]
    assert talk(server, requests, garbage, b"more" * 1000, end=b"") == [*answered, 400]


def test_a_broken_body_replaces_only_its_own_response(server: RunningServer) -> None:
    broken = request("/u", "transfer-encoding: chunked", body=b"xyz\r\n")
    assert talk(server, broken, end=b"") == [400]
    assert talk(server, request("/slow") * 2 + broken, end=b"") == [("/slow", len(BODY))] * 2 + [400]
    server.wait_until_closed()


def test_a_disconnect_ends_all_pipelined_requests(server: RunningServer) -> None:
    """uvicorn disconnects only the newest one. The others wrote to a closed transport, for which uvloop raises."""
    disconnected.clear()
    with server.connect() as connection:
        connection.sendall(request("/slow") * 3)
        time.sleep(0.05)
    server.wait_until_closed()
    assert disconnected == ["http.disconnect"]


LARGE = 30 << 20


@pytest.mark.parametrize("lines", [(), ("connection: close",)], ids=["keep-alive", "close"])
@pytest.mark.parametrize("framing", ["length", "chunked", "HTTP/1.0"])
def test_an_early_response_arrives_although_the_body_is_large(
    server: RunningServer, framing: str, lines: tuple[str, ...]
) -> None:
    """Without a lingering close, the kernel resets the connection while the client sends."""
    if framing == "chunked":
        chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        sent = request("/refuse", "transfer-encoding: chunked", *lines, body=chunk * 30 + b"0\r\n\r\n")
    else:
        sent = request("/refuse", *lines, body=b"x" * LARGE)
    if framing == "HTTP/1.0":
        sent = sent.replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with server.connect() as connection:
        connection.sendall(sent)  # raises ConnectionResetError
        received = read_all(connection)
    assert responses(received) == [("/refuse", 0)]
    assert b"connection: close" in received, "the client must not reuse a connection whose body is dropped"
    server.wait_until_closed()


def test_the_bytes_and_the_time_of_a_lingering_close_are_limited(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "LINGER_S", 0.3)
    with server.connect() as connection:
        connection.sendall(request("/refuse", "content-length: 99"))
        assert b" 200 " in read_all(connection)
        start = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() < start + 10:
                connection.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - start < 5
    monkeypatch.setattr(closing, "LINGER_S", 30.0)
    with server.connect() as connection, pytest.raises(ConnectionError):
        connection.sendall(b"\x00" + b"x" * (64 << 20))


def test_a_lingering_connection_is_closed_when_the_server_drains(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(request("/refuse", "content-length: 99"))
        assert b" 200 " in read_all(connection)
        assert server.server.server_state.connections
        for protocol in list(server.server.server_state.connections):
            server.call(protocol.shutdown)
        server.wait_until_closed()


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_over_tls_the_client_gets_the_early_response_too(loop_factory: Any, tmp_path: Path) -> None:
    """TLS connections cannot be half-closed, so the client closes them."""
    certificate, key = make_certificate(tmp_path)
    running = RunningServer(app, loop_factory, tls=(certificate, key))
    context = ssl.create_default_context(cafile=certificate)
    with context.wrap_socket(running.connect(), server_hostname="127.0.0.1") as connection:
        connection.sendall(request("/refuse", body=b"x" * LARGE))
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(1 << 16)
        assert responses(received) == [("/refuse", 0)]
    running.wait_until_closed()
    running.stop()


def test_the_listener_is_an_observer() -> None:
    """The names that Connection calls; test_listener.py tests what they do."""
    observed = closing.ConnectionObserver.__dict__
    names = {name for name in observed if name.startswith(("mark", "remove"))}
    assert names == {"mark_idle", "mark_busy", "remove"} and all(hasattr(Listener, name) for name in names)

"""Raw HTTP: valid and broken requests with upgrade offers, encodings and any framing, cut and pipelined at random.

Each attack sends one to five requests on a connection. Its expected responses are known: the hash of the content, or
the status of an error. The bytes are cut into packets at random places. Broken bytes may follow the last request, and
some clients disconnect early. An attack succeeds if a response differs, if the server logs an error, or if a connection
or a task is left. The protocol, the decompression and the error responses are the server's own; the application answers
with a hash. Attacks alternate between asyncio's event loop and uvloop.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import logging
import random
import socket
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import uvloop
import zstandard
from starlette.requests import Request
from starlette.responses import JSONResponse

from tcdeploy.server.generate.admission import Admission, BodyReservation
from tcdeploy.server.http.middleware import error_response
from tcdeploy.server.http.request_body import read_decoded_body
from tests.server.test_http import RunningServer

DEFAULT_COUNT = 5_000
MAX_BODY_BYTES = 64 << 10
ENCODERS: dict[str, Any] = {
    "gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes,
    "zstd": zstandard.ZstdCompressor().compress,
}  # fmt: skip
OFFERS = [
    ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"],
    ["connection: keep-alive, upgrade", "upgrade: websocket", "sec-websocket-key: x"], ["Connection: upgrade"],
    ["Upgrade: h2c"], ["upgrade: a, b/1", "upgrade: c", "CONNECTION: UPGRADE"], ["HTTP2-Settings: x"],
]  # fmt: skip
BROKEN = [
    b"\r\n\x16\x03", b"\x00", b"GARBAGE\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"GET http://[:: HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", b"GET / HTTP/1.1\r\n bad: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
]  # fmt: skip


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Responds with the hash of the decompressed body, or an error; the path /refuse without reading the body."""
    response: Any
    try:
        body: bytes | bytearray = b""
        if scope["path"] != "/refuse":
            with BodyReservation(Admission(1)) as reservation:
                body = await read_decoded_body(Request(scope, receive), MAX_BODY_BYTES, reservation)
        response = JSONResponse({"hash": hashlib.sha256(body).hexdigest()})
    except Exception as error:
        response = error_response(error, scope["path"])
    await response(scope, receive, send)


class Attack(NamedTuple):
    data: bytes
    expected: list[str | int]  # hashes and statuses of errors
    early: list[int]  # indices of responses that may come before the body, and then close the connection
    disconnects: bool  # before the responses are read


def attack(source: random.Random) -> Attack:
    data, expected, early = b"", list[str | int](), list[int]()
    for index in range(source.randint(1, 5)):
        request, result = _request(source)
        data += request
        expected.append(result)
        if request.startswith(b"POST /refuse") or result == 415:
            early.append(index)
    kind = source.randrange(4)
    if kind == 0:
        data += source.choice(BROKEN) + source.randbytes(source.choice([0, 10, 3000]))
        expected.append(400)
    elif kind == 1:
        data += b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n"
        expected.append(501)
    else:
        data += b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n"
        expected.append(hashlib.sha256(b"").hexdigest())
    return Attack(data, expected, early, disconnects=source.random() < 0.1)


def _request(source: random.Random) -> tuple[bytes, str | int]:
    """A request with valid framing and its expected result."""
    content = source.choice([b"", b"a", source.randbytes(300), b"text " * source.randrange(12_000)])
    body, lines, result = _encoded(source, content)
    if source.random() < 0.5:
        lines += source.choice(OFFERS)
    is_chunked = source.random() < 0.5
    framed = b"".join(_chunks(source, body)) if is_chunked else body
    lines.append("transfer-encoding: chunked" if is_chunked else f"content-length: {len(body)}")
    path, size = source.choice(["/", "/a?b=%20", "/refuse"] if source.random() < 0.1 else ["/"]), len(content)
    if source.random() < 0.2:
        lines.append("expect: 100-continue")
    if path == "/refuse":
        result = hashlib.sha256(b"").hexdigest()
    source.shuffle(lines)
    head = "\r\n".join([f"POST {path} HTTP/1.1", "host: x", *lines, f"x-size: {size}"]).encode()
    return head + b"\r\n\r\n" + framed, result


def _encoded(source: random.Random, content: bytes) -> tuple[bytes, list[str], str | int]:
    """A body, its headers, and the hash of its content or the status of the error."""
    digest = hashlib.sha256(content).hexdigest()
    kind = source.randrange(8)
    if kind < 3:
        return content, [], digest
    if kind == 3:
        return content, [f"content-encoding: {source.choice(['br', 'compress', 'gzip, br', 'x', 'gzip;q=1'])}"], 415
    if kind == 4:  # larger than the limit when it is decompressed
        coding = source.choice(["gzip", "deflate", "zstd"])
        return ENCODERS[coding](bytes(MAX_BODY_BYTES * source.choice([2, 40]))), [f"content-encoding: {coding}"], 413
    codings = source.choices(list(ENCODERS), k=source.choice([1, 1, 2]))
    for coding in codings:
        content = ENCODERS[coding](content)
    header = [f"content-encoding: {', '.join(codings)}"]
    if kind == 5 and codings[-1] != "identity":
        at = source.randrange(len(content))
        return content[:at], header, 400
    return content, header, digest


def _chunks(source: random.Random, body: bytes) -> Iterator[bytes]:
    while body:
        size = source.randrange(max(1, len(body) // 50), len(body) + 1)
        yield b"%x\r\n%s\r\n" % (size, body[:size])
        body = body[size:]
    yield b"0\r\n" + source.choice([b"", b"trailer: x\r\n"]) + b"\r\n"


def packets(source: random.Random, data: bytes) -> Iterator[bytes]:
    cuts = sorted(source.randrange(len(data) + 1) for _ in range(source.choice([0, 0, 1, 3, 10])))
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        yield data[start:end]


def send(server: RunningServer, source: random.Random, sent: Attack) -> list[str | int] | None:
    """The results of all responses; None if the client has disconnected. Raises OSError."""
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for packet in packets(source, sent.data):
            connection.sendall(packet)
            if source.random() < 0.2:
                time.sleep(0.002)
        if sent.disconnects:
            return None
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    return results(received)


def is_expected(actual: list[str | int] | None, sent: Attack) -> bool:
    if actual is None or actual == sent.expected:
        return True
    return len(actual) - 1 in sent.early and actual == sent.expected[: len(actual)]


def results(received: bytes) -> list[str | int]:
    found: list[str | int] = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        if b" 100 Continue" in head:
            continue
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        status, content, received = int(head.split()[1]), json.loads(received[:length]), received[length:]
        is_error_object = status >= 400 and set(content["error"]) == {"message", "type", "param", "code"}
        found.append(content["hash"] if status == 200 else status if is_error_object else -status)
    return found


def _kind(result: str | int | None) -> str:
    if result is None:
        return "disconnect"
    return str(result) if isinstance(result, int) else "content"


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextlib.contextmanager
def logged_errors() -> Iterator[list[str]]:
    handler = _Errors()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.lines
    finally:
        logging.getLogger().removeHandler(handler)


def run(source: random.Random, count: int) -> dict[str, Any]:
    succeeded, kinds = list[str](), Counter[str]()
    servers = [RunningServer(app), RunningServer(app, uvloop.new_event_loop)]
    with logged_errors() as lines:
        for number in range(count):
            sent = attack(source)
            try:
                actual = send(servers[number % 2], source, sent)
            except (OSError, ValueError, KeyError) as error:
                actual = [repr(error)]
            kinds.update(_kind(result) for result in ([None] if actual is None else actual))
            if not is_expected(actual, sent):
                succeeded.append(f"{number}: {actual} instead of {sent.expected}: {sent.data[:300]!r}")
        for server in servers:
            try:
                server.wait_until_closed()
            except AssertionError as error:
                succeeded.append(str(error))
            server.stop()
        succeeded += lines
    return {"attacks": count, "responses": dict(sorted(kinds.items())), "succeeded": succeeded}

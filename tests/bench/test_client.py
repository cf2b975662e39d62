"""The load generator's HTTP client against a server whose responses are split, truncated or malformed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest

from tcdeploy.bench import serving
from tcdeploy.bench.client import Client
from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.errors import NetworkError

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
EVENTS = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n'
MODELS = b'{"data": [{"id": "m"}]}'


def chunked(body: bytes, size: int = 1000) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def with_length(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


class CannedServer:
    """Answers GET with a model and POST with `answer`, in pieces of `piece` bytes; then closes if `closes`."""

    def __init__(self, answer: bytes, piece: int = 1000, closes: bool = False) -> None:
        self.answer, self.piece, self.closes = answer, piece, closes
        self.connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")
                )
                self.requests.append(head + await reader.readexactly(length))
                is_get = head.startswith(b"GET")
                answer, piece = (with_length(MODELS), 1000) if is_get else (self.answer, self.piece)
                for start in range(0, len(answer), piece):
                    writer.write(answer[start : start + piece])
                    await asyncio.sleep(0)
                if self.closes and not is_get:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def run_load(canned: CannedServer, **settings: object) -> serving.ServeRow:
    async def run() -> serving.ServeRow:
        server = await asyncio.start_server(canned, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        defaults = ServeSettings(url=url, requests=4, input_length=3, output_length=2, concurrency=1)
        [row] = await serving.run_load(dataclasses.replace(defaults, **settings))  # type: ignore[arg-type]
        server.close()
        return row

    with asyncio.Runner(loop_factory=serving.LOOP_FACTORY) as runner:
        return runner.run(run())


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize(
    "body", [with_length(EVENTS), HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(EVENTS, 11)]
)
def test_responses_may_be_split_anywhere_and_the_connection_is_reused(body: bytes, piece: int) -> None:
    canned = CannedServer(body, piece)
    row = run_load(canned, api_key="secret")
    assert (row.requests, row.failures, row.output_tokens, canned.connections) == (4, {}, 28, 1)
    assert row.latencies is not None and row.latencies.first_token_ms.count == 4
    assert all(b"authorization: Bearer secret\r\n" in request for request in canned.requests)
    assert canned.requests[1].startswith(b"POST /v1/completions HTTP/1.1\r\n")


def test_a_response_without_length_ends_with_its_connection() -> None:
    canned = CannedServer(HEAD + b"connection: close\r\n\r\n" + EVENTS, closes=True)
    row = run_load(canned)
    assert (row.failures, row.output_tokens, canned.connections) == ({}, 28, 5 - 1)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}", "HTTP 503"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(EVENTS)[:-5], "ConnectionResetError"),
        (HEAD + b"content-length: 900\r\n\r\n" + EVENTS, "ConnectionResetError"),
        (b"", "ConnectionResetError"),
        (b"SSH-2.0-OpenSSH\r\n", "ConnectionError"),
        (with_length(b"data: {\n\n"), "ConnectionError"),
        (with_length(b'data: {"error": {"code": "engine_died"}}\n\ndata: [DONE]\n\n'), "engine_died"),
        (with_length(b"data: [DONE]\n\n"), "no token"),
    ],
)
def test_failures_are_counted_by_kind_and_have_no_latency(answer: bytes, failure: str) -> None:
    row = run_load(CannedServer(answer, closes=True))
    assert (row.failures, row.output_tokens, row.latencies) == ({failure: 4}, 0, None)


def test_concurrent_clients_have_a_connection_each() -> None:
    canned = CannedServer(with_length(EVENTS), 5)
    assert run_load(canned, requests=12, concurrency=3).failures == {}
    assert canned.connections == 3


def test_an_unreachable_server_is_a_network_error() -> None:
    with pytest.raises(NetworkError, match="returned no model"):
        asyncio.run(serving.run_load(ServeSettings(url="http://127.0.0.1:9")))


def test_the_url_may_have_a_path_and_a_port() -> None:
    async def run() -> bytes:
        canned = CannedServer(with_length(EVENTS))
        server = await asyncio.start_server(canned, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}/prefix", {})
        assert await client.request("GET", "/v1/models", b"", lambda piece: None) == 200
        client.close()
        server.close()
        return canned.requests[0]

    request = asyncio.run(run())
    assert request.startswith(b"GET /prefix/v1/models HTTP/1.1\r\nhost: 127.0.0.1:")

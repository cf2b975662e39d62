"""What no client should send: ten thousand mutilated requests, bytes that are no HTTP, heads and bodies without end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import httpx
import pytest

from tests.server.conftest import ServerProcess, raw_post

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUESTS, CONNECTIONS = 10_000, 8
GROWTH_BYTES = 128 << 20
BODIES = [
    (CHAT, {"messages": [{"role": "user", "content": "What is a \u00e9 list?"}], "max_tokens": 1, "temperature": 0.5}),
    (CHAT, {"messages": [{"role": "user", "content": "\u6f22\u5b57"}], "max_tokens": 1, "stop": ["a", "b"], "n": 2}),
    (COMPLETIONS, {"prompt": [5, 6, 7, 8], "max_tokens": 1, "logprobs": 2, "echo": True, "logit_bias": {"5": -3.5}}),
    (COMPLETIONS, {"prompt": ["one", "two"], "max_tokens": 1, "stream": True, "stream_options": {}, "seed": 3}),
    ("/tokenize", {"prompt": "This module"}), ("/detokenize", {"tokens": [5, 6, 7]}),
]  # fmt: skip
ODDITIES = [
    b"\xff\xfe", b"\\ud800", b"\x00", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"null", b"true", b"{}", b"[]", b"-1",
    b"[" * 5000, b'{"a":' * 3000, b"\xf0\x9f\x91\xa9\xe2\x80\x8d", b'"\\u0000"', b"1.5", b"9223372036854775808", b'""',
    b'"' + b"x" * 3000 + b'"',
]  # fmt: skip


def mutilated(source: random.Random) -> tuple[str, bytes]:
    """A request of ours with one to four things done to its bytes, or with one field made something else."""
    path, asked = source.choice(BODIES)
    if source.random() < 0.4:
        marked = {**asked, source.choice([*asked, "top_p", "n", "min_tokens", "top_k", "response_format"]): "@@"}
        return path, json.dumps(marked).encode().replace(b'"@@"', source.choice(ODDITIES))
    body = bytearray(json.dumps(asked, ensure_ascii=False).encode())
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(body) + 1)
        end = min(len(body), at + source.randint(0, 12))
        body[at:end] = source.choice((source.choice(ODDITIES), source.randbytes(3), b"", bytes(body[at:end]) * 2))
    return path, bytes(body)


def test_ten_thousand_mutilated_requests_meet_no_server_error(serve: Callable[..., Any]) -> None:
    source = random.Random(8)
    requests = iter([mutilated(source) for _ in range(REQUESTS)])
    statuses: Counter[int] = Counter()

    async def client(session: aiohttp.ClientSession, address: str) -> None:
        for path, body in requests:
            async with session.post(address + path, data=body, headers={"content-type": "application/json"}) as answer:
                told = await answer.read()
            statuses[answer.status] += 1
            assert answer.status < 500 or answer.status in (501, 503), (path, body[:300], told[:300])
            if answer.status >= 400:
                assert set(json.loads(told)["error"]) == {"message", "type", "param", "code"}, (path, body[:300])

    async def all_clients(address: str) -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(client(session, address) for _ in range(CONNECTIONS)))

    with serve() as server:
        assert httpx.post(server.address + CHAT, json=BODIES[0][1]).status_code == 200
        before = server.resident_bytes
        asyncio.run(all_clients(server.address))
        assert sum(statuses.values()) == REQUESTS and statuses[200] > 100 and statuses[400] > 1000, statuses
        assert server.wait_until_idle(5) < 5
        assert server.resident_bytes - before < GROWTH_BYTES, f"{server.resident_bytes - before >> 20} MiB"
        assert httpx.post(server.address + CHAT, json=BODIES[0][1]).status_code == 200
        assert server.metric("recompiles_total") == 0


def test_bytes_that_are_no_http(server: ServerProcess) -> None:
    source = random.Random(9)
    whole = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n" + b'{"prompt": "a"}'
    for _ in range(300):
        sent = bytearray(whole if source.random() < 0.7 else source.randbytes(200))
        for _ in range(source.randint(1, 5)):
            sent[source.randrange(len(sent))] = source.randrange(256)
        with server.connect() as connection:
            connection.sendall(sent[: source.randint(1, len(sent))])
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                status = connection.recv(4096).split(b" ")[1:2]
                assert not status or int(status[0]) < 500, bytes(sent)
    assert httpx.get(f"{server.address}/health").status_code == 200


@pytest.mark.parametrize("begin", [b"GET /", b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: "], ids=["path", "header"])
def test_a_head_without_end_is_cut(server: ServerProcess, begin: bytes) -> None:
    before, sent = server.resident_bytes, 0
    with server.connect() as connection, pytest.raises(ConnectionError):
        connection.sendall(begin)
        while sent < 100 << 20:
            sent += connection.send(b"a" * 65536)
    assert sent < 32 << 20, "what the kernel holds, and no more"
    assert server.resident_bytes - before < GROWTH_BYTES


def test_a_body_of_100_megabytes_is_cut(server: ServerProcess) -> None:
    before = server.resident_bytes
    with server.connect() as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 104857600\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1600):
                connection.sendall(b"a" * 65536)
        assert b" 413 " in connection.recv(4096)
    assert server.resident_bytes - before < GROWTH_BYTES


SHORT_TIMEOUTS = "from tcdeploy.server import api, http; http.REQUEST_TIMEOUT_S = api.BODY_TIMEOUT_S = 1.0"


@pytest.mark.parametrize("is_one_packet", [True, False])
@pytest.mark.parametrize(
    "begun", [b"POST /tokenize HTTP/1.1\r\nhost", b"POST /tokenize HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"]
)
def test_so_are_those_behind_a_whole_request(serve: Callable[..., Any], begun: bytes, is_one_packet: bool) -> None:
    whole = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    with serve(script=SHORT_TIMEOUTS) as server, server.connect() as connection:
        connection.sendall(whole + begun if is_one_packet else whole)
        told = connection.recv(4096)
        if not is_one_packet:
            connection.sendall(begun)
        connection.settimeout(20)
        while part := connection.recv(4096):
            told += part
    assert b" 200 " in told and b" 408 " in told


def test_heads_and_bodies_that_do_not_come_to_an_end_are_given_up(serve: Callable[..., Any]) -> None:
    with serve(script=SHORT_TIMEOUTS) as server:
        slow = [server.connect() for _ in range(100)]
        for number, connection in enumerate(slow):
            if number % 2:
                connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost")
            else:
                connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        start = time.monotonic()
        assert httpx.post(f"{server.address}/tokenize", json={"prompt": "a"}).status_code == 200
        for number, connection in enumerate(slow):
            told = connection.recv(4096)
            while not told.endswith(b"}"):  # the body may come in a packet of its own
                part = connection.recv(4096)
                assert part, told
                told += part
            assert b" 408 " in told and json.loads(told.partition(b"\r\n\r\n")[2])["error"]["message"], number
            connection.close()
        assert time.monotonic() - start < 10


def test_an_upload_nobody_wants_and_bytes_behind_a_request_are_bounded(serve: Callable[..., Any]) -> None:
    """The first is answered before its body came; the second has a line too many behind it, and a stream to end."""
    with serve(script=SHORT_TIMEOUTS) as server, server.connect() as unwanted, server.connect() as streaming:
        unwanted.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\ncontent-length: 99\r\n\r\n"
        )
        assert b" 415 " in unwanted.recv(4096)
        unwanted.sendall(b"a")
        body = {
            "prompt": [5, 6],
            "max_tokens": 600,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        streaming.sendall(raw_post(COMPLETIONS, json.dumps(body).encode()) + b"\r\n")
        told = b""
        while not told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = streaming.recv(1 << 16)
            assert part, told[-300:]
            told += part
        events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith(b"data: {")]
        assert not any("error" in event for event in events) and events[-1]["usage"]["completion_tokens"] == 600
        unwanted.settimeout(10)
        with contextlib.suppress(ConnectionError):
            while unwanted.recv(4096):
                pass


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [' + b"1," * 1_500_000 + b"1]}", b'{"prompt": [1, "a"' + b', "a"' * 1_000_000 + b"]}",
        b'{"prompt": [' + b"[1]," * 900_000 + b"[1]]}",
    ],
    ids=["messages", "texts", "prompts"],
)  # fmt: skip
def test_a_large_body_that_is_wrong_is_refused_and_nobody_waits(server: ServerProcess, body: bytes) -> None:
    before, longest, answers = server.resident_bytes, 0.0, []

    def ask() -> None:
        headers = {"content-type": "application/json"}
        path = CHAT if b"messages" in body[:20] else COMPLETIONS
        answers.append(httpx.post(server.address + path, content=body, headers=headers, timeout=60).status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():
        start = time.monotonic()
        assert httpx.get(f"{server.address}/health").status_code == 200
        longest = max(longest, time.monotonic() - start)
    assert answers == [400] and longest < 1.0, (answers, longest)
    assert server.resident_bytes - before < 2 * GROWTH_BYTES

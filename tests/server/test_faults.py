"""Faults of production: overload, disconnects, slow clients, SIGTERM, a dead engine, invalid requests."""

from __future__ import annotations

import json
import re
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fork_server import ForkServer
from tests.server.conftest import SMALL_SEND_BUFFERS, ServerProcess, raw_post, serving, wait_for

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is a list?"}]
LONG = {"messages": QUESTION, "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}


def events(response: httpx.Response) -> list[Any]:
    """All events of a stream; the last one is "[DONE]"."""
    data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def open_streams(server: ServerProcess, count: int, **fields: Any) -> list[Any]:
    """Open `count` streams. The caller closes them."""
    client, body = httpx.Client(timeout=60), {**LONG, **fields}
    streams = [
        client.send(client.build_request("POST", server.address + CHAT, json=body), stream=True) for _ in range(count)
    ]
    for response in streams:
        assert response.status_code == 200
    return streams


READY = b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n"


def make_idle(connection: socket.socket) -> None:
    """Send a request, and read its whole response. Head and body may arrive in two packets."""
    connection.sendall(READY)
    received = b""
    while not received.endswith(b"}"):
        received += connection.recv(4096) or b"}"
    assert received.startswith(b"HTTP/1.1 200")


def test_a_full_queue_rejects_in_50_ms_and_running_requests_keep_their_speed(serve: Callable[..., Any]) -> None:
    """Uses the median of the rejections and the best of three pairs of rates, or six: other tests use the CPU too."""
    with serve("--max-queued", "1") as server:
        seconds: list[float] = []

        def tokens_per_second(client: httpx.Client, *, rejections: int) -> float:
            begin, before = time.perf_counter(), server.metric("generation_tokens_total")
            for _ in range(rejections):
                start = time.perf_counter()
                response = client.post(server.address + CHAT, json=LONG)
                seconds.append(time.perf_counter() - start)
                assert response.status_code == 503 and response.headers["retry-after"] == "1"
                assert response.json()["error"]["code"] == "queue_full"
                time.sleep(0.005)
            if not rejections:
                time.sleep(0.3)
            return (server.metric("generation_tokens_total") - before) / (time.perf_counter() - begin)

        rates: list[tuple[float, float]] = []
        with httpx.Client() as client:
            while len(rates) < 3 or (len(rates) < 6 and not any(busy > quiet / 2 for quiet, busy in rates)):
                streams = open_streams(server, 5)  # four run, one waits
                time.sleep(0.3)
                quiet = tokens_per_second(client, rejections=0)
                rates.append((quiet, tokens_per_second(client, rejections=33)))
                assert server.metric("num_requests_running") == 4, "the streams still run"
                for response in streams:
                    response.close()
                assert server.wait_until_idle(10) < 10
        assert statistics.median(seconds) < 0.05
        assert any(busy > quiet / 2 for quiet, busy in rates), rates
        assert server.metric("admission_rejections_total", reason="queue_full") == 33 * len(rates)
        assert httpx.post(server.address + CHAT, json={"messages": QUESTION, "max_tokens": 2}).status_code == 200


def test_sigterm_lets_running_requests_finish_and_rejects_new_ones(serve: Callable[..., Any]) -> None:
    with serve("--drain-timeout", "60") as server:
        [running] = open_streams(server, 1)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.address}/ready", verify=False).status_code == 503)
        rejected = httpx.post(server.address + CHAT, json={"messages": QUESTION})
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "draining")
        *_, last, done = events(running)
        assert done == "[DONE]" and last["choices"][0]["finish_reason"] == "length"
        assert server.wait(timeout=10) == 0
        lines = server.stderr[server.stderr.index("draining 1 request, 60 s left\n") :]
        assert lines[-1] == "stopped\n" and lines.count("stopped\n") == 1
        assert re.fullmatch(r"ready: http://127.0.0.1:\d+ after \d+\.\d s\n", server.ready_line)
        assert server.process.stdout.read() == "", "the line with the address is the last one"


def test_sigterm_closes_idle_connections_and_others_after_their_response(serve: Callable[..., Any]) -> None:
    """A client behind a load balancer then opens a connection, to another replica."""
    with serve("--drain-timeout", "60") as server, server.connect() as idle, httpx.Client(timeout=60) as client:
        idle.settimeout(10)
        make_idle(idle)
        [running] = open_streams(server, 1)
        server.process.send_signal(signal.SIGTERM)
        assert idle.recv(4096) == b"", "closed while the stream runs"
        rejected = client.post(server.address + CHAT, json={"messages": QUESTION})
        assert (rejected.status_code, rejected.headers["connection"]) == (503, "close")
        assert events(running)[-1] == "[DONE]"
        assert server.process.wait(timeout=10) == 0


@pytest.mark.parametrize("sent", [b"", b"GET /ready HTTP/1.1\r\n"])
def test_sigterm_keeps_new_connections_open_for_their_first_request(serve: Callable[..., Any], sent: bytes) -> None:
    """The request may be on its way. A closed connection would be reset, and the client would get no response."""
    with serve("--drain-timeout", "60") as server, server.connect() as new, server.connect() as idle:
        make_idle(idle)
        new.sendall(sent)
        [running] = open_streams(server, 1)
        server.process.send_signal(signal.SIGTERM)
        assert idle.recv(4096) == b"", "the server drains"
        new.sendall(READY.removeprefix(sent))
        response = b"".join(iter(lambda: new.recv(4096), b""))  # until the server closes the connection
        assert response.startswith(b"HTTP/1.1 503") and b"draining" in response
        running.close()
        assert server.process.wait(timeout=10) == 0


def test_a_request_over_the_drain_timeout_gets_an_error_event(serve: Callable[..., Any]) -> None:
    with serve("--drain-timeout", "0.2") as server:
        [running] = open_streams(server, 1)
        server.process.send_signal(signal.SIGTERM)
        *_, last, done = events(running)
        assert done == "[DONE]" and "shutting down" in last["error"]["message"]
        assert server.process.wait(timeout=10) == 0


def test_a_second_sigterm_exits_at_once(serve: Callable[..., Any]) -> None:
    with serve("--drain-timeout", "60") as server:
        open_streams(server, 1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=2) != 0


def test_a_client_that_does_not_read_is_dropped_and_others_are_served(serve: Callable[..., Any]) -> None:
    with serve("--stall-timeout", "1", script=SMALL_SEND_BUFFERS) as server:
        body = json.dumps({**LONG, "n": 3, "logprobs": True, "top_logprobs": 20}).encode()  # some 8 MB of events
        host, port = server.address.removeprefix("http://").split(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            slow.sendall(raw_post(CHAT, body))
            slow.recv(1)
            other = httpx.post(server.address + CHAT, json={"messages": QUESTION, "max_tokens": 8}, timeout=5)
            assert other.status_code == 200
            deadline = time.monotonic() + 30
            while server.metric("num_requests_running") and time.monotonic() < deadline:
                slow.recv(1)
                time.sleep(0.2)
        assert any("the client did not read" in line for line in server.stderr)
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.metric("request_success_total", finished_reason="length") == 1, (
            "only the other request reached its end"
        )


def test_200_simultaneous_disconnects_free_everything_within_two_seconds(serve: Callable[..., Any]) -> None:
    """Some requests have first tokens, some are in prefill, most are queued."""
    with serve("--max-queued", "400") as server:
        body = json.dumps(
            {**LONG, "messages": [{"role": "user", "content": "long " * 100}], "max_tokens": 400}
        ).encode()
        connections = [server.connect() for _ in range(200)]
        for number, connection in enumerate(connections):
            connection.sendall(raw_post(CHAT, body))
            if number < 3:
                assert b"data: " in connection.recv(4096) + connection.recv(4096)
        deadline = time.monotonic() + 10
        while server.metric("num_requests_running") + server.metric("num_requests_waiting") < 150:
            assert time.monotonic() < deadline, "most requests are running or queued by now"
            time.sleep(0.05)
        for connection in connections:
            connection.close()
        assert server.wait_until_idle(10) < 2
        start = time.monotonic()
        assert httpx.post(server.address + CHAT, json={"messages": QUESTION, "max_tokens": 2}).status_code == 200
        assert time.monotonic() - start < 5
        assert server.metric("recompiles_total") == 0


def test_preemption_does_not_change_the_output(tmp_path: Path, warm_cache: Path, fork_server: ForkServer) -> None:
    def complete(server: ServerProcess, number: int) -> Any:
        prompt = [20 + (number * 37 + position * 11) % 900 for position in range(250)]
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{server.address}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]

    flags = ("--context", "512", "--kv-blocks", "52")  # a request takes 16, and 19 at its end
    with serving(tmp_path, warm_cache, *flags, fork_server=fork_server) as server:
        alone = [complete(server, number) for number in range(6)]
        assert server.metric("num_preemptions_total") == 0
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda number: complete(server, number), range(6)))
        assert server.metric("num_preemptions_total") > 0
        assert together == alone
        assert server.wait_until_idle(2) < 2 and server.metric("recompiles_total") == 0


ENGINE_DIES = """
from tcdeploy.engine import engine
step = engine.Engine.step
def dying(self):
    if any(len(item.token_ids) - item.prompt_length > 10 for item in self.scheduler.running):  # not in warm-up
        raise RuntimeError("the device is gone")
    return step(self)
engine.Engine.step = dying
"""


def test_a_dead_engine_ends_streams_with_an_error_and_stops_the_process(serve: Callable[..., Any]) -> None:
    with serve(script=ENGINE_DIES) as server:
        [running] = open_streams(server, 1)
        health: list[tuple[float, int]] = []

        def watch() -> None:
            while server.process.poll() is None:
                try:
                    health.append((time.monotonic(), httpx.get(f"{server.address}/health").status_code))
                except httpx.TransportError:
                    return
                time.sleep(0.05)

        watcher = threading.Thread(target=watch)
        watcher.start()
        *_, last, done = events(running)
        died = time.monotonic()
        assert done == "[DONE]" and "the device is gone" in last["error"]["message"]
        assert server.process.wait(timeout=10) not in (0, None)
        watcher.join()
        unhealthy = [when for when, status in health if status == 503]
        assert unhealthy and unhealthy[0] - died < 1


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b'{"prompt": "\xff\xfe"}', {}, 400), (b'{"prompt": "\\ud800"}', {}, 400), (b"[" * 10_000, {}, 400),
        (b"", {}, 400), (b"null", {}, 400), (b'{"prompt": 5}', {}, 400), (b"a=b", {"content-type": "text/plain"}, 415),
        (b'{"prompt": "' + b"x" * (9 << 20) + b'"}', {}, 413),
    ],
)  # fmt: skip
def test_an_invalid_body_gets_openais_error(
    server: ServerProcess, content: bytes, headers: dict[str, str], status: int
) -> None:
    response = httpx.post(
        f"{server.address}/v1/completions", content=content, headers={"content-type": "application/json", **headers}
    )
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", CHAT, 405)])
def test_errors_of_the_router_have_openais_shape(server: ServerProcess, method: str, path: str, status: int) -> None:
    response = httpx.request(method, server.address + path)
    assert response.status_code == status and response.json()["error"]["message"]


def test_the_api_key_is_required_except_for_health_and_ready(serve: Callable[..., Any]) -> None:
    with serve("--api-key", "secret") as server:
        assert httpx.get(f"{server.address}/health").status_code == 200
        assert httpx.get(f"{server.address}/ready").status_code == 200
        for key in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            rejected = httpx.get(f"{server.address}/v1/models", headers=key)
            assert (rejected.status_code, rejected.json()["error"]["code"]) == (401, "invalid_api_key")
        headers = {"authorization": "Bearer secret", "x-request-id": "mine"}
        accepted = httpx.get(f"{server.address}/v1/models", headers=headers)
        assert accepted.status_code == 200 and accepted.headers["x-request-id"] == "mine"

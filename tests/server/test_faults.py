"""What production does to a server: too many, gone, slow, killed, told to end."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.conftest import ServerProcess, raw_post

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is a list?"}]
LONG = {"messages": QUESTION, "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}


def events(response: httpx.Response) -> list[Any]:
    """Of a stream to its end; [DONE] as it stands."""
    data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def open_streams(server: ServerProcess, count: int) -> list[Any]:
    """Streams that have begun; whoever opens them closes them."""
    client = httpx.Client(timeout=60)
    opened = [
        client.send(client.build_request("POST", server.address + CHAT, json=LONG), stream=True) for _ in range(count)
    ]
    for response in opened:
        assert response.status_code == 200
    return opened


def test_beyond_the_queue_a_request_is_refused_at_once_and_what_runs_goes_on(serve: Callable[..., Any]) -> None:
    """The median of a hundred refusals, and rates over a second: a machine that is busy now and then can keep them."""
    with serve("--max-queued", "1") as server:
        opened = open_streams(server, 5)  # four run, one waits
        time.sleep(0.3)
        rates, seconds = [], []
        with httpx.Client() as client:
            for is_refused in (False, True):
                begin, before = time.perf_counter(), server.metric("generation_tokens_total")
                while len(seconds) < 100 if is_refused else time.perf_counter() - begin < 1.0:
                    start = time.perf_counter()
                    answer = client.post(server.address + CHAT, json=LONG) if is_refused else None
                    time.sleep(0.005)
                    if answer is not None:
                        seconds.append(time.perf_counter() - start - 0.005)
                        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
                        assert answer.json()["error"]["code"] == "queue_full"
                rates.append((server.metric("generation_tokens_total") - before) / (time.perf_counter() - begin))
        assert server.metric("num_requests_running") == 4, "they ran all the time"
        assert sorted(seconds)[50] < 0.05
        assert rates[1] > rates[0] / 2, rates
        assert server.metric("admission_rejections_total", reason="queue_full") == 100
        for response in opened:
            response.close()
        time.sleep(0.5)
        assert httpx.post(server.address + CHAT, json={"messages": QUESTION, "max_tokens": 2}).status_code == 200


def test_sigterm_lets_running_answers_finish_and_takes_no_new_ones(serve: Callable[..., Any]) -> None:
    with serve("--drain-timeout", "60") as server:
        [running] = open_streams(server, 1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert httpx.get(f"{server.address}/ready").status_code == 503
        refused = httpx.post(server.address + CHAT, json={"messages": QUESTION})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        found = events(running)
        assert found[-1] == "[DONE]" and found[-2]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(timeout=10) == 0


def test_what_does_not_finish_in_time_gets_an_error_event(serve: Callable[..., Any]) -> None:
    with serve("--drain-timeout", "0.2") as server:
        [running] = open_streams(server, 1)
        server.process.send_signal(signal.SIGTERM)
        found = events(running)
        assert found[-1] == "[DONE]" and "shutting down" in found[-2]["error"]["message"]
        assert server.process.wait(timeout=10) == 0


def test_a_second_sigterm_ends_at_once(serve: Callable[..., Any]) -> None:
    with serve("--drain-timeout", "60") as server:
        open_streams(server, 1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=2) != 0


def test_a_client_that_does_not_read_is_let_go_and_harms_nobody(serve: Callable[..., Any]) -> None:
    with serve("--stall-timeout", "1") as server:
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
        assert any("was let go" in line for line in server.stderr)
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.metric("request_success_total", finished_reason="length") == 1, "the slow one ended early"


def test_200_clients_that_leave_at_once_leave_nothing_behind(serve: Callable[..., Any]) -> None:
    """Some have their first tokens, some are in prefill, most wait."""
    with serve("--max-queued", "400") as server:
        body = json.dumps(
            {**LONG, "messages": [{"role": "user", "content": "long " * 100}], "max_tokens": 400}
        ).encode()
        gone = [server.connect() for _ in range(200)]
        for number, connection in enumerate(gone):
            connection.sendall(raw_post(CHAT, body))
            if number < 3:
                assert b"data: " in connection.recv(4096) + connection.recv(4096)
        deadline = time.monotonic() + 10
        while server.metric("num_requests_running") + server.metric("num_requests_waiting") < 150:
            assert time.monotonic() < deadline, "most of them are inside by now"
            time.sleep(0.05)
        for connection in gone:
            connection.close()
        assert server.wait_until_idle(10) < 2
        start = time.monotonic()
        assert httpx.post(server.address + CHAT, json={"messages": QUESTION, "max_tokens": 2}).status_code == 200
        assert time.monotonic() - start < 5
        assert server.metric("recompiles_total") == 0


def test_when_blocks_run_out_answers_wait_and_stay_the_same(serve: Callable[..., Any]) -> None:
    def ask(server: ServerProcess, number: int) -> Any:
        prompt = [20 + (number * 37 + position * 11) % 900 for position in range(250)]
        asked = {"prompt": prompt, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{server.address}/v1/completions", json=asked, timeout=120).json()["choices"][0]["text"]

    with serve("--context", "512", "--kv-blocks", "60") as server:  # one answer takes 24
        alone = [ask(server, number) for number in range(6)]
        assert server.metric("num_preemptions_total") == 0
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda number: ask(server, number), range(6)))
        assert server.metric("num_preemptions_total") > 0
        assert together == alone
        assert server.wait_until_idle(2) < 2 and server.metric("recompiles_total") == 0


ENGINE_DIES = """
from tcdeploy.engine import engine
step = engine.Engine.step
def dying(self):
    if any(len(one.token_ids) - one.prompt_length > 10 for one in self.scheduler.running):  # no rehearsal
        raise RuntimeError("the device is gone")
    return step(self)
engine.Engine.step = dying
"""


def test_when_the_engine_dies_streams_say_so_and_the_process_ends(serve: Callable[..., Any]) -> None:
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
        found = events(running)
        died = time.monotonic()
        assert found[-1] == "[DONE]" and "the device is gone" in found[-2]["error"]["message"]
        assert server.process.wait(timeout=10) not in (0, None)
        watcher.join()
        sick = [when for when, status in health if status == 503]
        assert sick and sick[0] - died < 1


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b'{"prompt": "\xff\xfe"}', {}, 400), (b'{"prompt": "\\ud800"}', {}, 400), (b"[" * 10_000, {}, 400),
        (b"", {}, 400), (b"null", {}, 400), (b'{"prompt": 5}', {}, 400), (b"a=b", {"content-type": "text/plain"}, 415),
        (b'{"prompt": "' + b"x" * (9 << 20) + b'"}', {}, 413),
    ],
)  # fmt: skip
def test_bytes_that_are_no_request(server: ServerProcess, content: bytes, headers: dict[str, str], status: int) -> None:
    found = httpx.post(
        f"{server.address}/v1/completions", content=content, headers={"content-type": "application/json", **headers}
    )
    assert found.status_code == status
    assert set(found.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", CHAT, 405)])
def test_the_frameworks_own_errors_have_openais_shape(
    server: ServerProcess, method: str, path: str, status: int
) -> None:
    found = httpx.request(method, server.address + path)
    assert found.status_code == status and found.json()["error"]["message"]


def test_a_key_guards_all_but_health_and_readiness(serve: Callable[..., Any]) -> None:
    with serve("--api-key", "secret") as server:
        assert httpx.get(f"{server.address}/health").status_code == 200
        assert httpx.get(f"{server.address}/ready").status_code == 200
        for key in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            found = httpx.get(f"{server.address}/v1/models", headers=key)
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
        right = {"authorization": "Bearer secret", "x-request-id": "mine"}
        found = httpx.get(f"{server.address}/v1/models", headers=right)
        assert found.status_code == 200 and found.headers["x-request-id"] == "mine"

"""Failing starts and shutdown in unusual states: nothing hangs, and waiting clients get an error."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import TINY, TINY_FLAGS, RunCLI
from tests.fork_server import ForkServer
from tests.ports import free_port
from tests.server.conftest import FLAGS, SMALL_SEND_BUFFERS, raw_post, start_cli
from tests.server.test_faults import CHAT, LONG, QUESTION, events, open_streams

SLOW_DEATH = """
import time
from tcdeploy.engine import engine
step = engine.Engine.step
def dying(self):
    if any(len(item.token_ids) - item.prompt_length > 10 for item in self.scheduler.running):  # not in warm-up
        time.sleep(5)
        raise RuntimeError("the device is gone")
    return step(self)
engine.Engine.step = dying
"""
SLOW_START = """
import time
from tcdeploy.start import model_code
start = model_code.start_from_code
model_code.start_from_code = lambda *arguments: (time.sleep(4), start(*arguments))[1]
"""


def test_a_request_sent_while_the_engine_dies_gets_an_error(serve: Callable[..., Any]) -> None:
    with serve(script=SLOW_DEATH) as server:
        [running] = open_streams(server, 1)
        time.sleep(1)  # the failing step runs
        late_responses: list[httpx.Response] = []
        sending = threading.Thread(
            target=lambda: late_responses.append(
                httpx.post(server.address + CHAT, json={"messages": QUESTION, "max_tokens": 3}, timeout=20)
            )
        )
        sending.start()
        assert "the device is gone" in events(running)[-2]["error"]["message"]
        sending.join()
        [late] = late_responses
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_died")
        assert server.process.wait(timeout=15) == 1


def test_a_client_that_does_not_read_does_not_delay_shutdown(serve: Callable[..., Any]) -> None:
    """Its request is logged although it is cancelled last."""
    flags = ("--stall-timeout", "60", "--drain-timeout", "0.5", "--log-requests", "text")
    with serve(*flags, script=SMALL_SEND_BUFFERS) as server, socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.address.removeprefix("http://").split(":")
        stalled.connect((host, int(port)))
        body = {**LONG, "max_tokens": 200, "n": 4, "logprobs": True, "top_logprobs": 20}
        stalled.sendall(raw_post(CHAT, json.dumps(body).encode()))
        stalled.recv(1)
        time.sleep(1)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(timeout=15) == 0
        assert [line for line in server.stderr if f"POST {CHAT} 200 " in line]


def test_a_client_that_does_not_read_loses_its_connection(serve: Callable[..., Any]) -> None:
    with serve("--stall-timeout", "1", script=SMALL_SEND_BUFFERS) as server, socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.address.removeprefix("http://").split(":")
        stalled.connect((host, int(port)))
        stalled.sendall(raw_post(CHAT, json.dumps({**LONG, "n": 4, "logprobs": True, "top_logprobs": 20}).encode()))
        deadline = time.monotonic() + 60
        while not any("the client did not read" in line for line in server.stderr) and time.monotonic() < deadline:
            time.sleep(0.1)
        received, part = b"", b"x"
        with contextlib.suppress(ConnectionError):
            while part:
                part = stalled.recv(1 << 20)
                received += part
        assert not received.endswith(b"0\r\n\r\n"), "aborted, not completed"
        assert server.wait_until_idle(5) < 5
        assert not any("Traceback" in line for line in server.stderr)


def test_sigterm_while_loading_exits_with_0(tmp_path: Path, warm_cache: Path, fork_server: ForkServer) -> None:
    port = free_port()
    arguments = ("serve", TINY, *TINY_FLAGS, "--port", str(port), "--cache-dir", str(warm_cache))
    process = start_cli(tmp_path, *arguments, fork_server=fork_server, script=SLOW_START)
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            response = httpx.get(f"{address}/ready")
            break
        except httpx.TransportError:
            time.sleep(0.05)
    readiness = response.json()
    assert (response.status_code, readiness["status"], readiness["stage"]) == (503, "loading", "import")
    assert 0 < readiness["seconds"] < 60 and readiness["seconds_left"] is readiness["step_number"] is None
    for path in ("/metrics", "/status", "/"):
        assert httpx.get(address + path).status_code == 200
    assert httpx.post(address + CHAT, json={"messages": QUESTION}).json()["error"]["code"] == "loading"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    assert process.stdout is not None and process.stderr is not None
    assert "ready: " not in process.stdout.read()
    *_, interrupted, last = process.stderr.read().splitlines()
    assert re.fullmatch(r"import \.\.\. +\d+\.\d s, import transformers", interrupted) and last == "stopped"


def test_a_failing_start_reports_its_reason(run_cli: RunCLI, tmp_path: Path, warm_cache: Path) -> None:
    missing = run_cli("serve", str(tmp_path / "nothing"), "--port", "0", timeout=60)
    assert missing.returncode == 2 and "nothing does not exist" in missing.stderr and "Traceback" not in missing.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        busy = run_cli("serve", TINY, *TINY_FLAGS, "--port", port, "--cache-dir", str(warm_cache), timeout=60)
    assert busy.returncode == 2 and f"cannot listen on 127.0.0.1 port {port}" in busy.stderr
    assert "Traceback" not in busy.stderr


BUILD_FAILS = """
from tcdeploy.server import model_server
def build_service(*_):
    raise RuntimeError("a tokenizer of another kind")
model_server.build_service = build_service
"""


def test_a_server_whose_service_cannot_be_built_exits_with_1(
    tmp_path: Path, warm_cache: Path, prepared_fork_server: ForkServer
) -> None:
    arguments = ("serve", TINY, *FLAGS, "--cache-dir", str(warm_cache))
    broken = start_cli(tmp_path, *arguments, fork_server=prepared_fork_server, script=BUILD_FAILS)
    assert broken.wait(timeout=60) == 1
    assert "a tokenizer of another kind" in (broken.stderr.read() if broken.stderr else "")

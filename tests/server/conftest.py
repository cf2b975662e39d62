"""Fixtures that run `tcdeploy serve` with the embedded model in a separate process."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import TINY, TINY_FLAGS, cli_command, cli_environment
from tests.fork_server import ForkedProcess, ForkServer
from tests.server.prepared_fork_server import PreparedForkServer

FLAGS = (*TINY_FLAGS, "--port", "0")


def without_model(text: str) -> str:
    """Text of /metrics without the label of the model."""
    return re.sub(r',model_name="[^"]*"|model_name="[^"]*",?', "", text)


@dataclass
class ServerProcess:
    process: subprocess.Popen[str] | ForkedProcess
    address: str
    ready_line: str
    stderr: list[str]  # lines so far
    listener: threading.Thread  # adds them

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; 0 if it does not exist."""
        label_text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        sample = f"tcdeploy:{name}{{{label_text}}} "
        for line in self._metric_lines():
            if line.startswith(f"tcdeploy:{name}{{") and without_model(line).startswith(sample):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    @property
    def steps(self) -> float:
        """Engine steps since the start."""
        lines = [line for line in self._metric_lines() if line.startswith("tcdeploy:bucket_steps_total")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def _metric_lines(self) -> list[str]:
        """The lines of /metrics. Loading certificates, which `verify=False` avoids, would take 30 ms per request."""
        return httpx.get(f"{self.address}/metrics", verify=False, timeout=60).text.splitlines()

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]) << 10

    def connect(self) -> socket.socket:
        host, port = self.address.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def wait(self, timeout: float) -> int:
        """Wait until the process has ended and `stderr` has all of its lines. Returns the exit code."""
        code = self.process.wait(timeout)
        self.listener.join(timeout)
        return code

    def wait_until_idle(self, seconds: float) -> float:
        """Wait at most `seconds` until no request runs and no KV block is in use. Returns the seconds waited."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if not any(
                self.metric(name) for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            ):
                break
            time.sleep(0.02)
        return time.monotonic() - start


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.05)


def stages_of(stderr: list[str]) -> list[str]:
    """The lines of stages that have ended, without their seconds."""
    ended = (re.fullmatch(r"(\w[\w -]*?) +\d+\.\d s(, \d+ of \d+)?\n", line) for line in stderr)
    return [match[1] + (match[2] or "") for match in ended if match is not None]


def raw_post(path: str, body: bytes) -> bytes:
    """The bytes of an HTTP request."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


# Shrinks the send buffers, so that a stream whose client does not read stalls after a few events.
SMALL_SEND_BUFFERS = """
import socket
from tcdeploy.server import run
listen = run._listen
def listen_with_small_buffers(*arguments):
    listener = listen(*arguments)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener
run._listen = listen_with_small_buffers
"""


def start_cli(
    home: Path, *arguments: str, fork_server: ForkServer | None = None, script: str = ""
) -> subprocess.Popen[str] | ForkedProcess:
    """Start the CLI after `script`, as a fork where forks are supported."""
    environ = cli_environment(home)
    if fork_server is not None and fork_server.supports(environ):
        return fork_server.popen(*arguments, environ=environ, script=script)
    command = cli_command(*arguments)
    if script:
        run = "import sys; from tcdeploy.cli.app import main; sys.argv = ['tcdeploy', *sys.argv[1:]]; main()"
        command = [command[0], "-c", f"{script}\n{run}", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    )


@contextmanager
def serving(
    home: Path, cache: Path, *flags: str, fork_server: ForkServer | None = None, script: str = "", model: str = TINY
) -> Iterator[ServerProcess]:
    """Start a server and yield it once it is ready. `script` runs in its process before the command."""
    arguments = ("serve", model, *FLAGS, "--cache-dir", str(cache), *flags)
    process = start_cli(home, *arguments, fork_server=fork_server, script=script)
    assert process.stdout is not None and process.stderr is not None
    stderr: list[str] = []
    listener = threading.Thread(target=lambda: stderr.extend(process.stderr or ()), daemon=True)
    listener.start()
    try:
        ready = next((line for line in process.stdout if line.startswith("ready: ")), None)
        assert ready is not None, "".join(stderr)
        yield ServerProcess(process, ready.split()[1], ready, stderr, listener)
    finally:
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory: pytest.TempPathFactory, filled_cache: Path) -> Path:
    return Path(shutil.copytree(filled_cache, tmp_path_factory.mktemp("served") / "cache"))


@pytest.fixture(scope="session")
def prepared_fork_server(
    tmp_path_factory: pytest.TempPathFactory, warm_cache: Path, fork_server: ForkServer
) -> Iterator[ForkServer]:
    """Forks of a process that has prepared the embedded model; `fork_server` itself where forks are not supported."""
    environ = cli_environment(tmp_path_factory.mktemp("prepared"))
    if not fork_server.supports(environ):
        yield fork_server
        return
    prepared = PreparedForkServer(fork_server, environ, warm_cache)
    yield prepared
    prepared.shutdown()


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, warm_cache: Path, prepared_fork_server: ForkServer
) -> Iterator[ServerProcess]:
    """One server for all tests that leave it unchanged: a fork of the prepared process.

    test_served_cache.py tests a server in a new process.
    """
    with serving(tmp_path_factory.mktemp("home"), warm_cache, fork_server=prepared_fork_server) as started:
        yield started


@pytest.fixture(scope="session")
def tool_api_server(
    tmp_path_factory: pytest.TempPathFactory, warm_cache: Path, fork_server: ForkServer
) -> Iterator[ServerProcess]:
    """One server for the tests of all APIs with tools. Its model is the embedded one, with templates for calls."""
    from tests.server.test_tools import make_model

    folder = make_model(tmp_path_factory.mktemp("tools") / "model")
    home = tmp_path_factory.mktemp("home")
    with serving(home, warm_cache, "--served-model-name", TINY, model=str(folder), fork_server=fork_server) as started:
        yield started


@pytest.fixture
def serve(tmp_path: Path, warm_cache: Path, prepared_fork_server: ForkServer) -> Callable[..., Any]:
    """Starts a server for one test from the same warm cache. Flags that change the plan need `serving`."""
    return lambda *flags, **options: serving(tmp_path, warm_cache, *flags, fork_server=prepared_fork_server, **options)

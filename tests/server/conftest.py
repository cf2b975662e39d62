"""Fixtures that run `tcdeploy serve` with the embedded model in a separate process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import TINY, cli_command, cli_environment
from tests.fork_server import ForkedProcess, ForkServer

FLAGS = ("--buckets", "32,128", "--batch-sizes", "1,4", "--port", "0")


@dataclass
class ServerProcess:
    process: subprocess.Popen[str] | ForkedProcess
    address: str
    stderr: list[str]  # lines so far

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; 0 if it does not exist."""
        label_text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        sample = f"tcdeploy:{name}" + (f"{{{label_text}}}" if labels else "")
        for line in httpx.get(f"{self.address}/metrics").text.splitlines():
            if line.startswith(f"{sample} "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    @property
    def steps(self) -> float:
        """Engine steps since the start."""
        lines = httpx.get(f"{self.address}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tcdeploy:bucket_hits_total"))

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


def raw_post(path: str, body: bytes) -> bytes:
    """The bytes of an HTTP request."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


@contextmanager
def serving(
    home: Path, cache: Path, *flags: str, fork_server: ForkServer | None = None, script: str = "", model: str = TINY
) -> Iterator[ServerProcess]:
    """Start a server and yield it once it is ready. `script` runs in its process before the command."""
    arguments = ("serve", model, *FLAGS, "--cache-dir", str(cache), *flags)
    environ = cli_environment(home)
    process: subprocess.Popen[str] | ForkedProcess
    if fork_server is not None and fork_server.supports(environ):
        process = fork_server.popen(*arguments, environ=environ, script=script)
    else:
        command = cli_command(*arguments)
        if script:
            run = "import sys; from tcdeploy.cli.app import main; sys.argv = ['tcdeploy', *sys.argv[1:]]; main()"
            command = [command[0], "-c", f"{script}\n{run}", *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
        )
    assert process.stdout is not None and process.stderr is not None
    stderr: list[str] = []
    listener = threading.Thread(target=lambda: stderr.extend(process.stderr or ()), daemon=True)
    listener.start()
    try:
        ready = next((line for line in process.stdout if line.startswith("ready: ")), None)
        assert ready is not None, "".join(stderr)
        yield ServerProcess(process, ready.split()[1], stderr)
    finally:
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory: pytest.TempPathFactory, filled_cache: Path) -> Path:
    return Path(shutil.copytree(filled_cache, tmp_path_factory.mktemp("served") / "cache"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, warm_cache: Path) -> Iterator[ServerProcess]:
    """One server for all tests that leave it unchanged; started as a new process, as users do."""
    with serving(tmp_path_factory.mktemp("home"), warm_cache) as started:
        yield started


@pytest.fixture
def serve(tmp_path: Path, warm_cache: Path, server: ServerProcess, fork_server: ForkServer) -> Callable[..., Any]:
    """Starts a server for one test, from the same warm cache."""
    return lambda *flags, **options: serving(tmp_path, warm_cache, *flags, fork_server=fork_server, **options)

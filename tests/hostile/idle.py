"""Opens more idle connections than the limit of open files, without an API key; new clients must get responses.

A server in another process listens while its model is loading, under a limit of FILE_LIMIT open files. Each round opens
more connections than that, of random kinds: silent ones, parts of heads and bodies, answered and kept alive, refused
while their body is incomplete, pipelined requests, data that is not HTTP, and with TLS incomplete handshakes. Then new
clients request /health. A round succeeds as an attack if a client gets no response within MAX_RESPONSE_S, if the server
reaches its limit of files, if it uses the CPU while nothing happens, or if it logs an error.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.server.test_server_options import make_certificate

DEFAULT_COUNT = 20_000  # connections
FILE_LIMIT = 400
ROUND = 600  # connections of one round
NEW_CLIENTS = 5
MAX_RESPONSE_S = 20.0  # a machine under load may be slow; without a limit, connections are reset at once
MAX_IDLE_CPU = 0.5  # CPU seconds per second

SERVER = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[2])))
from tcdeploy.server.run import run_server
from tcdeploy.server.settings import ServerSettings
tls = dict(ssl_certfile=sys.argv[3], ssl_keyfile=sys.argv[4]) if len(sys.argv) > 3 else {}
settings = ServerSettings(port=int(sys.argv[1]), api_keys=("secret",), model="tiny", **tls)
run_server(settings, lambda: time.sleep(1e6), lambda *_: None)
"""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
KINDS = {
    "silent": b"", "half a head": HEAD, "answered": GET, "half a second head": GET + HEAD, "pipelined": GET * 5,
    "refused with half a body": HEAD + b"content-length: 1000\r\n\r\n{", "not HTTP": b"\x00\x01",
    "line breaks": b"\r\n",
    "half an offer": HEAD + b"connection: upgrade\r\nupgrade: h2c\r\n", "TLS": b"\x16\x03\x01\x02\x00\x01",
    "expects": HEAD + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n",
}  # fmt: skip


class Server:
    def __init__(self, folder: Path, with_tls: bool) -> None:
        self.port, self.log = free_port(), folder / f"log-{with_tls}"
        certificate = make_certificate(folder) if with_tls else ()
        self._context = ssl.create_default_context(cafile=certificate[0]) if with_tls else None
        command = [sys.executable, "-c", SERVER, str(self.port), str(FILE_LIMIT), *certificate]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while (result := self.request_health()) != "200":
            assert time.monotonic() < deadline and self.process.poll() is None, (result, self.log.read_text())
            time.sleep(0.1)

    def request_health(self) -> str:
        """The status of a new client's request, or why there is none."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), MAX_RESPONSE_S) as plain:
                context = self._context
                with context.wrap_socket(plain, server_hostname="127.0.0.1") if context else plain as connection:
                    connection.sendall(GET)
                    return connection.recv(4096)[9:12].decode() or "closed"
        except OSError as error:
            return repr(error)

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


@contextlib.contextmanager
def idle_connections(port: int, source: random.Random, count: int) -> Iterator[None]:
    """Open connections without waiting for the server, as an attacker would."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(10)
            with contextlib.suppress(OSError):  # the backlog may be full, and an older connection may be closed
                connection.connect(("127.0.0.1", port))
                connection.sendall(source.choice(list(KINDS.values())))
        yield


def attack(server: Server, source: random.Random, count: int) -> list[str]:
    """One round. Returns what went wrong."""
    problems = []
    with idle_connections(server.port, source, count):
        statuses = [server.request_health() for _ in range(NEW_CLIENTS)]
        problems += [f"a new client got {status}" for status in statuses if status != "200"]
        if server.num_files >= FILE_LIMIT:
            problems.append(f"{server.num_files} files are open; the limit is {FILE_LIMIT}")
        before = server.cpu_seconds
        time.sleep(0.5)
        if (used := (server.cpu_seconds - before) / 0.5) > MAX_IDLE_CPU:
            problems.append(f"the idle server used {used:.2f} of a CPU")
    return problems


def run(source: random.Random, count: int) -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * ROUND)), hard))
    succeeded, num_rounds = list[str](), max(1, count // (2 * ROUND))
    with tempfile.TemporaryDirectory() as folder:
        servers = [Server(Path(folder), with_tls) for with_tls in (False, True)]
        try:
            for server in servers:
                server.wait_until_ready()
                for number in range(num_rounds):
                    succeeded += [f"round {number}: {problem}" for problem in attack(server, source, ROUND)]
                if (code := server.stop()) != 0:
                    succeeded.append(f"the server exited with {code}")
                lines = server.log.read_text().splitlines()
                succeeded += [line for line in lines if "connections are open, the limit" not in line]
        finally:
            for server in servers:
                server.process.kill()
                server.process.wait()
    return {"connections": 2 * num_rounds * ROUND, "file_limit": FILE_LIMIT, "succeeded": succeeded}

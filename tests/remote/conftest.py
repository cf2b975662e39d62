"""Small real stores on loopback: S3 (moto), a web server, a container registry."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tcdeploy.remote import retry
from tests.ports import free_port
from tests.remote.faulty import Proxy, proxy, served

PLAN = "0123456789abcdef"
OTHER_PLAN = "fedcba9876543210"
HTPASSWD = "user:$2b$04$vIV0jUhZz9huini/DJHIr.A51QNLkw/hdq5tAPP.hIw8n7ehY59b2\n"  # bcrypt of "secret"


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short timeouts, and none of the user's credentials."""
    monkeypatch.setattr(retry, "BACKOFF_SECONDS", 0.02)
    monkeypatch.setattr(retry, "READ_TIMEOUT_SECONDS", 3.0)
    monkeypatch.setattr(retry, "CONNECT_TIMEOUT_SECONDS", 3.0)
    monkeypatch.setattr(retry, "TOTAL_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_", "DOCKER_", "HF_"))]:
        monkeypatch.delenv(name)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Path]:
    """A file of random bytes."""

    def make(size: int = 300_000, name: str = "bundle.tcb") -> Path:
        file = tmp_path / "bundles" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(os.urandom(size))
        return file

    return make


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    """An empty folder to pull into."""
    folder = tmp_path / "inbox"
    folder.mkdir()
    return folder


class ConcurrentRun(NamedTuple):
    results: list[Any]

    @classmethod
    def run(cls, operation: Callable[[], Any], times: int) -> ConcurrentRun:
        """Run `operation` in several threads at once; an exception counts as a result."""
        results: list[Any] = []

        def collect() -> None:
            try:
                results.append(operation())
            except Exception as error:
                results.append(error)

        threads = [threading.Thread(target=collect) for _ in range(times)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return cls(results)


# S3


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    """The port of an S3 server. Clients share botocore's service models, as clients of one session do.

    Every push, pull and find has its own session, and to parse the models takes most of its CPU time.
    """
    pytest.importorskip("s3fs")
    import botocore.session
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def s3(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """An S3 server with one empty bucket, behind a proxy; the environment points clients to it."""
    import boto3

    login = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in login.items():
        monkeypatch.setenv(name, value)
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{moto_port}/moto-api/reset", method="POST")):
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{moto_port}").create_bucket(Bucket="bucket")
    with proxy(moto_port) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server.host}")
        yield server


@pytest.fixture
def s3_client(s3: Proxy, moto_port: int) -> Any:
    """A client that bypasses the proxy, to inspect and modify stored objects."""
    import boto3

    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{moto_port}")


# HTTP


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Proxy, Path]]:
    """A folder served by a plain web server behind a proxy."""
    folder = tmp_path / "web"
    folder.mkdir()

    class QuietHandler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    with served(server), proxy(server.server_address[1]) as front:
        yield front, folder


# A container registry


class Registry(NamedTuple):
    port: int
    root: Path

    @property
    def blobs(self) -> Path:
        return self.root / "docker/registry/v2/blobs/sha256"

    def blob(self, sha256: str) -> Path:
        return self.blobs / sha256[:2] / sha256 / "data"


@pytest.fixture(scope="session")
def registry_binary() -> str:
    """Debian's docker-registry, installed if this user may; otherwise the tests skip."""
    if not shutil.which("docker-registry") and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update", "-q"], ["install", "-qy", "docker-registry"]):
            subprocess.run(
                ["apt-get", *command], capture_output=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            )
    return shutil.which("docker-registry") or pytest.skip(
        "needs Debian's docker-registry: apt-get install docker-registry"
    )


@contextlib.contextmanager
def running_registry(binary: str, folder: Path, htpasswd: str = "") -> Iterator[Registry]:
    port = free_port()
    root = folder / "storage"
    config = f"version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '127.0.0.1:{port}', secret: x}}\n"
    config += f"storage: {{filesystem: {{rootdirectory: '{root}'}}}}\n"
    if htpasswd:
        (folder / "htpasswd").write_text(htpasswd)
        config += f"auth: {{htpasswd: {{realm: here, path: '{folder / 'htpasswd'}'}}}}\n"
    (folder / "config.yml").write_text(config)
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([binary, "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        wait_for_registry(process, port, folder / "log")
        yield Registry(port, root)
    finally:
        process.terminate()
        process.wait()


def wait_for_registry(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(400):
        with contextlib.suppress(urllib.error.HTTPError, ConnectionError, urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/").close()
            return
        if process.poll() is not None:
            break
        time.sleep(0.025)
    raise AssertionError(f"the registry did not start: {log.read_text()}")


@pytest.fixture(scope="session")
def registry(registry_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(registry_binary, tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="session")
def guarded_registry(registry_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that requires the login user:secret."""
    with running_registry(registry_binary, tmp_path_factory.mktemp("guarded"), HTPASSWD) as running:
        yield running

"""`serve --start eager`: requests are answered before any program exists, and while programs replace eager steps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.compile_workers import compile_workers, wait_until_ended
from tests.conftest import TINY, TINY_FLAGS, RunCLI, remove_headers
from tests.fork_server import ForkServer
from tests.server.conftest import ServerProcess, serving

WARM_SECONDS = 240  # for the programs of four buckets on a busy machine
GREEDY = {"prompt": "A list is", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
SAMPLED = {
    "prompt": "def print_all(", "max_tokens": 60, "temperature": 0.8, "seed": 7, "ignore_eos": True,
    "frequency_penalty": 0.3,
}  # fmt: skip
LONG_PROMPT = {"prompt": "This module provides a list of names. " * 20, "max_tokens": 20, "temperature": 0}
REQUESTS = (GREEDY, SAMPLED, LONG_PROMPT)
FAILING_BUCKET = """
from tcdeploy.start import eager as eager_start
warm_bucket = eager_start.warm_bucket
def failing(runner, bucket, *arguments):
    if bucket.name == "decode:4":
        runner.eager_buckets.clear()
        raise RuntimeError("a planted fault")
    return warm_bucket(runner, bucket, *arguments)
eager_start.warm_bucket = failing
"""
WORKER_WITHOUT_A_BUCKET = """
import dataclasses
from tcdeploy.start import eager as eager_start
worker_recipe = eager_start.worker_recipe
eager_start.worker_recipe = lambda *arguments: dataclasses.replace(worker_recipe(*arguments), batch_sizes=(1,))
"""
BROKEN_COMPILER = "import os; os.environ['CXX'] = '/nonexistent/g++'"
NO_SHORT_CONFIG = """
from tcdeploy.start.workers import parallel as parallel_compile
from tcdeploy.errors import ModelError
def fail(*arguments):
    raise ModelError("the config cannot be shortened")
parallel_compile.shorten_config = fail
"""


def answer(server: ServerProcess, request: dict[str, Any]) -> str:
    response = httpx.post(f"{server.address}/v1/completions", json={"model": TINY, **request}, timeout=120)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] in ("length", "stop")
    text: str = choice["text"]
    return text


def readiness(server: ServerProcess, query: str = "") -> tuple[int, str]:
    response = httpx.get(f"{server.address}/ready{query}", timeout=60)
    return response.status_code, response.json().get("status", "")


def wait_until_warm(server: ServerProcess) -> None:
    deadline = time.monotonic() + WARM_SECONDS
    while readiness(server, "?level=warm")[0] != 200:
        assert time.monotonic() < deadline, (readiness(server, "?level=warm"), server.stderr)
        time.sleep(0.2)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, server: ServerProcess) -> list[str]:
    """Of a warm server."""
    return [answer(server, request) for request in REQUESTS]


@contextlib.contextmanager
def continuous_requests(server: ServerProcess, expected: list[str]) -> Iterator[list[str]]:
    """Send requests until the end of the block; each has to get the expected text. Yields the texts so far.

    A pause after each request leaves CPU time to the compile worker.
    """
    texts: list[str] = []
    is_over = threading.Event()

    def send(number: int) -> None:
        while not is_over.is_set():
            text = answer(server, REQUESTS[number])
            assert text == expected[number]
            texts.append(text)
            is_over.wait(0.5)

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        futures = [pool.submit(send, number) for number in range(len(REQUESTS))]
        try:
            yield texts
        finally:
            is_over.set()
        for future in futures:
            future.result()


def test_a_server_answers_before_programs_exist_and_loses_nothing_while_they_replace_eager_steps(
    tmp_path: Path, fork_server: ForkServer, answers: list[str], run_cli: RunCLI
) -> None:
    cache = tmp_path / "cache"
    with serving(tmp_path, cache, "--start", "eager", fork_server=fork_server) as server:
        assert [answer(server, request) for request in REQUESTS] == answers
        assert not list(cache.glob("manifests/*.json")), "the answers came before any program"
        assert readiness(server) == (200, "ready")
        assert readiness(server, "?level=warm") == (503, "eager: 0 of 4 buckets run their programs")
        assert (server.metric("start_tier", tier="eager"), server.metric("start_tier", tier="warm")) == (1, 0)
        assert server.metric("buckets", state="eager") == 4
        with continuous_requests(server, answers) as texts:
            wait_until_warm(server)
        assert len(texts) > 3
        assert (server.metric("start_tier", tier="eager"), server.metric("start_tier", tier="warm")) == (0, 1)
        assert server.metric("buckets", state="compiled") == 4
        assert [answer(server, request) for request in REQUESTS] == answers
        assert server.metric("recompiles_total") == server.metric("uncaptured_runs_total") == 0
        outcomes = {item["bucket"]: item["outcome"] for item in httpx.get(f"{server.address}/status").json()["buckets"]}
        assert set(outcomes.values()) == {"miss"}, "the compile worker compiled them for this start"
        warnings = [line for line in server.stderr if "warning" in line]
        assert warnings == [], "the short copy had the programs of all layers"
        assert not list(cache.glob(".start-*/finished.jsonl")), "the files of the compile worker are published"
    [manifest] = cache.glob("manifests/*.json")
    remove_headers(cache)
    warmed = run_cli("warm", TINY, *TINY_FLAGS, "--cache-dir", str(cache), "--require-hit")
    assert warmed.returncode == 0, warmed.stderr
    assert all(record["cold_seconds"] > 0 for record in json.loads(manifest.read_text())["buckets"])


def test_with_a_filled_cache_programs_replace_eager_steps_without_a_compile_worker(
    tmp_path: Path, warm_cache: Path, fork_server: ForkServer, answers: list[str]
) -> None:
    with serving(tmp_path, warm_cache, "--start", "eager", fork_server=fork_server) as server:
        with continuous_requests(server, answers):
            assert compile_workers(server.process.pid) == []
            wait_until_warm(server)
        assert [answer(server, request) for request in REQUESTS] == answers
        assert server.metric("recompiles_total") == 0
        server.wait_until_idle(10)
        deadline = time.monotonic() + 20
        while not server.metric("canary_cases", state="used"):
            assert time.monotonic() < deadline, "the canary is recorded when the programs run and the server is idle"
            time.sleep(0.1)


def test_a_bucket_that_fails_continues_to_run_eagerly(
    tmp_path: Path, warm_cache: Path, fork_server: ForkServer, answers: list[str]
) -> None:
    with serving(tmp_path, warm_cache, "--start", "eager", fork_server=fork_server, script=FAILING_BUCKET) as server:
        deadline = time.monotonic() + WARM_SECONDS
        while server.metric("buckets", state="compiled") < 3 or not server.metric("buckets", state="failed"):
            assert time.monotonic() < deadline, server.stderr
            time.sleep(0.2)
        with ThreadPoolExecutor(3) as pool:  # together they decode in the bucket that failed
            assert list(pool.map(lambda request: answer(server, request), REQUESTS)) == answers
        assert server.metric("bucket_steps_total", bucket="decode:4") > 0
        assert server.metric("recompiles_total") == 0 and server.metric("start_tier", tier="warm") == 0
        assert readiness(server)[0] == 200
        status, text = readiness(server, "?level=warm")
        assert status == 503 and "1 failed" in text
        assert any(
            "decode:4 continues to run eagerly: " in line and "a planted fault" in line for line in server.stderr
        )


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(BROKEN_COMPILER, "/nonexistent/g++", marks=pytest.mark.long),  # see programs/test_errors.py
        (NO_SHORT_CONFIG, "the config cannot be shortened"),
    ],
)
def test_a_compile_worker_that_fails_leaves_the_server_serving_eagerly(
    script: str, reason: str, tmp_path: Path, fork_server: ForkServer, answers: list[str]
) -> None:
    flags = ("--start", "eager")
    with serving(tmp_path, tmp_path / "cache", *flags, fork_server=fork_server, script=script) as server:
        deadline = time.monotonic() + WARM_SECONDS
        warnings: list[str] = []
        while not (warnings and "the compile worker failed" in readiness(server, "?level=warm")[1]):
            assert time.monotonic() < deadline, server.stderr
            time.sleep(0.2)
            warnings = [line for line in server.stderr if "the programs could not be compiled: " in line]
        [warning] = warnings
        assert warning.startswith("warning: ") and reason in warning
        assert readiness(server) == (200, "ready")
        assert [answer(server, request) for request in REQUESTS] == answers
        assert server.metric("start_tier", tier="eager") == 1 and server.metric("recompiles_total") == 0


@pytest.mark.long  # compiles the model twice
def test_a_program_that_the_worker_lacks_is_compiled_between_steps_with_a_warning(
    tmp_path: Path, fork_server: ForkServer, answers: list[str]
) -> None:
    cache, flags = tmp_path / "cache", ("--start", "eager")
    with serving(tmp_path, cache, *flags, fork_server=fork_server, script=WORKER_WITHOUT_A_BUCKET) as server:
        with continuous_requests(server, answers):
            wait_until_warm(server)
        assert server.metric("recompiles_total") == 0, "no request compiled"
        [warning] = [line for line in server.stderr if "its programs were not in the cache" in line]
        assert "decode:4: " in warning
    remove_headers(cache)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_the_compile_worker_ends_with_the_server(
    number: signal.Signals, code: int, tmp_path: Path, fork_server: ForkServer
) -> None:
    with serving(tmp_path, tmp_path / "cache", "--start", "eager", fork_server=fork_server) as server:
        workers = compile_workers(server.process.pid)
        assert len(workers) == 1
        time.sleep(1)
        os.kill(server.process.pid, number)
        assert server.process.wait(timeout=20) == code
        wait_until_ended(workers)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--programs", "aot"), "--start eager excludes --programs aot"),
        (("--tune-seconds", "5"), "--start eager excludes --tune-seconds"),
        (("--require-signed",), "--start eager excludes --require-signed"),
        (("--canary-strict",), "--start eager excludes --canary-strict"),
    ],
)
def test_options_that_an_eager_start_cannot_follow_are_refused(
    flags: tuple[str, ...], reason: str, tmp_path: Path, run_cli: RunCLI
) -> None:
    refused = run_cli("serve", TINY, "--port", "0", "--cache-dir", str(tmp_path / "cache"), "--start", "eager", *flags)
    assert refused.returncode == 2 and reason in refused.stderr, refused.stderr


def test_an_unknown_start_is_refused_and_an_unknown_level_of_ready_is_an_error(
    run_cli: RunCLI, server: ServerProcess
) -> None:
    refused = run_cli("serve", TINY, "--start", "soon")
    assert refused.returncode == 2 and "it must be warm or eager" in refused.stderr
    assert readiness(server, "?level=hot")[0] == 400
    assert readiness(server, "?level=warm") == (200, "ready"), "a warm start has no eager tier"

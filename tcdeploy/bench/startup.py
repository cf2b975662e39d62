"""`bench startup`: README's commands, timed by an HTTP client: `tcdeploy warm MODEL`, then `tcdeploy serve MODEL`.

`warm` is measured until its process ends; `serve` until /ready returns 200, and until a client has a streamed token.
The commands have flags only where the recipe differs from the defaults, and `--json`, which prints the seconds of the
stages. Of the variables `TCDEPLOY_*`, the processes get only those that all commands share. *Cold* refers to the
compile cache: torch's files may be in the page cache, so a freshly booted machine is slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import IO, Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from tcdeploy.bench.report import TCDEPLOY, Report, Row, describe_environment, describe_plan
from tcdeploy.bench.settings import StartupSettings
from tcdeploy.errors import NetworkError, TcdeployError
from tcdeploy.host.progress import Progress
from tcdeploy.planning.environment import detect_environment
from tcdeploy.planning.recipe import SHARED_VARIABLES, Recipe

TIMEOUT_S, STOP_TIMEOUT_S, POLL_S = 1800.0, 120.0, 0.02
PROMPT_IDS = range(3, 259)  # in the vocabulary of every model
_open = build_opener(ProxyHandler({})).open  # the server is on this machine


@dataclass(frozen=True)
class StartupRow(Row):
    """Seconds since the start of the process. `warm` has only `process_seconds`, `serve` only the other two.

    The `stage_seconds` of `serve` are in order and end with the first token; `other` is the time outside all stages.
    `import_seconds` are those of imports in all stages, by package. `weights_seconds`: how long threads read the
    weights, in parallel with other stages; None if transformers loaded them, or if they were not read.
    """

    start: str  # "cold": `warm` with an empty cache folder; "warm": `serve` from the filled one
    process_seconds: float | None
    ready_seconds: float | None
    first_token_seconds: float | None
    stage_seconds: dict[str, float]
    import_seconds: dict[str, float]
    weights_seconds: float | None = None


class StartedServer(NamedTuple):
    process: subprocess.Popen[Any]
    url: str
    ready_seconds: float  # until /ready returned 200; without that path, until the server answered
    first_token_seconds: float


def run(recipe: Recipe, settings: StartupSettings, progress: Progress) -> Report:
    """A row per start. Raises TcdeployError with the exit code of a process that fails."""
    with tempfile.TemporaryDirectory(prefix="tcdeploy-startup-") as folder:
        rows = []
        if settings.source == "cold":
            recipe = dataclasses.replace(recipe, cache_dir=folder)
            progress.stage("warm, empty cache")
            rows.append(_measure_warm(command("warm", recipe)))
        prompt = random.Random(settings.seed).choices(PROMPT_IDS, k=settings.prompt_length)
        for number in range(1, settings.warm_runs + 1):
            progress.stage(f"serve, start {number}")
            row, plan = _measure_serve(command("serve", recipe, "--port", "{port}"), prompt)
            rows.append(row)
    environment = describe_environment(detect_environment(recipe.device))  # imports torch
    return Report("startup", environment, describe_plan(plan), dataclasses.asdict(settings), rows)


def command(name: str, recipe: Recipe, *flags: str) -> list[str]:
    return [sys.executable, "-m", "tcdeploy", name, recipe.model, *recipe_flags(recipe), *flags, "--json"]


def recipe_flags(recipe: Recipe) -> list[str]:
    """Command-line flags for the fields of a recipe that differ from their defaults. The model is not a flag."""
    flags: list[str] = []
    for item in fields(recipe):
        value, name = getattr(recipe, item.name), item.name.replace("_", "-")
        if item.name == "model" or value is None or value == item.default:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return flags


def default_environment() -> dict[str, str]:
    """The variables of this process without settings of tcdeploy."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TCDEPLOY_") or name in SHARED_VARIABLES
    }


def _measure_warm(words: list[str]) -> StartupRow:
    start = time.perf_counter()
    completed = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=default_environment())
    seconds = time.perf_counter() - start
    if completed.returncode:
        raise _ended(completed.returncode)
    document = json.loads(completed.stdout)
    stages, packages = document["stage_seconds"], document.get("packages")
    if packages:  # built after the other stages
        stages = {**stages, "packages": packages["seconds"]}
    return StartupRow(TCDEPLOY, "cold", seconds, None, None, stages, *_reads(document))


def _measure_serve(words: list[str], prompt: list[int]) -> tuple[StartupRow, dict[str, Any]]:
    """The row, and the plan as JSON values."""
    with tempfile.TemporaryFile("w+") as out:
        with started_server(words, prompt, out, env=default_environment()) as server:
            pass
        out.seek(0)
        document = json.load(out)
    ready, first_token = server.ready_seconds, server.first_token_seconds
    stages = document["stage_seconds"]
    stages = {**stages, "other": max(0.0, ready - sum(stages.values())), "first token": first_token - ready}
    row = StartupRow(TCDEPLOY, "warm", None, ready, first_token, stages, *_reads(document))
    return row, document["plan"]


def _reads(document: dict[str, Any]) -> tuple[dict[str, float], float | None]:
    """The seconds of imports, and of reading the weights, in the JSON document of a start."""
    weights = document["weights_read"]
    return document["import_seconds"], weights and weights["seconds"]


@contextlib.contextmanager
def started_server(
    words: Sequence[str], prompt: Sequence[int], stdout: IO[str], **options: Any
) -> Iterator[StartedServer]:
    """Run a server until its first streamed token, and stop it after the block. `options`: of `subprocess.Popen`.

    The command's word {port} is replaced by a free port. Raises TcdeployError if the process ends earlier.
    """
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = str(unused.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    start = time.perf_counter()
    with subprocess.Popen([word.replace("{port}", port) for word in words], stdout=stdout, **options) as process:
        try:
            ready = wait_until(process, lambda: is_ready(url)) - start
            first_token = wait_until(process, lambda: _streams_token(url, prompt)) - start
            yield StartedServer(process, url, ready, first_token)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until(process: subprocess.Popen[Any], is_true: Callable[[], bool]) -> float:
    """The time (`perf_counter`) at which `is_true` returns True; an OSError counts as False."""
    deadline = time.perf_counter() + TIMEOUT_S
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            raise _ended(process.returncode)
        with contextlib.suppress(OSError):  # not listening yet
            if is_true():
                return time.perf_counter()
        time.sleep(POLL_S)
    raise NetworkError(f"the server was not ready after {TIMEOUT_S:.0f} s", "see its messages above")


def is_ready(url: str, path: str = "/ready") -> bool:
    """Whether the path returns 200, or does not exist: such a server is expected to listen once it is ready."""
    try:
        with _open(f"{url}{path}", timeout=10):
            return True
    except HTTPError as error:
        return error.code == 404


def _streams_token(url: str, prompt: Sequence[int]) -> bool:
    """Send the prompt, and receive its only token. False while the server loads its model (503)."""
    with _open(f"{url}/v1/models", timeout=10) as response:
        model = json.load(response)["data"][0]["id"]
    body = {"model": model, "prompt": [*prompt], "max_tokens": 1, "stream": True, "ignore_eos": True}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with _open(request, timeout=60) as response:
            return b"data: {" in response.read()
    except HTTPError as error:
        if error.code == 503:
            return False
        message = f"the server answered the first prompt with HTTP {error.code}: {error.read(300).decode()}"
        raise NetworkError(message, "see its messages above") from None


def _ended(exit_code: int) -> TcdeployError:
    error = TcdeployError(f"the measured process ended with exit code {exit_code}")
    error.hint = "see its error message above"
    error.exit_code = exit_code or 1  # a server that exits before it is stopped has failed, even with code 0
    return error

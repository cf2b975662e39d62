"""Runs `tcdeploy deploy --ray` in a process, and observes its replicas from outside."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import PACKAGE_FLAGS, TINY, cli_command, cli_environment
from tests.ports import free_port

START_TIMEOUT_S = 300
REPORT_INTERVAL_MS = 2000  # of Ray's metrics
MESSAGES = [{"role": "user", "content": "What is a list?"}]


def model_entry(cache: Path, name: str, **options: Any) -> dict[str, Any]:
    flags = " ".join((TINY, *PACKAGE_FLAGS, "--cache-dir", str(cache), "--served-model-name", name))
    return {"serve": flags, "ray_actor_options": {"num_cpus": 0.1}, **options}


@dataclass
class RayDeployment:
    process: subprocess.Popen[str]
    url: str
    metrics_url: str
    home: Path

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def replica_pids(self, name: str) -> list[int]:
        """Processes of replicas whose constructor has begun. Other tests' clusters have other sessions."""
        start = f"ray::ServeReplica:{name}:Model"
        return sorted(process.pid for process in descendants(self.process.pid) if title(process).startswith(start))

    def serving_replicas(self) -> set[str]:
        """Start times of the replicas that answer 32 requests for metrics, which are routed as others are."""
        texts = [httpx.get(f"{self.url}/metrics", timeout=60).text for _ in range(32)]
        return {line for text in texts for line in text.splitlines() if line.startswith("process_start_time_seconds ")}

    def reported(self, metric: str, **labels: str) -> dict[str, float]:
        """Values of a metric that Ray reports to Prometheus, by replica of the model."""
        families = text_string_to_metric_families(httpx.get(self.metrics_url, timeout=60).text)
        samples = [sample for family in families for sample in family.samples if sample.name == metric]
        return {sample.labels["replica"]: sample.value for sample in samples if labels.items() <= sample.labels.items()}


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below `pid`."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def title(process: psutil.Process) -> str:
    """The command line, which Ray's workers set to what they run. Empty if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def processes_of_home(home: Path) -> list[psutil.Process]:
    """Processes that were started with this HOME. Those of Ray have other parents once the command has ended.

    Ray's workers are missing, because their titles overwrite their environment. They end with their raylet, which is
    not missing.
    """
    return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("HOME") == str(home)]


@contextlib.contextmanager
def ray_deployment(folder: Path, model: dict[str, Any], **other: Any) -> Iterator[RayDeployment]:
    """Deploy, wait until the model is running, and stop with SIGTERM, which must remove everything."""
    file = folder / "models.yaml"
    http_options = {"host": "0.0.0.0", "port": free_port()}
    file.write_text(yaml.safe_dump({"http_options": http_options, "models": [model], **other}))
    command = cli_command("deploy", str(file), "--ray", "--json")
    ports = {f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("METRICS", "STATS")}
    environ = cli_environment(
        folder, RAY_USAGE_STATS_ENABLED="0", RAY_metrics_report_interval_ms=str(REPORT_INTERVAL_MS), **ports
    )
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        umask=0o022,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    stderr: list[str] = []
    threading.Thread(target=lambda: stderr.extend(process.stderr or ()), daemon=True).start()
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    below: list[psutil.Process] = []
    try:
        document = ""
        while not document.endswith("\n}\n"):
            line = process.stdout.readline()
            assert line, "".join(stderr)
            document += line
        timer.cancel()
        report = json.loads(document)
        [model], [metrics_url] = report["models"], report["metrics_urls"]
        yield RayDeployment(process, model["url"], metrics_url, folder)
        below = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 0, "".join(stderr)
        _, alive = psutil.wait_procs(below, timeout=30)
        assert not alive, f"processes are left: {alive}"
    finally:
        timer.cancel()
        for left in [*below, *descendants(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.kill()
        process.wait()


def wait_for(condition: Any, seconds: float) -> bool:
    """Whether the condition becomes true in time. Called twice a second: most conditions list all processes."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


@dataclass
class Load:
    """Clients that stream one chat after another. `outcomes`: (start, seconds, error or "") of each request."""

    deployment: RayDeployment
    max_tokens: int = 40
    pause_s: float = 0.0  # between two requests of a client
    model: str = "tiny"
    outcomes: list[tuple[float, float, str]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self, clients: int) -> Iterator[None]:
        self._stop.clear()
        threads = [threading.Thread(target=self._run) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(60)

    @property
    def errors(self) -> list[str]:
        return [error for _, _, error in self.outcomes if error]

    def _run(self) -> None:
        with self.deployment.client() as client:
            while not self._stop.is_set():
                start = time.monotonic()
                error = self._send(client)
                self.outcomes.append((start, time.monotonic() - start, error))
                self._stop.wait(self.pause_s)

    def _send(self, client: openai.OpenAI) -> str:
        """Returns "", or what the client saw. A stream must have all its tokens."""
        try:
            stream = client.chat.completions.create(
                model=self.model, messages=MESSAGES, max_tokens=self.max_tokens, stream=True, temperature=0,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )  # fmt: skip
            usage = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
            return "" if usage == [self.max_tokens] else f"the stream ended early: usage {usage}"
        except Exception as error:  # noqa: BLE001 - any error is an outcome
            return f"{type(error).__name__}: {error}"

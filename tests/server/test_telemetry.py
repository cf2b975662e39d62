"""Spans and histograms of requests, as a collector of OpenTelemetry receives them."""

from __future__ import annotations

import gzip
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tcdeploy.errors import UsageError
from tcdeploy.server.observe import telemetry
from tcdeploy.server.observe.request_log import LoggedGeneration, LoggedRequest
from tcdeploy.server.observe.telemetry import Telemetry
from tcdeploy.server.settings import ServerSettings, check_settings
from tests.fork_server import ForkServer
from tests.server.conftest import serving

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
USAGE = LoggedGeneration(
    12, 34, ("stop", ""), cached_tokens=8, first_token_seconds=0.25, seconds_per_token=0.03, is_streamed=True,
    parameters={"max_tokens": 40, "temperature": 0.5, "top_p": 1.0, "top_k": 0, "seed": None},
)  # fmt: skip


def logged(
    status: int = 200, path: str = "/v1/chat/completions", usage: LoggedGeneration | None = USAGE
) -> LoggedRequest:
    headers = [(b"traceparent", TRACEPARENT.encode()), (b"host", b"x")]
    return LoggedRequest("POST", path, status, 1000.5, 0.5, "id-1", headers, usage)


class Collector:
    """A server that keeps what it receives."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.bodies.append((self.path, body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[Any]:
        requests = [ExportTraceServiceRequest.FromString(body) for path, body in self.bodies if path == "/v1/traces"]
        return [
            span
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def resource(self) -> dict[str, Any]:
        [body] = [body for path, body in self.bodies if path == "/v1/traces"]
        return values_of(ExportTraceServiceRequest.FromString(body).resource_spans[0].resource.attributes)

    @property
    def histograms(self) -> dict[str, list[Any]]:
        requests = [ExportMetricsServiceRequest.FromString(body) for path, body in self.bodies if path == "/v1/metrics"]
        return {
            metric.name: list(metric.histogram.data_points)
            for request in requests
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.close()


def values_of(attributes: Any) -> dict[str, Any]:
    def value(item: Any) -> Any:
        kind = item.WhichOneof("value")
        return [value(part) for part in item.array_value.values] if kind == "array_value" else getattr(item, kind)

    return {attribute.key: value(attribute.value) for attribute in attributes}


def test_a_request_is_a_span_of_the_clients_trace_and_a_sample_of_each_histogram(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    exported = Telemetry(collector.endpoint, "tiny")
    exported.record(logged())
    exported.close()
    [span] = collector.spans
    assert (span.name, span.kind, span.status.code) == ("chat tiny", span.SPAN_KIND_SERVER, 0)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1_000_000_000_000, 1_000_500_000_000)
    assert values_of(span.attributes) == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "tcdeploy", "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny", "http.request.method": "POST", "url.path": "/v1/chat/completions",
        "http.response.status_code": 200, "tcdeploy.request.id": "id-1", "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True, "gen_ai.response.finish_reasons": ["stop", "abort"],
        "gen_ai.usage.input_tokens": 12, "gen_ai.usage.output_tokens": 34, "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.request.max_tokens": 40, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0, "gen_ai.response.time_to_first_chunk": 0.25,
    }  # fmt: skip
    assert collector.resource["service.name"] == "tcdeploy" and collector.resource["deployment.environment"] == "test"
    sums = {name: [point.sum for point in points] for name, points in collector.histograms.items()}
    assert sums == {
        "gen_ai.server.request.duration": [0.5], "gen_ai.server.time_to_first_token": [0.25],
        "gen_ai.server.time_per_output_token": [0.03],
    }  # fmt: skip
    assert list(collector.histograms["gen_ai.server.time_to_first_token"][0].explicit_bounds) == list(
        telemetry.FIRST_TOKEN_TIMES
    )


@pytest.mark.parametrize(("seed", "exported_seed"), [(-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1), (2**64 - 1, None)])
def test_a_seed_that_otlp_cannot_hold_is_left_out_without_an_error_in_the_log(
    collector: Collector, seed: int, exported_seed: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    exported = Telemetry(collector.endpoint, "tiny")
    exported.record(logged(usage=replace(USAGE, parameters={"seed": seed})))
    exported.record(logged())
    exported.close()
    first, _ = collector.spans
    assert values_of(first.attributes).get("gen_ai.request.seed") == exported_seed
    assert not [record for record in caplog.records if record.exc_info], "clients choose the seed"


def test_errors_have_a_span_and_a_duration_and_other_routes_have_none(collector: Collector) -> None:
    exported = Telemetry(collector.endpoint, "tiny")
    for request in (logged(503, usage=None), logged(400, "/v1/completions", None), logged(path="/tokenize")):
        exported.record(request)
    exported.close()
    rejected, invalid = collector.spans
    assert (rejected.status.code, invalid.status.code) == (rejected.status.STATUS_CODE_ERROR, 0)
    assert values_of(rejected.attributes)["error.type"] == "503"
    assert values_of(invalid.attributes)["gen_ai.operation.name"] == "text_completion"
    assert {name: len(points) for name, points in collector.histograms.items()} == {"gen_ai.server.request.duration": 2}


def test_a_collector_that_is_not_there_delays_the_exit_by_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "CLOSE_TIMEOUT_S", 0.2)
    exported = Telemetry("http://127.0.0.1:9", "tiny")
    exported.record(logged())
    start = time.monotonic()
    exported.close()
    assert time.monotonic() - start < 5, "the exporter itself retries for longer"


def test_a_server_exports_its_requests_and_logs_prompts_if_asked(
    collector: Collector, tmp_path: Path, warm_cache: Path, prepared_fork_server: ForkServer
) -> None:
    flags = ("--otlp-endpoint", collector.endpoint, "--log-requests", "json", "--log-prompts", "5")
    with serving(tmp_path, warm_cache, *flags, fork_server=prepared_fork_server) as server:
        body = {"prompt": ["Hello there", "Hello here"], "max_tokens": 3, "ignore_eos": True}
        headers = {"traceparent": TRACEPARENT, "x-request-id": "mine"}
        httpx.post(f"{server.address}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.wait(30) == 0
        [line] = [line for line in server.stderr if '"mine"' in line]
    [span] = collector.spans
    attributes = values_of(span.attributes)
    assert span.trace_id.hex() == TRACE_ID and attributes["tcdeploy.request.id"] == "mine"
    assert (attributes["gen_ai.usage.output_tokens"], attributes["gen_ai.request.max_tokens"]) == (6, 3)
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert '"prompts": ["Hello", "Hello"]' in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"otlp_endpoint": "localhost:4318"}, "not the base URL"),
        ({"otlp_endpoint": "http://localhost:4318/v1/traces"}, "not the base URL"),
        ({"log_prompts": -1, "log_requests": "text"}, "must be 0 or more"),
        ({"log_prompts": 5}, "needs --log-requests"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_settings(ServerSettings(**settings))

"""Exports a span and latencies of each generation request to an OpenTelemetry collector (--otlp-endpoint).

Names follow OpenTelemetry's semantic conventions for generative AI, which are not stable yet. The text of prompts and
outputs is not exported. opentelemetry-sdk sends batches over HTTP in its own threads, and reads its environment
variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from tcdeploy import __version__
from tcdeploy.server.observe.request_log import LoggedRequest

OPERATIONS = {
    "/v1/completions": "text_completion",
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages"), "chat"),
}
PROVIDER = "tcdeploy"
MAX_OTLP_INTEGER = 2**63 - 1
CLOSE_TIMEOUT_S = 3.0  # for the last export
# Limits of the histograms' buckets in seconds, those of the semantic conventions.
DURATIONS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_TIMES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TOKEN_TIMES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# Fields of SamplingParams that are attributes of the same name.
PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")


class Telemetry:
    """Used by the event loop only."""

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint`: base URL of the collector, such as http://localhost:4318."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        service = os.environ.get("OTEL_SERVICE_NAME") or "tcdeploy"
        resource = Resource.create({"service.name": service, "service.version": __version__})
        # shutdown_on_exit would wait for a collector that does not answer; `close` has a time limit
        self._tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint}/v1/traces")))
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{endpoint}/v1/metrics"))
        self._meter_provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._tracer = self._tracer_provider.get_tracer("tcdeploy", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._span_kind, self._error_status = SpanKind.SERVER, Status(StatusCode.ERROR)
        meter = self._meter_provider.get_meter("tcdeploy", __version__)

        def histogram(name: str, description: str, limits: Iterable[float]) -> Any:
            name = f"gen_ai.server.{name}"
            return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=list(limits))

        self._durations = histogram("request.duration", "Time to the last token", DURATIONS)
        self._first_token_times = histogram("time_to_first_token", "Time to the first token", FIRST_TOKEN_TIMES)
        self._token_times = histogram("time_per_output_token", "Time per token after the first", TOKEN_TIMES)

    def record(self, request: LoggedRequest) -> None:
        """Record a request that has ended, if it is a generation request."""
        operation = OPERATIONS.get(request.path)
        if operation is None or request.method != "POST":
            return
        common = {
            "gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER, "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            **({"error.type": str(request.status)} if request.status >= 400 else {}),
        }  # fmt: skip
        traced = [item for item in request.headers if item[0] in (b"traceparent", b"tracestate")]  # of W3C
        parent = {name.decode(): value.decode("latin-1") for name, value in traced}
        end_ns = int(request.end_time * 1e9)
        span = self._tracer.start_span(
            f"{operation} {self._model}", self._propagator.extract(parent), self._span_kind,
            {**common, **_span_attributes(request)}, start_time=end_ns - int(request.seconds * 1e9),
        )  # fmt: skip
        if request.status >= 500:
            span.set_status(self._error_status)
        span.end(end_ns)
        self._durations.record(request.seconds, common)
        if (generation := request.generation) is not None and request.status < 400:
            if generation.first_token_seconds is not None:
                self._first_token_times.record(generation.first_token_seconds, common)
            if generation.seconds_per_token is not None:
                self._token_times.record(generation.seconds_per_token, common)

    def close(self) -> None:
        """Export what is left, for at most CLOSE_TIMEOUT_S."""

        def shutdown() -> None:
            self._tracer_provider.shutdown()
            self._meter_provider.shutdown()

        thread = threading.Thread(target=shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_TIMEOUT_S)


def _span_attributes(request: LoggedRequest) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": request.method, "url.path": request.path, "http.response.status_code": request.status,
        "tcdeploy.request.id": request.request_id,
    }  # fmt: skip
    generation = request.generation
    if generation is None:
        return attributes
    attributes |= {
        "gen_ai.request.choice.count": len(generation.finish_reasons),
        "gen_ai.request.stream": generation.is_streamed,
        "gen_ai.response.finish_reasons": [reason or "abort" for reason in generation.finish_reasons],
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.output_tokens": generation.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
        **_parameters(generation.parameters),
    }
    if generation.first_token_seconds is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = generation.first_token_seconds
    return attributes


def _parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are set. A seed from 2^63 on is left out: OTLP has 64-bit integers with a sign."""
    return {
        f"gen_ai.request.{name}": value
        for name in PARAMETERS
        if (value := values.get(name)) is not None and value <= MAX_OTLP_INTEGER
    }

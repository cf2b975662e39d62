"""What /metrics tells: the names that vLLM's dashboards know, under our prefix, and what only we can say.

Counted where it happens, on the event loop; what the engine itself counts is read when somebody asks. A series whose
label is known is there from the start, at zero: whoever takes differences does not see the first of one that appears.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from tcdeploy.server.status import RecentStats

PREFIX = "tcdeploy:"
LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5, 5, 10, 30, 60)
INTER_TOKEN_BUCKETS_S = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were admitted")
        self.generation_tokens = self._counter("generation_tokens", "Tokens that were generated")
        self.request_success = self._counter("request_success", "Answers that ended, by reason", ["finished_reason"])
        for reason in ("stop", "length"):
            self.request_success.labels(reason)
        self.unknown_fields = self._counter("unknown_fields", "Fields of requests that nobody knows")
        self.broken_tool_calls = self._counter("broken_tool_calls", "Answers with a tool call that could not be read")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From request to first token", LATENCY_BUCKETS_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens", INTER_TOKEN_BUCKETS_S
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From request to its first step", LATENCY_BUCKETS_S
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From request to last token", LATENCY_BUCKETS_S
        )

    def _counter(self, name: str, documentation: str, labels: list[str] | None = None) -> Counter:
        return Counter(PREFIX + name, documentation, labels or [], registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, documentation, buckets=buckets, registry=self.registry)

    def register_service(self, service: Any) -> None:
        self.registry.register(_ServiceCollector(service))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Stopwatch:
    """The times of one answer."""

    def __init__(self, metrics: Metrics, recent: RecentStats) -> None:
        self._metrics, self._recent, self._start, self._last = metrics, recent, time.perf_counter(), 0.0

    def token(self, now: float, is_last: bool, queue_seconds: float | None = None) -> None:
        """One came at `now` (time.perf_counter)."""
        if queue_seconds is not None:
            self._metrics.queue_time.observe(queue_seconds)
        if self._last:
            self._metrics.inter_token_latency.observe(now - self._last)
            self._recent.inter_token_latency.append(now - self._last)
        else:
            self._metrics.time_to_first_token.observe(now - self._start)
            self._recent.time_to_first_token.append(now - self._start)
        self._last = now
        self._recent.token()
        self._metrics.generation_tokens.inc()
        if is_last:
            self._metrics.e2e_latency.observe(now - self._start)
            self._recent.finished += 1


class _ServiceCollector:
    """What is read, not counted: queue, cache, buckets, start-up."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        service = self._service
        stats = service.worker.stats
        yield _gauge("num_requests_waiting", "Answers that wait for a row", stats.waiting)
        yield _gauge("num_requests_running", "Answers that run", stats.running + stats.prefilling)
        yield _counter("num_preemptions", "Answers that had to wait again", {(): stats.preemptions})
        rejections = {(reason,): count for reason, count in service.admission.rejections.items()}
        yield _counter("admission_rejections", "Answers that were refused at the door", rejections, ("reason",))
        deployment = service.worker.deployment
        if deployment is None:
            return
        engine = deployment.engine
        yield _gauge(
            "kv_cache_usage_perc", "Share of the KV blocks in use", stats.used_blocks / engine.allocator.capacity
        )
        runner = engine.runner
        step_counts = {(bucket.name,): count for bucket, count in list(runner.step_counts.items())}
        yield _counter("bucket_hits", "Steps of each bucket", step_counts, ("bucket",))
        padding_tokens = {(bucket.name,): count for bucket, count in list(runner.padding_tokens.items())}
        yield _counter("bucket_padding_tokens", "Tokens computed for nobody", padding_tokens, ("bucket",))
        passes = {(): runner.uncaptured_runs}
        yield _counter("eager_fallbacks", "Passes without the graph that their bucket has: prompts scored", passes)
        missed_shapes = {(shape,): count for shape, count in service.missed_shapes.counts.items()}
        yield _counter(
            "missed_shapes", "Requests that no bucket holds whole, by the one that would", missed_shapes, ("bucket",)
        )
        yield _counter("recompiles", "Compiles since the server was ready", {(): service.compiles_since_ready()})
        stages = {(name,): seconds for name, seconds in deployment.stage_seconds.items()}
        yield _gauge("startup_seconds", "Seconds of each stage of the start", stages, ("stage",))
        outcomes = {record.bucket: record.outcome for record in deployment.records}
        info = InfoMetricFamily(PREFIX + "cache", "Where each bucket's programs came from")
        info.add_metric([], {name.replace(":", "_"): outcome for name, outcome in outcomes.items()})
        yield info


def _gauge(name: str, documentation: str, value: Any, labels: tuple[str, ...] = ()) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, documentation, labels=labels)
    for key, one in (value if isinstance(value, dict) else {(): value}).items():
        family.add_metric(key, one)
    return family


def _counter(name: str, documentation: str, values: Mapping[Any, float], labels: tuple[str, ...] = ()) -> Metric:
    family = CounterMetricFamily(PREFIX + name, documentation, labels=labels)
    for key, one in values.items():
        family.add_metric(key, one)
    return family

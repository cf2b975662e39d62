"""Prometheus metrics: vLLM's names with the prefix `tcdeploy:`, and counters of buckets, compiles and the cache.

Counters of requests and tokens are incremented by the event loop; figures of the engine and of admission are read at
each scrape. Series with known labels start at zero, because `rate()` would miss the first increment of a new series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from tcdeploy.server.figures import ModelFigures, ServerFigures
from tcdeploy.server.recent_stats import RecentStats
from tcdeploy.server.settings import StartTier

PREFIX = "tcdeploy:"
LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5, 5, 10, 30, 60)
INTER_TOKEN_BUCKETS_S = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)


class Metrics:
    """`recent` holds the latest samples for /status."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.recent = RecentStats()
        self.prompt_tokens = self._new_counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.generation_tokens = self._new_counter("generation_tokens", "Generated tokens")
        self.request_success = self._new_counter("request_success", "Finished requests by reason", ["finished_reason"])
        for reason in ("stop", "length"):
            self.request_success.labels(reason)
        self.unknown_fields = self._new_counter("unknown_fields", "Distinct unknown request fields")
        self.broken_tool_calls = self._new_counter("broken_tool_calls", "Outputs with a tool call that failed to parse")
        self.time_to_first_token = self._new_histogram(
            "time_to_first_token_seconds", "Time from request to first token", LATENCY_BUCKETS_S
        )
        self.inter_token_latency = self._new_histogram(
            "inter_token_latency_seconds", "Time between two tokens", INTER_TOKEN_BUCKETS_S
        )
        self.queue_time = self._new_histogram(
            "request_queue_time_seconds", "Time from request to its first step", LATENCY_BUCKETS_S
        )
        self.e2e_latency = self._new_histogram(
            "e2e_request_latency_seconds", "Time from request to last token", LATENCY_BUCKETS_S
        )

    def _new_counter(self, name: str, documentation: str, labels: list[str] | None = None) -> Counter:
        return Counter(PREFIX + name, documentation, labels or [], registry=self.registry)

    def _new_histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, documentation, buckets=buckets, registry=self.registry)

    def register_figures(self, collect: Callable[[], ServerFigures]) -> None:
        """Add the figures that `collect` returns to each scrape."""
        self.registry.register(_FiguresCollector(collect))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Stopwatch:
    """Times one choice, from its construction to its last token."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._start, self._last = metrics, time.perf_counter(), 0.0

    def observe_token(self, now: float, is_last: bool, queue_seconds: float | None = None) -> None:
        """A token arrived at `now` (time.perf_counter). `queue_seconds` is set on the first one."""
        metrics, recent = self._metrics, self._metrics.recent
        if queue_seconds is not None:
            metrics.queue_time.observe(queue_seconds)
        if self._last:
            metrics.inter_token_latency.observe(now - self._last)
            recent.inter_token_latency.append(now - self._last)
        else:
            metrics.time_to_first_token.observe(now - self._start)
            recent.time_to_first_token.append(now - self._start)
        self._last = now
        recent.observe_token()
        metrics.generation_tokens.inc()
        if is_last:
            metrics.e2e_latency.observe(now - self._start)
            recent.finished += 1


class _FiguresCollector:
    def __init__(self, collect: Callable[[], ServerFigures]) -> None:
        self._collect = collect

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        figures = self._collect()
        stats = figures.scheduler
        yield _gauge("num_requests_waiting", "Requests that wait for a decode row", stats.waiting)
        yield _gauge("num_requests_running", "Requests that run", stats.running + stats.prefilling)
        yield _counter("num_preemptions", "Preempted requests", {(): stats.preemptions})
        yield _counter(
            "admission_rejections", "Rejected requests by reason", _labelled(figures.rejections), ("reason",)
        )
        canary = figures.canary
        yield _counter("canary_runs", "Completed rounds of the canary", {(): canary.rounds})
        yield _counter(
            "canary_failures", "Canary cases whose result differed from the recorded one", {(): canary.failures}
        )
        yield _counter("canary_steps", "Steps run by the canary; not counted in other metrics", {(): canary.steps})
        yield _gauge(
            "canary_last_success_timestamp_seconds", "Unix time of the last round that passed", canary.last_success
        )
        cases = {"used": canary.cases_used, "not_repeatable": canary.cases_not_repeatable}
        yield _gauge(
            "canary_cases", "Canary cases; one whose first two runs differ is not used", _labelled(cases), ("state",)
        )
        if figures.model is not None:
            yield from _model_metrics(figures.model)


def _model_metrics(model: ModelFigures) -> Iterator[Metric]:
    yield _gauge("kv_cache_usage_perc", "Share of the KV blocks in use", model.kv_cache_usage)
    yield _counter("bucket_hits", "Steps by bucket", _labelled(model.step_counts), ("bucket",))
    yield _counter(
        "bucket_tokens", "Tokens or rows computed by bucket, padding included", _labelled(model.computed_tokens),
        ("bucket",),
    )  # fmt: skip
    yield _counter("bucket_padding_tokens", "Padding tokens by bucket", _labelled(model.padding_tokens), ("bucket",))
    yield from _step_metrics(model)
    yield _counter(
        "eager_fallbacks",
        "Forward passes of captured buckets that ran without a CUDA graph",
        {(): model.uncaptured_runs},
    )
    yield _counter("graph_captures", "CUDA graphs captured since the model was loaded", {(): model.late_captures})
    yield _gauge(
        "longest_graph_capture_seconds",
        "Longest CUDA graph capture since the model was loaded",
        model.longest_late_capture_seconds,
    )
    yield _counter("missed_shapes", "Requests beyond the largest bucket", _labelled(model.missed_shapes), ("bucket",))
    yield _counter("recompiles", "Compilations since the model was loaded", {(): model.recompiles})
    yield _gauge("startup_seconds", "Start-up time by stage", _labelled(model.stage_seconds), ("stage",))
    yield _gauge(
        "startup_import_seconds",
        "Time of imports during start-up, in all stages, by package",
        _labelled(model.import_seconds),
        ("package",),
    )
    if model.weights_gb_per_second is not None:
        yield _gauge("weights_read_gb_per_second", "Speed of reading the weight files", model.weights_gb_per_second)
    tiers = {tier: float(model.tier == tier) for tier in get_args(StartTier)}
    yield _gauge(
        "start_tier", "1 for the present tier: eager until all buckets run programs", _labelled(tiers), ("tier",)
    )
    buckets = {
        "compiled": len(model.records),
        "eager": model.num_buckets - len(model.records) - model.failed_buckets,
        "failed": model.failed_buckets,
    }
    yield _gauge(
        "buckets",
        "Buckets that run programs, eager steps for now, or eager steps for good",
        _labelled(buckets),
        ("state",),
    )
    info = InfoMetricFamily(PREFIX + "cache", "Cache outcome of each bucket")
    info.add_metric([], {record.bucket.replace(":", "_"): record.outcome for record in model.records})
    yield info


def _step_metrics(model: ModelFigures) -> Iterator[Metric]:
    totals = model.step_totals
    measured = {kind: total.measured_seconds for kind, total in totals.items()}
    predicted = {kind: total.predicted_seconds for kind, total in totals.items()}
    steps = {kind: total.steps for kind, total in totals.items()}
    corrections = _labelled(model.step_corrections)
    yield _counter("step_seconds", "Time of measured steps by kind", _labelled(measured), ("kind",))
    yield _counter("step_predicted_seconds", "Predicted time of the same steps", _labelled(predicted), ("kind",))
    yield _counter("steps_measured", "Steps whose time was measured, by kind", _labelled(steps), ("kind",))
    yield _gauge("step_correction", "Factor of the predictions by kind of step", corrections, ("kind",))
    yield _counter("late_launches", "Steps launched after the previous one had completed", {(): model.late_launches})


def _labelled(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(label,): value for label, value in values.items()}


def _gauge(name: str, documentation: str, value: Any, labels: tuple[str, ...] = ()) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, documentation, labels=labels)
    for label_values, sample in (value if isinstance(value, dict) else {(): value}).items():
        family.add_metric(label_values, sample)
    return family


def _counter(name: str, documentation: str, values: Mapping[Any, float], labels: tuple[str, ...] = ()) -> Metric:
    family = CounterMetricFamily(PREFIX + name, documentation, labels=labels)
    for label_values, sample in values.items():
        family.add_metric(label_values, sample)
    return family

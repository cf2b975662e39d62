"""Prometheus metrics: vLLM's names and labels, and counters of buckets, compiles and the cache.

Counters of requests and tokens are incremented by the event loop; figures of the engine and of admission are read at
each scrape. Series with known labels start at zero, because `rate()` would miss the first increment of a new series.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from tcdeploy.server.observe.status import ModelFigures, RecentStats, ServerFigures
from tcdeploy.server.settings import StartTier

DEFAULT_PREFIX = "tcdeploy:"
MODEL_LABEL = "model_name"
FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")
LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5, 5, 10, 30, 60)
INTER_TOKEN_BUCKETS_S = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
HTTP_DURATION_BUCKETS_S = (0.1, 0.5, 1)
TOKEN_BUCKETS = tuple(float(mantissa * 10**power) for power in range(6) for mantissa in (1, 2, 5))
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Metrics:
    """All series have the prefix, and the label `model_name`, except those about the process and about HTTP, as in
    vLLM. `recent` holds the latest samples for /status.
    """

    def __init__(self, model_name: str = "", prefix: str = DEFAULT_PREFIX) -> None:
        self.registry = CollectorRegistry()
        self.recent = RecentStats()
        self.model_name, self.prefix = model_name, prefix
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens that were in the prefix cache")
        self._request_success = Counter(
            f"{prefix}request_success", "Finished choices by reason", [MODEL_LABEL, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        for reason in FINISH_REASONS:
            self._request_success.labels(model_name, reason)
        self.unknown_fields = self._counter("unknown_fields", "Distinct unknown request fields")
        self.broken_tool_calls = self._counter("broken_tool_calls", "Outputs with a malformed tool call")
        self._add_histograms()
        self._add_process_metrics()

    def _add_histograms(self) -> None:
        latency, gap, tokens, choices = (
            functools.partial(self._histogram, buckets)
            for buckets in (LATENCY_BUCKETS_S, INTER_TOKEN_BUCKETS_S, TOKEN_BUCKETS, CHOICE_BUCKETS)
        )
        self.time_to_first_token = latency("time_to_first_token_seconds", "Time from request to first token")
        self.queue_time = latency("request_queue_time_seconds", "Time from request to its first step")
        self.prefill_time = latency("request_prefill_time_seconds", "Time from the first step to the first token")
        self.decode_time = latency("request_decode_time_seconds", "Time from the first token to the last")
        self.inference_time = latency("request_inference_time_seconds", "Time from the first step to the last token")
        self.e2e_latency = latency("e2e_request_latency_seconds", "Time from request to last token")
        self.inter_token_latency = gap("inter_token_latency_seconds", "Time between two tokens")
        self.time_per_output_token = gap(
            "request_time_per_output_token_seconds", "Mean time between two tokens of a choice"
        )
        self.request_prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens of a request")
        self.request_generation_tokens = tokens("request_generation_tokens", "Generated tokens of a choice")
        self.request_max_tokens = tokens(
            "request_params_max_tokens", "Largest number of tokens that a request allows for a choice"
        )
        self.request_n = choices("request_params_n", "Choices per prompt")

    def _add_process_metrics(self) -> None:
        # Names, labels and buckets of prometheus-fastapi-instrumentator, which vLLM uses. It needs FastAPI.
        self.http_requests = Counter(
            "http_requests", "HTTP requests by route, method and class of the status",
            ["handler", "method", "status"], registry=self.registry,
        )  # fmt: skip
        self.http_durations = Histogram(
            "http_request_duration_seconds", "Time until the end of the response, by route and method",
            ["handler", "method"], buckets=HTTP_DURATION_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def _counter(self, name: str, documentation: str) -> Counter:
        counter = Counter(self.prefix + name, documentation, [MODEL_LABEL], registry=self.registry)
        return counter.labels(self.model_name)

    def _histogram(self, buckets: tuple[float, ...], name: str, documentation: str) -> Histogram:
        histogram = Histogram(self.prefix + name, documentation, [MODEL_LABEL], buckets=buckets, registry=self.registry)
        return histogram.labels(self.model_name)

    def observe_request(self, prompt_lengths: Iterable[int], max_tokens: Iterable[int], num_choices: int) -> None:
        """An admitted request. `max_tokens`: limit of each choice. `num_choices`: per prompt."""
        for length in prompt_lengths:
            self.prompt_tokens.inc(length)
            self.request_prompt_tokens.observe(length)
        self.request_max_tokens.observe(max(max_tokens))
        self.request_n.observe(num_choices)

    def observe_prefix_cache(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The first token of a choice has arrived. `cached_tokens`: of its prompt, that were in the prefix cache."""
        self._prefix_queries.inc(prompt_tokens)
        self._prefix_hits.inc(cached_tokens)

    def observe_end(self, reason: str, num_tokens: int) -> None:
        """A choice has ended. `reason`: one of FINISH_REASONS."""
        self._request_success.labels(self.model_name, reason).inc()
        self.request_generation_tokens.observe(num_tokens)

    def register_figures(self, collect: Callable[[], ServerFigures]) -> None:
        """Add the figures that `collect` returns to each scrape."""
        self.registry.register(_FiguresCollector(collect, self.model_name, self.prefix))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Stopwatch:
    """Times one choice, from its construction to its last token. `counts_tokens`: whether its tokens are returned."""

    def __init__(self, metrics: Metrics, counts_tokens: bool = True) -> None:
        self._metrics, self._start, self._counts_tokens = metrics, time.perf_counter(), counts_tokens
        self._first_step = self._first = self._last = 0.0  # 0: not yet
        self._num_tokens = 0

    def observe_token(self, now: float, is_last: bool, queue_seconds: float | None = None) -> None:
        """A token arrived at `now` (time.perf_counter). `queue_seconds` is set on the first one."""
        metrics, recent = self._metrics, self._metrics.recent
        self._num_tokens += 1
        if queue_seconds is not None:
            metrics.queue_time.observe(queue_seconds)
            self._first_step = self._start + queue_seconds
        if self._last:
            metrics.inter_token_latency.observe(now - self._last)
            recent.inter_token_latency.append(now - self._last)
        else:
            metrics.time_to_first_token.observe(now - self._start)
            recent.first_tokens += 1
            recent.time_to_first_token.append(now - self._start)
            metrics.prefill_time.observe(now - (self._first_step or self._start))
            self._first = now
        self._last = now
        if self._counts_tokens:
            recent.observe_token()
            metrics.generation_tokens.inc()
        if is_last:
            self._observe_last(now)

    @property
    def first_token_seconds(self) -> float | None:
        return self._first - self._start if self._first else None

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time per token after the first one; None before the second one."""
        return (self._last - self._first) / (self._num_tokens - 1) if self._num_tokens > 1 else None

    def _observe_last(self, now: float) -> None:
        metrics = self._metrics
        metrics.e2e_latency.observe(now - self._start)
        metrics.decode_time.observe(now - self._first)
        metrics.inference_time.observe(now - (self._first_step or self._start))
        if (seconds_per_token := self.seconds_per_token) is not None:
            metrics.time_per_output_token.observe(seconds_per_token)
        metrics.recent.finished += 1


class _FiguresCollector:
    def __init__(self, collect: Callable[[], ServerFigures], model_name: str, prefix: str) -> None:
        self._collect, self._model_name, self._prefix = collect, model_name, prefix

    def collect(self) -> Iterator[Metric]:
        for metric in _server_metrics(self._collect()):
            metric.name = self._prefix + metric.name
            metric.samples = [
                sample._replace(
                    name=self._prefix + sample.name, labels={MODEL_LABEL: self._model_name, **sample.labels}
                )
                for sample in metric.samples
            ]
            yield metric


def _server_metrics(figures: ServerFigures) -> Iterator[Metric]:
    """Without the prefix, and without the label of the model."""
    stats, canary = figures.scheduler, figures.canary
    cases = {"used": canary.cases_used, "not_repeatable": canary.cases_not_repeatable}
    yield _gauge("num_requests_waiting", "Requests that wait for a decode row", stats.waiting)
    yield _gauge("num_requests_running", "Requests that run", stats.running + stats.prefilling)
    yield _counter("num_preemptions", "Preempted requests", stats.preemptions)
    yield _counter("admission_rejections", "Rejected requests by reason", figures.rejections, "reason")
    yield _counter("canary_runs", "Completed rounds of the canary", canary.rounds)
    yield _counter("canary_failures", "Canary cases whose result differed from the recorded one", canary.failures)
    yield _counter("canary_steps", "Steps run by the canary; not counted in other metrics", canary.steps)
    yield _gauge(
        "canary_last_success_timestamp_seconds",
        "Unix time of the last round that passed, or of the recording",
        canary.last_success,
    )
    yield _gauge("canary_cases", "Canary cases; one whose first two runs differ is not used", cases, "state")
    if figures.model is not None:
        yield from _model_metrics(figures.model)


def _model_metrics(model: ModelFigures) -> Iterator[Metric]:
    yield _gauge("kv_cache_usage_perc", "Share of the KV blocks in use", model.kv_cache_usage)
    yield _counter("bucket_steps", "Engine steps by the bucket that ran them", model.step_counts, "bucket")
    yield _counter(
        "bucket_tokens", "Tokens or rows computed by bucket, padding included", model.computed_tokens, "bucket"
    )
    yield _counter("bucket_padding_tokens", "Padding tokens by bucket", model.padding_tokens, "bucket")
    yield from _step_metrics(model)
    yield _counter(
        "eager_fallbacks", "Forward passes of captured buckets that ran without a CUDA graph", model.uncaptured_runs
    )
    yield _counter("graph_captures", "CUDA graphs captured since the model was loaded", model.late_captures)
    yield _gauge(
        "longest_graph_capture_seconds", "Longest CUDA graph capture since the model was loaded",
        model.longest_late_capture_seconds,
    )  # fmt: skip
    yield _counter("missed_shapes", "Requests beyond the largest bucket", model.missed_shapes, "bucket")
    yield _counter("recompiles", "Compilations since the model was loaded", model.recompiles)
    yield _gauge("startup_seconds", "Start-up time by stage", model.stage_seconds, "stage")
    yield _gauge(
        "startup_import_seconds", "Time of imports during start-up, in all stages, by package", model.import_seconds,
        "package",
    )  # fmt: skip
    if model.weights_gb_per_second is not None:
        yield _gauge("weights_read_gb_per_second", "Speed of reading the weight files", model.weights_gb_per_second)
    tiers = {tier: float(model.tier == tier) for tier in get_args(StartTier)}
    yield _gauge("start_tier", "1 for the present tier: eager until all buckets run programs", tiers, "tier")
    num_compiled, num_failed = len(model.records), model.failed_buckets
    buckets = {"compiled": num_compiled, "eager": model.num_buckets - num_compiled - num_failed, "failed": num_failed}
    yield _gauge("buckets", "Buckets that run programs, eager steps for now, or eager steps for good", buckets, "state")
    info = InfoMetricFamily("cache", "Whether the compile cache had the programs of each bucket (hit or miss)")
    info.add_metric([], {record.bucket.replace(":", "_"): record.outcome for record in model.records})
    yield info


def _step_metrics(model: ModelFigures) -> Iterator[Metric]:
    totals = model.step_totals
    measured = {kind: total.measured_seconds for kind, total in totals.items()}
    predicted = {kind: total.predicted_seconds for kind, total in totals.items()}
    steps = {kind: total.steps for kind, total in totals.items()}
    yield _counter("step_seconds", "Time of measured steps by kind", measured, "kind")
    yield _counter("step_predicted_seconds", "Predicted time of the same steps", predicted, "kind")
    yield _counter("steps_measured", "Steps whose time was measured, by kind", steps, "kind")
    yield _gauge("step_correction", "Factor of the predictions by kind of step", model.step_corrections, "kind")
    yield _counter("late_launches", "Steps launched after the previous one had completed", model.late_launches)


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, documentation: str, value: Any, label: str = ""
) -> Metric:
    """`value`: a number, or numbers by the values of `label`."""
    family = kind(name, documentation, labels=[label] if label else [])
    for label_value, number in value.items() if label else [("", value)]:
        family.add_metric([label_value] if label else [], number)
    return family


_counter = functools.partial(_family, CounterMetricFamily)
_gauge = functools.partial(_family, GaugeMetricFamily)

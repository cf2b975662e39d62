"""`bench throughput`: many requests through one engine, as a server runs them but without HTTP.

The loop submits the requests that have arrived, runs one engine step, and records the time of each token. Prompts are
random and of one length, and every output has its full length. With `concurrency`, that many clients each send their
next request when the previous one is complete, as in `bench serve`. stats.py defines the latencies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from tcdeploy.bench.baselines import BaselineModel
from tcdeploy.bench.engine_driver import Prompts, drain, submit
from tcdeploy.bench.report import Row
from tcdeploy.bench.session import Session, run_benchmark
from tcdeploy.bench.settings import ThroughputSettings
from tcdeploy.bench.stats import Latencies, RequestTiming, arrival_times, latencies
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import Sequence
from tcdeploy.errors import UsageError
from tcdeploy.programs.compile_stats import measure_compiles
from tcdeploy.start.deployment import Deployment

TIMELINE_POINTS = 400
MAX_SLEEP_SECONDS = 0.001  # while the engine is idle and the next request has not arrived


@dataclass(frozen=True)
class EngineCounts:
    """Counters of the engine over the run. `host_us` is per step, None on a CPU; compiles and captures should be 0."""

    steps: int
    peak_running: int
    preemptions: int
    prefix_hit_tokens: int
    host_us: float | None
    compiles: int
    captures: int


@dataclass(frozen=True)
class ThroughputRow(Row):
    """Rates are over `seconds`: from the start to the last token."""

    requests: int
    seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    requests_per_second: float
    latencies: Latencies
    request_timings: tuple[tuple[float, float, float], ...]  # seconds: arrival, first token, last token
    engine: EngineCounts | None = None
    timeline: tuple[tuple[float, int, int], ...] = ()  # seconds, running, waiting; downsampled


def measure(subject: str, deployment: Deployment, session: Session[ThroughputSettings]) -> Iterator[Row]:
    engine, settings = deployment.engine, session.settings
    prompts = Prompts(deployment.planned.architecture.vocab_size, settings.seed)
    session.progress.stage("requests")
    submit(engine, prompts.draw(settings.input_length), settings.output_length)  # an untimed first request
    drain(engine)
    engine.allocator.reset_prefix_cache()
    request_prompts = [prompts.draw(settings.input_length) for _ in range(settings.requests)]
    arrivals = arrival_times(settings.requests, settings.request_rate, settings.seed)
    captures_before, preemptions_before = len(engine.runner.graphs), engine.scheduler.stats.preemptions
    with measure_compiles() as compiled:
        loop = _LoadLoop(engine, settings.output_length, settings.concurrency)
        loop.run(list(zip(arrivals, request_prompts, strict=True)))
    counts = EngineCounts(
        steps=loop.steps,
        peak_running=max(running for _, running, _ in loop.timeline),
        preemptions=engine.scheduler.stats.preemptions - preemptions_before,
        prefix_hit_tokens=sum(sequence.prefix_hit_tokens for sequence in loop.sequences),
        host_us=loop.host_seconds / loop.steps * 1e6 if engine.plan.device == "cuda" else None,
        compiles=compiled.counts.compiles,
        captures=len(engine.runner.graphs) - captures_before,
    )
    yield _row(subject, list(loop.request_timings.values()), settings, counts, _downsample(loop.timeline))


@dataclass
class _LoadLoop:
    """One run of the loop, with its measurements. With `concurrency`, a request arrives when a client becomes free."""

    engine: Engine
    output_length: int
    concurrency: int = 0
    request_timings: dict[int, RequestTiming] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    timeline: list[tuple[float, int, int]] = field(default_factory=list)
    steps: int = 0
    host_seconds: float = 0.0
    _start_time: float = 0.0
    _next_index: int = 0  # of the next request to submit
    _in_flight: int = 0  # submitted requests that have not finished

    def run(self, requests: list[tuple[float, list[int]]]) -> None:
        """`requests`: (arrival in seconds, prompt), in order of arrival."""
        self._start_time = time.perf_counter()
        while self._next_index < len(requests) or self.engine.has_work:
            self._submit_due(requests)
            if self.engine.has_work:
                self._step()
            else:
                time.sleep(min(MAX_SLEEP_SECONDS, max(0.0, requests[self._next_index][0] - self._now())))

    def _now(self) -> float:
        return time.perf_counter() - self._start_time

    def _submit_due(self, requests: list[tuple[float, list[int]]]) -> None:
        while self._next_index < len(requests):
            (arrival, prompt), now = requests[self._next_index], self._now()
            must_wait = self._in_flight == self.concurrency if self.concurrency else arrival > now
            if must_wait:
                return
            sequence = submit(self.engine, prompt, self.output_length)
            self.sequences.append(sequence)
            self.request_timings[sequence.request_id] = RequestTiming(now if self.concurrency else arrival)
            self._next_index += 1
            self._in_flight += 1

    def _step(self) -> None:
        wait_before, start = self.engine.device_wait_seconds, self._now()
        tokens = self.engine.step()
        now = self._now()
        for token in tokens:
            self.request_timings[token.request_id].token_times.append(now)
            self._in_flight -= bool(token.finish_reason)
        stats = self.engine.scheduler.stats
        self.timeline.append((now, stats.running, stats.waiting))
        self.steps += 1
        self.host_seconds += now - start - (self.engine.device_wait_seconds - wait_before)


def measure_baseline(baseline: BaselineModel, session: Session[ThroughputSettings]) -> Iterator[Row]:
    """Batches as large as the plan's largest decode bucket, one after another. Raises UsageError for other arrivals."""
    settings = session.settings
    if settings.concurrency or not math.isinf(settings.request_rate):
        raise UsageError(
            "it runs whole batches, and supports neither --request-rate nor --concurrency", "remove these options"
        )
    prompts = Prompts(session.planned.architecture.vocab_size, settings.seed)
    largest = baseline.plan.decode_buckets[-1].size
    request_prompts = [prompts.draw(settings.input_length) for _ in range(settings.requests)]
    batches = [request_prompts[start : start + largest] for start in range(0, len(request_prompts), largest)]
    for batch in (batches[0], batches[-1]):  # warm up both batch sizes, untimed
        baseline.token_times(batch, settings.output_length)
    request_timings: list[RequestTiming] = []
    batch_start = 0.0
    for batch in batches:
        token_times = [batch_start + seconds for seconds in baseline.token_times(batch, settings.output_length)]
        request_timings += [RequestTiming(0.0, token_times) for _ in batch]
        batch_start = token_times[-1]
    yield _row(baseline.name, request_timings, settings)


def _row(
    subject: str, request_timings: list[RequestTiming], settings: ThroughputSettings,
    counts: EngineCounts | None = None, timeline: tuple[tuple[float, int, int], ...] = (),
) -> ThroughputRow:  # fmt: skip
    output_tokens = sum(len(timing.token_times) for timing in request_timings)
    seconds = max(timing.token_times[-1] for timing in request_timings)
    output_rate = output_tokens / seconds
    num_requests = len(request_timings)
    total_rate = output_rate + num_requests * settings.input_length / seconds
    return ThroughputRow(
        subject, num_requests, seconds, output_rate, total_rate, num_requests / seconds, latencies(request_timings),
        tuple((timing.arrival, timing.token_times[0], timing.token_times[-1]) for timing in request_timings),
        counts, timeline,
    )  # fmt: skip


def _downsample(timeline: list[tuple[float, int, int]]) -> tuple[tuple[float, int, int], ...]:
    """At most TIMELINE_POINTS points at equal strides, and the last point."""
    stride = -(-len(timeline) // TIMELINE_POINTS)
    return (*timeline[:-1:stride], timeline[-1])


run = partial(run_benchmark, "throughput", measure, measure_baseline)

"""Many requests through one engine: how many tokens a second, and what each request waited for.

The loop is a server without its HTTP: submit what has arrived, step, note who got a token and when. `traffic.py` says
which percentiles are over what. Prompts are random, all of one length, and every answer runs to its full length. With
`concurrency` so many clients each wait for their answer before they ask again, as in `bench serve`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tcdeploy.bench.baselines import PlainModel
from tcdeploy.bench.report import Report, Row, price_per_million
from tcdeploy.bench.session import Session, begin, make_report
from tcdeploy.bench.settings import ThroughputSettings
from tcdeploy.bench.engine_driver import Prompts, count_captured_graphs, drain, is_apart, submit
from tcdeploy.bench.traffic import Latencies, Served, arrivals, latencies
from tcdeploy.compiler.ledger import measure_compiles
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.sequence import Sequence
from tcdeploy.errors import UsageError
from tcdeploy.pipeline import Deployment
from tcdeploy.progress import Progress
from tcdeploy.planning.recipe import Recipe

TIMELINE_POINTS = 400
LONGEST_NAP = 0.001  # seconds, while nothing runs and the next request is yet to come


@dataclass(frozen=True)
class EngineCounts:
    """What the engine did meanwhile. `host_us` per step is None on a CPU; recompiles and captures should be 0."""

    steps: int
    peak_running: int
    preemptions: int
    prefix_hit_tokens: int
    host_us: float | None
    compiles: int
    captures: int


@dataclass(frozen=True)
class ThroughputRow(Row):
    """Rates are over `seconds`: from the beginning to the last token."""

    requests: int
    seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    requests_per_second: float
    latencies: Latencies
    price_per_million_tokens: float | None
    served: tuple[tuple[float, float, float], ...]  # seconds: arrival, first token, last token
    engine: EngineCounts | None = None
    timeline: tuple[tuple[float, int, int], ...] = ()  # seconds, running, waiting; thinned


def run(recipe: Recipe, settings: ThroughputSettings, progress: Progress) -> Report:
    session = begin(recipe, settings, progress)
    rows = session.measure(
        lambda subject, deployment: measure(subject, deployment, session, settings),
        lambda plain: measure_plain(plain, session, settings),
    )
    return make_report(session, "throughput", settings, rows)


def measure(subject: str, deployment: Deployment, session: Session, settings: ThroughputSettings) -> Iterator[Row]:
    engine = deployment.engine
    prompts = Prompts(deployment.architecture.vocab_size, settings.seed)
    session.progress.stage("requests")
    submit(engine, prompts.draw(settings.input_length), settings.output_length)  # the first of its kind, untimed
    drain(engine)
    engine.allocator.reset_prefix_cache()
    waiting = [prompts.draw(settings.input_length) for _ in range(settings.requests)]
    times = arrivals(settings.requests, settings.request_rate, settings.seed)
    captured_before, preemptions_before = count_captured_graphs(engine), engine.scheduler.stats.preemptions
    with measure_compiles() as compiled:
        drive = _Drive(engine, settings.output_length, settings.concurrency)
        drive.run(list(zip(times, waiting, strict=True)))
    counts = EngineCounts(
        steps=drive.steps,
        peak_running=max(running for _, running, _ in drive.timeline),
        preemptions=engine.scheduler.stats.preemptions - preemptions_before,
        prefix_hit_tokens=sum(sequence.prefix_hit_tokens for sequence in drive.sequences),
        host_us=drive.host_seconds / drive.steps * 1e6 if is_apart(engine) else None,
        compiles=compiled.counts.compiles,
        captures=count_captured_graphs(engine) - captured_before,
    )
    yield _row(subject, list(drive.served.values()), settings, counts, _thinned(drive.timeline))


@dataclass
class _Drive:
    """One run of the loop, and what it noted. Requests are (arrival, prompt), in the order of arrival.

    With clients that wait, a request arrives when one of them is free.
    """

    engine: Engine
    output_length: int
    concurrency: int = 0
    served: dict[int, Served] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    timeline: list[tuple[float, int, int]] = field(default_factory=list)
    steps: int = 0
    host_seconds: float = 0.0
    _begin: float = 0.0
    _next: int = 0  # of the requests that are yet to arrive
    _open: int = 0  # answers that are not complete

    def run(self, requests: list[tuple[float, list[int]]]) -> None:
        self._begin = time.perf_counter()
        while self._next < len(requests) or self.engine.has_work:
            self._submit_arrived(requests)
            if self.engine.has_work:
                self._step()
            else:
                time.sleep(min(LONGEST_NAP, max(0.0, requests[self._next][0] - self._now())))

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def _submit_arrived(self, requests: list[tuple[float, list[int]]]) -> None:
        while self._next < len(requests):
            (arrival, prompt), now = requests[self._next], self._now()
            is_early = self._open == self.concurrency if self.concurrency else arrival > now
            if is_early:
                return
            sequence = submit(self.engine, prompt, self.output_length)
            self.sequences.append(sequence)
            self.served[sequence.request_id] = Served(now if self.concurrency else arrival)
            self._next += 1
            self._open += 1

    def _step(self) -> None:
        waited_before, start = self.engine.device_wait_seconds, self._now()
        tokens = self.engine.step()
        now = self._now()
        for token in tokens:
            self.served[token.request_id].token_times.append(now)
            self._open -= bool(token.finish_reason)
        stats = self.engine.scheduler.stats
        self.timeline.append((now, stats.running, stats.waiting))
        self.steps += 1
        self.host_seconds += now - start - (self.engine.device_wait_seconds - waited_before)


def measure_plain(plain: PlainModel, session: Session, settings: ThroughputSettings) -> Iterator[Row]:
    """Batches as large as our largest decode bucket, one after another. Raises UsageError for arrivals over time."""
    if settings.concurrency or not math.isinf(settings.request_rate):
        raise UsageError(
            "it serves whole batches, and knows no arrivals over time", "without --request-rate and --concurrency"
        )
    prompts = Prompts(session.decided.architecture.vocab_size, settings.seed)
    largest = plain.plan.decode_buckets[-1].size
    drawn = [prompts.draw(settings.input_length) for _ in range(settings.requests)]
    batches = [drawn[start : start + largest] for start in range(0, len(drawn), largest)]
    for batch in (batches[0], batches[-1]):  # every shape there is, untimed
        plain.token_seconds(batch, settings.output_length)
    served: list[Served] = []
    now = 0.0
    for batch in batches:
        times = [now + one for one in plain.token_seconds(batch, settings.output_length)]
        served += [Served(0.0, times) for _ in batch]
        now = times[-1]
    yield _row(plain.name, served, settings)


def _row(
    subject: str,
    served: list[Served],
    settings: ThroughputSettings,
    counts: EngineCounts | None = None,
    timeline: tuple[tuple[float, int, int], ...] = (),
) -> ThroughputRow:
    output = sum(len(one.token_times) for one in served)
    seconds = max(one.token_times[-1] for one in served)
    rate = output / seconds
    return ThroughputRow(
        subject,
        len(served),
        seconds,
        rate,
        (output + len(served) * settings.input_length) / seconds,
        len(served) / seconds,
        latencies(served),
        price_per_million(rate, settings.price_per_hour),
        tuple((one.arrival, one.token_times[0], one.token_times[-1]) for one in served),
        counts,
        timeline,
    )


def _thinned(timeline: list[tuple[float, int, int]]) -> tuple[tuple[float, int, int], ...]:
    """Enough for a picture: every n-th point, and the last."""
    stride = -(-len(timeline) // TIMELINE_POINTS)
    return (*timeline[:-1:stride], timeline[-1])

"""Summaries of samples, the latencies of requests and their goodput, and arrival times. Does not import torch.

`Summary` includes the sample size, because the p99 of 20 values says little more than their maximum. Never take a
percentile of percentiles: pool the values.

Time to first token (TTFT) and mean time per output token (TPOT) have one value per request, and their percentiles are
over requests. Inter-token latency (ITL) has one value per pair of consecutive tokens, and its percentiles are over
all pairs of all requests, which shows streams that stall. The three populations are never mixed.

Goodput is the rate of requests that meet all limits on their latency. `ttft`, `tpot` and `e2e` are the values of `vllm
bench serve --goodput` (there `e2el`). `itl` is the longest gap between two tokens of the request: its mean would be
`tpot` again, and a percentile over the gaps of one response is close to the longest. A response of one token has no
gaps, so it meets `tpot` and `itl`. A request that failed meets nothing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tcdeploy.errors import UsageError
from tcdeploy.host.percentile import percentile


@dataclass(frozen=True)
class Summary:
    """Percentiles, mean and largest of `count` values, in the unit of the values."""

    count: int
    p10: float
    p50: float
    p90: float
    p99: float
    mean: float
    max: float


def median(values: Iterable[float]) -> float:
    return percentile(values, 50)


def summarize(values: Iterable[float]) -> Summary:
    values = list(values)
    p10, p50, p90, p99 = (percentile(values, q) for q in (10, 50, 90, 99))
    return Summary(len(values), p10, p50, p90, p99, math.fsum(values) / len(values), max(values))


def summarize_ms(seconds: Iterable[float]) -> Summary:
    """A summary in milliseconds."""
    return summarize(value * 1e3 for value in seconds)


def intervals(times: list[float]) -> list[float]:
    """Differences of consecutive times: n times give n - 1 intervals."""
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


@dataclass
class RequestTiming:
    """Arrival of a request and times of its tokens on the host, in seconds on the benchmark's clock."""

    arrival: float
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft_seconds(self) -> float:
        """Measured from the arrival, so it includes any wait before submission."""
        return self.token_times[0] - self.arrival

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


@dataclass(frozen=True)
class Latencies:
    """The last two are None if every response was a single token."""

    first_token_ms: Summary  # TTFT, over requests
    request_gap_ms: Summary | None  # TPOT, over requests
    token_gap_ms: Summary | None  # ITL, over all pairs of consecutive tokens


SLO_METRICS: dict[str, Callable[[RequestTiming], float]] = {  # seconds
    "ttft": lambda timing: timing.ttft_seconds,
    "itl": lambda timing: max(intervals(timing.token_times), default=0.0),
    "tpot": lambda timing: timing.tpot_seconds or 0.0,
    "e2e": lambda timing: timing.token_times[-1] - timing.arrival,
}


@dataclass(frozen=True)
class Goodput:
    """`share` is of all requests, including those that failed."""

    requests: int
    share: float
    requests_per_second: float


def arrival_times(requests: int, rate: float, seed: int) -> list[float]:
    """Seconds since the start: all 0 for an infinite rate, otherwise a Poisson process of `rate` per second."""
    if math.isinf(rate):
        return [0.0] * requests
    rng = random.Random(seed)
    return list(itertools.accumulate(rng.expovariate(rate) for _ in range(requests)))


def latencies(request_timings: Iterable[RequestTiming]) -> Latencies:
    request_timings = list(request_timings)
    tpots = [timing.tpot_seconds for timing in request_timings if timing.tpot_seconds is not None]
    token_intervals = [seconds for timing in request_timings for seconds in intervals(timing.token_times)]
    return Latencies(
        summarize_ms(timing.ttft_seconds for timing in request_timings),
        summarize_ms(tpots) if tpots else None,
        summarize_ms(token_intervals) if token_intervals else None,
    )


def parse_slo(text: str) -> dict[str, float]:
    """Limits in ms by metric, of a text such as "ttft=200,itl=50". ServeSettings checks names and values."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            limits[name.strip()] = float(value)
        except ValueError:
            raise UsageError(f"--slo has {part!r}, expected METRIC=MILLISECONDS", "--slo ttft=200,itl=50") from None
    return limits


def measure_goodput(
    succeeded: Sequence[RequestTiming], slo: dict[str, float], num_requests: int, seconds: float
) -> Goodput:
    """`num_requests` includes failures; `slo` gives limits in ms."""
    good = sum(all(SLO_METRICS[name](timing) * 1e3 <= limit for name, limit in slo.items()) for timing in succeeded)
    return Goodput(good, good / num_requests, good / seconds)

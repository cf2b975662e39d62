"""Requests that arrive over time, and the percentiles of what happened to each. No torch.

Three populations, never mixed. The time to the first token is one value a request, and so is a request's mean gap
between tokens: percentiles over requests. A gap between two tokens is one value a gap: percentiles over all gaps of all
requests, which is where a stream that stopped for a moment shows. No percentile here is of percentiles or of averages
over something else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from tcdeploy.bench.stats import Summary, intervals, summarise


@dataclass
class RequestTiming:
    """A request on the benchmark's clock, in seconds: when it arrived, and when each token was on the host."""

    arrival: float
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft_seconds(self) -> float:
        """Counted from the arrival, so that waiting to be submitted is in it."""
        return self.token_times[0] - self.arrival

    @property
    def tpot_seconds(self) -> float | None:
        """None for a single token, which has no gap."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


@dataclass(frozen=True)
class Latencies:
    """`None` where every answer was a single token."""

    first_token_ms: Summary  # over requests
    request_gap_ms: Summary | None  # over requests: each one's mean gap between tokens
    token_gap_ms: Summary | None  # over all gaps of all requests


def arrival_times(requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the beginning: all at 0 for an infinite rate, else a Poisson process, whose gaps are exponential."""
    if math.isinf(rate):
        return [0.0] * requests
    source, now, found = random.Random(seed), 0.0, []
    for _ in range(requests):
        now += source.expovariate(rate)
        found.append(now)
    return found


def latencies(request_timings: Iterable[RequestTiming]) -> Latencies:
    request_timings = list(request_timings)
    means = [one.tpot_seconds * 1e3 for one in request_timings if one.tpot_seconds is not None]
    all_gaps = [gap * 1e3 for one in request_timings for gap in intervals(one.token_times)]
    return Latencies(
        summarise(one.ttft_seconds * 1e3 for one in request_timings),
        summarise(means) if means else None,
        summarise(all_gaps) if all_gaps else None,
    )

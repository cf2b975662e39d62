"""Arrival times of requests, and the percentiles of their latencies. Does not import torch.

Time to first token (TTFT) and mean time per output token (TPOT) have one value per request, and their percentiles are
over requests. Inter-token latency (ITL) has one value per pair of consecutive tokens, and its percentiles are over
all pairs of all requests, which shows streams that stall. The three populations are never mixed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from tcdeploy.bench.stats import Summary, intervals, summarize_ms


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

    @property
    def e2e_seconds(self) -> float:
        """From the arrival to the last token."""
        return self.token_times[-1] - self.arrival


@dataclass(frozen=True)
class Latencies:
    """The last two are None if every response was a single token."""

    first_token_ms: Summary  # TTFT, over requests
    request_gap_ms: Summary | None  # TPOT, over requests
    token_gap_ms: Summary | None  # ITL, over all pairs of consecutive tokens


def arrival_times(requests: int, rate: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """Seconds since the start: all 0 for an infinite rate, otherwise random intervals with mean 1 / `rate`.

    The intervals follow a gamma distribution with shape `burstiness`, as in `vllm bench serve`. Their coefficient of
    variation is 1 / sqrt(burstiness): 1 is a Poisson process, less is burstier, more is steadier.
    """
    if math.isinf(rate):
        return [0.0] * requests
    rng = random.Random(seed)
    gaps = (rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(requests))
    return list(itertools.accumulate(gaps))


def latencies(request_timings: Iterable[RequestTiming]) -> Latencies:
    request_timings = list(request_timings)
    tpots = [timing.tpot_seconds for timing in request_timings if timing.tpot_seconds is not None]
    token_intervals = [seconds for timing in request_timings for seconds in intervals(timing.token_times)]
    return Latencies(
        summarize_ms(timing.ttft_seconds for timing in request_timings),
        summarize_ms(tpots) if tpots else None,
        summarize_ms(token_intervals) if token_intervals else None,
    )

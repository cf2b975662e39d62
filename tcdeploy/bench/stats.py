"""Summaries of samples. Does not import torch.

`Summary` includes the sample size, because the p99 of 20 values says little more than their maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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

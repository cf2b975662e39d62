"""Means, medians and percentiles. Does not import torch.

A percentile is the value at rank q/100 * (n - 1) of the sorted sample, counted from 0 and linearly interpolated
(numpy's default). `Summary` includes the sample size, because the p99 of 20 values says little more than their
maximum. Never take a percentile of percentiles: pool the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tcdeploy.errors import TcdeployError


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


def percentile(values: Iterable[float], q: float) -> float:
    """The q-th percentile, q from 0 to 100. Raises TcdeployError if there are no values."""
    ordered = sorted(values)
    if not ordered:
        raise TcdeployError("no values to take a percentile of", "measure more steps or requests")
    rank = (len(ordered) - 1) * q / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


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

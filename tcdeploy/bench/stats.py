"""Medians and percentiles of what was measured. No torch.

A percentile is the value at rank q/100 * (n - 1) of the sorted sample, counted from 0 and interpolated between its two
neighbours: numpy's default. Each `Summary` says how many values it is of, since the p99 of twenty is only their largest
but one in disguise. A percentile of percentiles is nobody's percentile: pool the values instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tcdeploy.errors import TcdeployError


@dataclass(frozen=True)
class Summary:
    """Of `count` values, in their own unit."""

    count: int
    p10: float
    p50: float
    p90: float
    p99: float


def percentile(values: Iterable[float], q: float) -> float:
    """q from 0 to 100. Raises TcdeployError for no values at all: there is no honest number to give."""
    ordered = sorted(values)
    if not ordered:
        raise TcdeployError("a percentile of nothing was asked for", "measure more steps or requests")
    rank = (len(ordered) - 1) * q / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def median(values: Iterable[float]) -> float:
    return percentile(values, 50)


def summarise(values: Iterable[float]) -> Summary:
    kept = list(values)
    return Summary(len(kept), *(percentile(kept, q) for q in (10, 50, 90, 99)))


def intervals(times: list[float]) -> list[float]:
    """Between neighbours: n times give n - 1."""
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]

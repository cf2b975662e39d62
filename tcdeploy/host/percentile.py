"""Percentiles, interpolated linearly as numpy's default. Does not import torch.

Never take a percentile of percentiles: pool the values.
"""

from __future__ import annotations

from collections.abc import Iterable

from tcdeploy.errors import TcdeployError


def percentile(values: Iterable[float], q: float) -> float:
    """The value at rank q/100 * (n - 1), q from 0 to 100. Raises TcdeployError if there are no values."""
    ordered = sorted(values)
    if not ordered:
        raise TcdeployError("no values to take a percentile of", "measure more steps or requests")
    rank = (len(ordered) - 1) * q / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)

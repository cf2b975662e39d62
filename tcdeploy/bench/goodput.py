"""Goodput: the rate of requests that meet all limits on their latency. Does not import torch.

`ttft`, `tpot` and `e2e` are the values of `vllm bench serve --goodput` (there `e2el`): time to the first token, mean
time per token after it, and time to the last token. `itl` is the longest gap between two tokens of the request. Its
mean would be `tpot` again, and a percentile over the gaps of one response is close to the longest. A response of one
token has no gaps, so it meets `tpot` and `itl`. A request that failed meets nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tcdeploy.bench.stats import intervals
from tcdeploy.bench.traffic import RequestTiming
from tcdeploy.errors import UsageError

SLO_METRICS: dict[str, Callable[[RequestTiming], float]] = {  # seconds
    "ttft": lambda timing: timing.ttft_seconds,
    "itl": lambda timing: max(intervals(timing.token_times), default=0.0),
    "tpot": lambda timing: timing.tpot_seconds or 0.0,
    "e2e": lambda timing: timing.e2e_seconds,
}


@dataclass(frozen=True)
class Goodput:
    """`share` is of all requests, including those that failed."""

    requests: int
    share: float
    requests_per_second: float


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

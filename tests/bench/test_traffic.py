"""Latencies of requests and their goodput, computed by hand, and their arrival times."""

from __future__ import annotations

import math

import pytest

from tcdeploy.bench.serve_settings import ServeSettings
from tcdeploy.bench.stats import Goodput, RequestTiming, arrival_times, latencies, measure_goodput, parse_slo
from tcdeploy.errors import UsageError


def test_requests_and_token_intervals_are_separate_populations() -> None:
    """A request with many short intervals and one with a single long interval have the same weight over requests."""
    quick = RequestTiming(0.0, [1.0 + 0.001 * number for number in range(101)])
    slow = RequestTiming(1.0, [4.0, 5.0])
    pooled = latencies([quick, slow])
    assert (pooled.first_token_ms.count, pooled.first_token_ms.p50) == (2, pytest.approx(2000))
    assert pooled.request_gap_ms and pooled.token_gap_ms
    assert (pooled.request_gap_ms.count, pooled.request_gap_ms.p50) == (2, pytest.approx(500.5))
    assert (pooled.token_gap_ms.count, pooled.token_gap_ms.p50) == (101, pytest.approx(1.0))


def test_time_to_first_token_starts_at_the_arrival() -> None:
    assert latencies([RequestTiming(2.0, [2.5])]).first_token_ms.p50 == pytest.approx(500)


def test_single_tokens_have_no_intervals() -> None:
    single = latencies([RequestTiming(0.0, [1.0]), RequestTiming(0.0, [2.0])])
    assert single.request_gap_ms is None and single.token_gap_ms is None
    mixed = latencies([RequestTiming(0.0, [1.0]), RequestTiming(0.0, [2.0, 2.5])])
    assert mixed.request_gap_ms and mixed.request_gap_ms.count == 1


def test_at_an_infinite_rate_all_requests_arrive_at_once() -> None:
    assert arrival_times(3, math.inf, seed=1) == [0.0, 0.0, 0.0]


def test_arrivals_are_a_poisson_process_of_that_rate() -> None:
    times = arrival_times(20_000, rate=4.0, seed=1)
    assert times == sorted(times) and times[0] > 0
    assert times[-1] == pytest.approx(5000, rel=0.03)
    intervals = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert sum(gap > 0.25 for gap in intervals) / len(intervals) == pytest.approx(math.exp(-1), abs=0.01)


def test_arrivals_are_reproducible_from_the_seed() -> None:
    assert arrival_times(5, 1.0, seed=7) == arrival_times(5, 1.0, seed=7) != arrival_times(5, 1.0, seed=8)


QUICK = RequestTiming(1.0, [1.1, 1.12, 1.14])  # TTFT 100 ms, gaps of 20 ms
STALLED = RequestTiming(1.0, [1.1, 1.101, 1.16])  # mean gap 30 ms, longest 59 ms
SINGLE = RequestTiming(1.0, [1.3])


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"ttft": 150.0}, 2),
        ({"tpot": 31.0}, 3),
        ({"itl": 31.0}, 2),
        ({"itl": 60.0}, 3),
        ({"e2e": 150.0}, 1),
        ({"ttft": 150.0, "itl": 31.0}, 1),
        ({"ttft": 1.0}, 0),
    ],
)
def test_a_request_is_good_if_it_meets_all_limits(slo: dict[str, float], good: int) -> None:
    measured = measure_goodput([QUICK, STALLED, SINGLE], slo, num_requests=4, seconds=2.0)
    assert measured == Goodput(good, good / 4, good / 2)


def test_limits_are_parsed_and_checked() -> None:
    assert parse_slo("ttft=200, itl=50") == {"ttft": 200.0, "itl": 50.0}
    for text in ("ttft", "ttft=fast", ""):
        with pytest.raises(UsageError, match="expected METRIC=MILLISECONDS"):
            parse_slo(text)
    with pytest.raises(UsageError, match="unknown metric 'e2el'") as raised:
        ServeSettings(url="http://x", slo=parse_slo("e2el=9"))
    assert raised.value.hint == "use ttft, itl, tpot, e2e"
    with pytest.raises(UsageError, match="limit of ttft is 0.0"):
        ServeSettings(url="http://x", slo=parse_slo("ttft=0"))

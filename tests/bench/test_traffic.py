"""Who waited how long, by hand."""

from __future__ import annotations

import math

import pytest

from tcdeploy.bench.traffic import RequestTiming, arrival_times, latencies


def test_each_population_is_its_own() -> None:
    """One request of many short gaps beside one of a single long gap: over requests they weigh the same."""
    quick = RequestTiming(0.0, [1.0 + 0.001 * number for number in range(101)])
    slow = RequestTiming(1.0, [4.0, 5.0])
    found = latencies([quick, slow])
    assert (found.first_token_ms.count, found.first_token_ms.p50) == (2, pytest.approx(2000))
    assert found.request_gap_ms and found.token_gap_ms
    assert (found.request_gap_ms.count, found.request_gap_ms.p50) == (2, pytest.approx(500.5))
    assert (found.token_gap_ms.count, found.token_gap_ms.p50) == (101, pytest.approx(1.0))


def test_waiting_before_it_was_submitted_counts() -> None:
    assert latencies([RequestTiming(2.0, [2.5])]).first_token_ms.p50 == pytest.approx(500)


def test_answers_of_one_token_have_no_gaps() -> None:
    found = latencies([RequestTiming(0.0, [1.0]), RequestTiming(0.0, [2.0])])
    assert found.request_gap_ms is None and found.token_gap_ms is None
    mixed = latencies([RequestTiming(0.0, [1.0]), RequestTiming(0.0, [2.0, 2.5])])
    assert mixed.request_gap_ms and mixed.request_gap_ms.count == 1


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_times(3, math.inf, seed=1) == [0.0, 0.0, 0.0]


def test_arrivals_are_a_poisson_process_of_that_rate() -> None:
    times = arrival_times(20_000, rate=4.0, seed=1)
    assert times == sorted(times) and times[0] > 0
    assert times[-1] == pytest.approx(5000, rel=0.03)
    intervals = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert sum(gap > 0.25 for gap in intervals) / len(intervals) == pytest.approx(math.exp(-1), abs=0.01)


def test_a_seed_repeats_them() -> None:
    assert arrival_times(5, 1.0, seed=7) == arrival_times(5, 1.0, seed=7) != arrival_times(5, 1.0, seed=8)

"""Percentiles equal numpy's, and an empty sample is an error."""

from __future__ import annotations

import random

import numpy
import pytest

from tcdeploy.bench.stats import intervals, median, summarize, summarize_ms
from tcdeploy.errors import TcdeployError
from tcdeploy.host.percentile import percentile


def test_percentiles_are_those_of_numpy() -> None:
    source = random.Random(3)
    for count in (1, 2, 3, 7, 20, 101):
        values = [source.expovariate(1.0) for _ in range(count)]
        for q in (0, 1, 10, 33.3, 50, 90, 99, 100):
            assert percentile(values, q) == pytest.approx(float(numpy.percentile(values, q)), rel=1e-12)


def test_known_values() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1]) == 2.5
    assert percentile(range(101), 99) == 99
    assert percentile([0, 10], 90) == 9


def test_values_need_no_order_and_are_not_modified() -> None:
    values = [5.0, 1.0, 3.0]
    assert percentile(values, 50) == 3
    assert values == [5.0, 1.0, 3.0]


def test_a_percentile_of_an_empty_sample_is_an_error() -> None:
    with pytest.raises(TcdeployError, match="no values"):
        percentile([], 50)


def test_a_summary_takes_an_iterator_and_counts_it() -> None:
    summary = summarize(float(value) for value in range(11))
    assert (summary.count, summary.p10, summary.p50, summary.p90, summary.p99) == (11, 1, 5, 9, pytest.approx(9.9))
    assert (summarize([1.0, 6.0, 2.0]).mean, summarize([1.0, 6.0, 2.0]).max) == (3, 6)
    assert summarize_ms([0.5, 0.25, 0.125]).p50 == 250


def test_there_is_one_interval_less_than_times() -> None:
    assert intervals([1.0, 1.5, 4.0]) == [0.5, 2.5]
    assert intervals([1.0]) == intervals([]) == []

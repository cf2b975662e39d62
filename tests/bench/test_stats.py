"""Percentiles are numpy's, and of nothing there are none."""

from __future__ import annotations

import random

import numpy
import pytest

from tcdeploy.bench.stats import intervals, median, percentile, summarise
from tcdeploy.errors import TcdeployError


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


def test_the_order_of_values_changes_nothing_and_the_values_stay() -> None:
    values = [5.0, 1.0, 3.0]
    assert percentile(values, 50) == 3
    assert values == [5.0, 1.0, 3.0]


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(TcdeployError, match="of nothing"):
        percentile([], 50)


def test_a_summary_takes_an_iterator_and_counts_it() -> None:
    found = summarise(float(value) for value in range(11))
    assert (found.count, found.p10, found.p50, found.p90, found.p99) == (11, 1, 5, 9, pytest.approx(9.9))


def test_gaps_are_one_fewer_than_times() -> None:
    assert intervals([1.0, 1.5, 4.0]) == [0.5, 2.5]
    assert intervals([1.0]) == intervals([]) == []

"""Distributions of lengths, from fixed seeds."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from tcdeploy.bench.lengths import SHAREGPT_MAX_TOKENS, SHAREGPT_MIN_TOKENS, draw_lengths


def draw(distribution: str, spread: float, count: int, nominal: tuple[int, int] = (512, 128)) -> list[tuple[int, int]]:
    rng = random.Random(3)
    return [draw_lengths(distribution, *nominal, spread, rng) for _ in range(count)]


def test_without_spread_all_lengths_are_nominal() -> None:
    assert set(draw("uniform", 0.0, 20)) == {(512, 128)}


def test_lengths_are_uniform_within_the_spread_and_independent() -> None:
    pairs = draw("uniform", 0.5, 20_000)
    inputs, outputs = zip(*pairs, strict=True)
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (256, 768, 64, 192)
    assert statistics.fmean(inputs) == pytest.approx(512, rel=0.01)
    assert statistics.pstdev(inputs) == pytest.approx(512 / math.sqrt(12), rel=0.02)
    assert abs(statistics.correlation(inputs, outputs)) < 0.03


def test_a_length_is_at_least_one_token() -> None:
    assert set(draw("uniform", 0.9, 50, nominal=(1, 1))) == {(1, 1)}


def test_sharegpt_lengths_have_the_documented_means_and_medians() -> None:
    inputs, outputs = zip(*draw("sharegpt", 0.0, 50_000), strict=True)
    assert statistics.fmean(inputs) == pytest.approx(217, rel=0.02)
    assert statistics.fmean(outputs) == pytest.approx(198, rel=0.02)
    assert (statistics.median(inputs), statistics.median(outputs)) == pytest.approx((97, 126), rel=0.03)
    assert min(inputs) == SHAREGPT_MIN_TOKENS and max(inputs) == max(outputs) == SHAREGPT_MAX_TOKENS

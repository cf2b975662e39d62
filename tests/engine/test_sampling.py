"""Tokens are drawn with the probabilities that were asked for, and a seed repeats them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tcdeploy.engine.sampling import make_generator, sample
from tcdeploy.engine.sequence import SamplingParams

CPU = torch.device("cpu")
PROBABILITIES = (0.05, 0.4, 0.15, 0.3, 0.1)
LOGITS = torch.tensor(PROBABILITIES, dtype=torch.float64).log()
DRAWS = 3000


def draw(logits: Tensor, count: int, **asked: Any) -> list[int]:
    """Tokens drawn one after another from one generator, seeded unless asked otherwise."""
    params = SamplingParams(**{"temperature": 1.0, "seed": 1, **asked})
    generator = make_generator(params, CPU)
    assert generator is not None
    return [sample(logits, params, generator) for _ in range(count)]


def chi_square(tokens: list[int], probabilities: dict[int, float]) -> float:
    """Pearson's statistic; tokens outside `probabilities` make it infinite. Above 30 for 4 degrees: p below 1e-5."""
    counts = Counter(tokens)
    if set(counts) - set(probabilities):
        return float("inf")
    total = sum(probabilities.values())
    expected = {token: len(tokens) * share / total for token, share in probabilities.items()}
    return sum((counts[token] - wanted) ** 2 / wanted for token, wanted in expected.items())


def test_draws_follow_the_softmax() -> None:
    assert chi_square(draw(LOGITS, DRAWS), dict(enumerate(PROBABILITIES))) < 30


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_or_flattens(temperature: float) -> None:
    expected = {token: share ** (1 / temperature) for token, share in enumerate(PROBABILITIES)}
    tokens = draw(LOGITS, DRAWS, temperature=temperature)
    assert chi_square(tokens, expected) < 30
    assert chi_square(tokens, dict(enumerate(PROBABILITIES))) > 100


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_top_k_keeps_exactly_the_k_best(k: int) -> None:
    best = sorted(range(5), key=lambda token: -PROBABILITIES[token])[:k]
    tokens = draw(LOGITS, DRAWS, top_k=k)
    assert set(tokens) == set(best)
    assert chi_square(tokens, {token: PROBABILITIES[token] for token in best}) < 30


@pytest.mark.parametrize("k", [0, 6, 10**9])
def test_top_k_of_none_or_more_than_there_are_keeps_all(k: int) -> None:
    assert draw(LOGITS, 200, top_k=k) == draw(LOGITS, 200)


@pytest.mark.parametrize(
    ("p", "kept"),
    [
        (1e-9, {1}),  # the first token stays, always
        (0.2, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.71, {1, 3, 2}),
        (0.84, {1, 3, 2}),
        (0.86, {1, 3, 2, 4}),
        (0.94, {1, 3, 2, 4}),
        (0.96, {0, 1, 2, 3, 4}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, kept: set[int]) -> None:
    tokens = draw(LOGITS, DRAWS, top_p=p)
    assert set(tokens) == kept
    assert chi_square(tokens, {token: PROBABILITIES[token] for token in kept}) < 30


@pytest.mark.parametrize(("p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_a_set_that_reaches_p_exactly_is_enough(p: float, kept: int) -> None:
    assert len(set(draw(torch.zeros(4), 400, top_p=p))) == kept


def test_top_p_counts_what_top_k_left() -> None:
    """Of 0.4 and 0.3, the first alone has 4/7: enough for 0.5, which it would not be of all five."""
    assert set(draw(LOGITS, 400, top_k=2, top_p=0.5)) == {1}
    assert set(draw(LOGITS, 400, top_p=0.5)) == {1, 3}


def test_top_p_counts_what_temperature_made() -> None:
    assert set(draw(LOGITS, 400, temperature=0.25, top_p=0.7)) == {1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_may_come_in_any_float_type_and_are_left_as_they_were(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 8.0, -4.0, 7.0], dtype=dtype)
    before = logits.clone()
    assert draw(logits, 50, top_k=3, top_p=0.9) == draw(logits.float(), 50, top_k=3, top_p=0.9)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-2, 1e-6, 1e-30, 1e-38, 1e-42, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * 5
    best = int(logits.argmax())
    logits[best] += 1.0
    for shift in (0.0, 25.0, -25.0):
        assert set(draw(logits + shift, 10, temperature=temperature)) == {best}


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(3))
    assert draw(logits, 30, seed=7) == draw(logits, 30, seed=7)
    assert draw(logits, 30, seed=7) != draw(logits, 30, seed=8)
    assert draw(logits, 30, seed=0) == draw(logits, 30, seed=0)


def test_without_a_seed_each_sequence_draws_its_own() -> None:
    logits = torch.zeros(500)
    assert draw(logits, 30, seed=None) != draw(logits, 30, seed=None)


def test_a_seeded_sequence_does_not_depend_on_who_draws_beside_it() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(3))
    params, other = SamplingParams(temperature=1.0, seed=7), SamplingParams(temperature=1.0, seed=9)
    mine, theirs = make_generator(params, CPU), make_generator(other, CPU)
    assert mine is not None and theirs is not None
    tokens = []
    for _ in range(30):
        tokens.append(sample(logits, params, mine))
        sample(logits, other, theirs)
        torch.rand(1)
    assert tokens == draw(logits, 30, seed=7)


def test_a_greedy_sequence_has_no_generator() -> None:
    assert make_generator(SamplingParams(temperature=0.0, seed=1), CPU) is None

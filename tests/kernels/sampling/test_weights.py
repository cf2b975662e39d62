"""The arithmetic of sampling is that of torch, to the last bits, for every exponent of float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tcdeploy.kernels.sampling.weights import natural_log, relative_weights, sortable, to_units, unit_bits


def every_exponent(mantissas: int) -> Tensor:
    """Positive float32 numbers of every exponent, subnormal ones included, with zero, random and full mantissas."""
    exponents = torch.arange(255, dtype=torch.int32)[:, None] << 23
    random = torch.randint(2**23, (255, mantissas), dtype=torch.int32, generator=torch.Generator().manual_seed(4))
    random[:, 0], random[:, 1] = 0, 2**23 - 1
    return (exponents | random).view(torch.float32).flatten()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-3, 300.0])
def test_weights_are_exponentials(temperature: float) -> None:
    differences = every_exponent(64)
    weights = relative_weights(
        -differences[None], torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[temperature]], dtype=torch.float64)
    )[0]
    expected = (-differences.double() / temperature).exp()
    counted = expected > 2.0**-64
    assert counted.sum() > 5000
    assert ((weights - expected).abs()[counted] / expected[counted]).max() < 2e-13
    assert (weights[~counted] <= 2.0**-63).all()
    assert (weights[differences == 0] == 1.0).all()


def test_a_weight_never_exceeds_that_of_the_largest_logit() -> None:
    scores = torch.linspace(-40, 0, 200_001)[None]
    weights = relative_weights(scores, torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    assert (weights.diff() > 0).all()
    assert weights.max() == 1.0


def test_units_of_the_largest_weight_fill_the_integer() -> None:
    for vocab_size in (1, 1000, 128_256, 248_320):
        units = to_units(torch.ones(1, vocab_size, dtype=torch.float64))
        assert (units == 2 ** unit_bits(vocab_size)).all()
        assert 2**60 < int(units.sum()) < 2**62


def test_logarithms_are_those_of_torch() -> None:
    numbers = every_exponent(64).double()
    numbers = torch.cat([numbers[numbers > 1e-300], torch.tensor([1.0, math.sqrt(2), math.nextafter(1, 2), 1e-300])])
    expected = numbers.log()
    assert ((natural_log(numbers) - expected).abs() <= 1e-15 * expected.abs().clamp(min=1.0)).all()


def test_sortable_integers_order_scores_as_numbers() -> None:
    scores = every_exponent(4)
    scores = torch.cat([scores, -scores, torch.tensor([float("inf"), float("-inf")])])
    ordered = scores[sortable(scores[None])[0].argsort(stable=True)]
    assert (ordered.diff().nan_to_num(0) >= 0).all()
    nan = torch.tensor([[float("nan"), -float("nan"), 0.0, -0.0, float("inf")]])
    assert sortable(nan)[0].tolist() == [2**31 - 1, 2**31 - 1, 0, 0, 0x7F800000]

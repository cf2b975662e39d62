"""The reference of the parity check computes in a higher precision than that of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from tcdeploy.engine.check.precise_math import has_convolutions, precise_math


@pytest.mark.parametrize("as_keyword", [True, False])
@pytest.mark.parametrize(("low", "high"), [("bfloat16", "float32"), ("float32", "float64")])
def test_a_convolution_with_a_bias(low: str, high: str, as_keyword: bool) -> None:
    torch.manual_seed(1)
    low_dtype, high_dtype = getattr(torch, low), getattr(torch, high)
    x, weight, bias = (torch.randn(*shape, dtype=low_dtype) for shape in ((1, 8, 20), (8, 1, 4), (8,)))

    def convolve(x: Tensor) -> Tensor:
        if as_keyword:
            return functional.conv1d(x, weight=weight, bias=bias, padding=3, groups=8)
        return functional.conv1d(x, weight, bias, padding=3, groups=8)

    with precise_math(low_dtype, high_dtype):
        y = convolve(x + 0)  # the sum has the high precision, and conv1d gets different dtypes
    expected = functional.conv1d(x.double(), weight.double(), bias.double(), padding=3, groups=8)
    assert y.dtype == high_dtype
    assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_results_do_not_depend_on_the_handling_of_convolutions() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.SiLU(), nn.LayerNorm(8)).to(torch.bfloat16)
    assert not has_convolutions(model) and has_convolutions(nn.Conv1d(4, 4, 3))
    results = []
    for handles_convolutions in (True, False):
        with torch.no_grad(), precise_math(torch.bfloat16, torch.float32, handles_convolutions):
            results.append(model(torch.tensor([[3, 1, 4]])))
    assert torch.equal(*results) and results[0].dtype == torch.float32
    assert_close(results[0], model.float()(torch.tensor([[3, 1, 4]])), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("as_embedding", [True, False])
def test_an_in_place_operation_changes_its_tensor(as_embedding: bool) -> None:
    """CTRL scales its embeddings in place. They have the higher precision; other results have the lower one."""
    weight = torch.rand(5, 8)
    with precise_math(torch.float32, torch.float64):
        x = functional.embedding(torch.tensor([3, 1]), weight) if as_embedding else weight[[3, 1]]
        x *= 1 / 3
        x[0] = x[1] + 1e-12
    expected = weight.double()[1] / 3
    assert x.dtype == (torch.float64 if as_embedding else torch.float32)
    assert_close(x.double(), torch.stack([expected + 1e-12, expected]), rtol=0, atol=1e-14 if as_embedding else 1e-7)
    assert not as_embedding or (x[0] > x[1]).all()


def test_in_place_views_have_their_shape() -> None:
    x = torch.rand(1, 3)
    with precise_math(torch.float32, torch.float64):
        x.squeeze_(0).unsqueeze_(1)
        y = x * 2
    assert (x.shape, y.shape, y.dtype) == ((3, 1), (3, 1), torch.float64)

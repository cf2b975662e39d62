"""A product adds the residual where that changes nothing else: as an argument of ours, or in the residual's place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.compiled_targets import count_targets

STREAMED, IN_PLACE, ADDITION = (
    torch.ops.tcdeploy.linear.default, torch.ops.tcdeploy.linear_add_.default, torch.ops.aten.add.Tensor,
)  # fmt: skip
WEIGHT, BIAS = torch.randn(1024, 1024).bfloat16() / 32, torch.randn(1024).bfloat16()


def product(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(torch.relu(x), WEIGHT, bias)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(*shape, 1024, dtype=dtype)


def test_a_streamed_product_adds_the_residual_on_either_side_of_it() -> None:
    for function in (lambda x: x + product(x), lambda x: product(x) + x):
        found = count_targets(function, rows(1, 4), skinny_gemm=True)
        assert (found[STREAMED], found[ADDITION]) == (1, 0)


@pytest.mark.parametrize(
    ("function", "additions"),
    [
        (lambda x: x + product(x, BIAS), 1),
        (lambda x: [x + y + y.sum() for y in [product(x)]][0], 2),
        (lambda x: x.mT.contiguous().mT + product(x), 1),
        (lambda x: x.float() + product(x), 1),
        (lambda x: x.expand(3, 4, 1024) + product(x), 1),
        (lambda x: product(x) + 1, 1),
    ],
    ids=["a bias", "another reader", "a transposed residual", "another dtype", "broadcasting", "a number"],
)
def test_a_streamed_product_leaves_what_it_cannot_add(function: Callable[[Tensor], Tensor], additions: int) -> None:
    found = count_targets(function, rows(1, 4), skinny_gemm=True)
    assert (found[STREAMED], found[ADDITION]) == (1, additions)


def test_a_product_is_added_in_the_place_of_a_sum_that_nothing_reads_later() -> None:
    def block(x: Tensor) -> Tensor:
        middle = x + torch.tanh(x)
        return middle + product(middle * 0.5)

    for function in (block, lambda x: block(block(x))):
        found = count_targets(function, rows(1, 70), inplace_residual=True)
        assert found[IN_PLACE] == found[torch.ops.aten.tanh.default] > 0
        assert found[torch.ops.aten.mm.default] == 0


def read_later(x: Tensor) -> Tensor:
    middle = x + torch.tanh(x)
    return (middle + product(middle)) * middle


def read_later_through_a_view(x: Tensor) -> Tensor:
    middle = x + torch.tanh(x)
    part = middle[..., :512].unsqueeze(0)
    return (middle + product(middle))[..., :512] * part[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + product(x),
        lambda x: torch.tanh(x) + product(x),
        lambda x: (x + 1).float() + product(x),
        lambda x: (x + 1) + product(x, BIAS),
        lambda x: (x[:, :1] + 1) + product(x),
        read_later,
        read_later_through_a_view,
    ],
    ids=["an input", "no sum", "another dtype", "a bias", "broadcasting", "read later", "read later through a view"],
)
def test_what_cannot_be_written_over_is_not(function: Callable[[Tensor], Tensor]) -> None:
    found = count_targets(function, rows(1, 70), inplace_residual=True)
    assert found[IN_PLACE] == 0 and found[torch.ops.aten.mm.default] + found[torch.ops.aten.addmm.default] == 1

"""Residual additions are fused into `tcdeploy::linear`, or accumulated in place by cuBLAS if that is safe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic
from tests.programs.passes.compiled_targets import count_targets

LINEAR, LINEAR_ADD = torch.ops.tcdeploy.linear.default, torch.ops.tcdeploy.linear_add_.default
ADD = torch.ops.aten.add.Tensor
WEIGHT, BIAS = torch.randn(1024, 1024).bfloat16() / 32, torch.randn(1024).bfloat16()


def product(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(torch.relu(x), WEIGHT, bias)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(*shape, 1024, dtype=dtype)


def test_linear_takes_the_residual_from_either_side_of_the_addition() -> None:
    for function in (lambda x: x + product(x), lambda x: product(x) + x):
        counts = count_targets(function, rows(1, 4), skinny_gemm=True)
        assert (counts[LINEAR], counts[ADD]) == (1, 0)


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
def test_linear_leaves_additions_that_it_cannot_take(function: Callable[[Tensor], Tensor], additions: int) -> None:
    counts = count_targets(function, rows(1, 4), codegen=False, skinny_gemm=True)
    assert (counts[LINEAR], counts[ADD]) == (1, additions)


def test_a_product_accumulates_into_a_sum_that_nothing_reads_later() -> None:
    def block(x: Tensor) -> Tensor:
        middle = x + torch.tanh(x)
        return middle + product(middle * 0.5)

    for function in (block, lambda x: block(block(x))):
        counts = count_targets(function, rows(1, 70), inplace_residual=True)
        assert counts[LINEAR_ADD] == counts[torch.ops.aten.tanh.default] > 0
        assert counts[torch.ops.aten.mm.default] == 0


@pytest.mark.filterwarnings("error:Raw SymInt")
def test_a_product_with_a_symbolic_number_of_rows_accumulates_without_a_warning() -> None:
    x = rows(1, 70)
    mark_dynamic(x, 1, min=2, max=128)
    counts = count_targets(lambda x: (x + 1) + product(x), x, codegen=False, inplace_residual=True)
    assert (counts[LINEAR_ADD], counts[torch.ops.aten.mm.default]) == (1, 0)


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
    ids=["an input", "not a sum", "another dtype", "a bias", "broadcasting", "read later", "read later through a view"],
)
def test_a_tensor_that_may_not_be_overwritten_is_not(function: Callable[[Tensor], Tensor]) -> None:
    codegen = function is read_later_through_a_view  # in full: Inductor may overwrite the input too
    counts = count_targets(function, rows(1, 70), codegen=codegen, inplace_residual=True)
    assert counts[LINEAR_ADD] == 0 and counts[torch.ops.aten.mm.default] + counts[torch.ops.aten.addmm.default] == 1

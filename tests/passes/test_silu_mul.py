"""A streamed product ends in the gate that reads it, where that is silu of its first half times its second."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from tests.passes.compiled_targets import count_targets

STREAMED, GATED = torch.ops.tcdeploy.linear.default, torch.ops.tcdeploy.linear_silu_mul.default
torch.manual_seed(6)
WEIGHT, BIAS = torch.randn(2048, 1024).bfloat16() / 32, torch.randn(2048).bfloat16()
UNEVEN = torch.randn(1040, 1024).bfloat16() / 32  # halves of 520, which is no multiple of 16


def rows(*shape: int) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(*shape, 1024).bfloat16()


def halves(x: Tensor, weight: Tensor = WEIGHT, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    y = linear(x, weight, bias)
    half = weight.shape[0] // 2
    return y[..., :half], y[..., half:]


def gated(x: Tensor) -> Tensor:
    gate, up = halves(x)
    return silu(gate) * up


def gated_from_the_right(x: Tensor) -> Tensor:
    gate, up = halves(x)
    return up * silu(gate)


@pytest.mark.parametrize("function", [gated, gated_from_the_right])
def test_the_product_ends_in_its_gate(function: Callable[[Tensor], Tensor]) -> None:
    for shape in ((1,), (4,), (1, 1), (1, 4), (1, 16)):
        found = count_targets(function, rows(*shape), skinny_gemm=True, fused_epilogues=True)
        assert (found[GATED], found[STREAMED]) == (1, 0)
        assert found[torch.ops.aten.exp.default] == 0
    assert count_targets(function, rows(4), skinny_gemm=True)[GATED] == 0, "nobody asked"


def read_elsewhere(x: Tensor) -> Tensor:
    gate, up = halves(x)
    return silu(gate) * up + up.sum()


def other_halves(x: Tensor) -> Tensor:
    gate, up = halves(x)
    return silu(up) * gate


def other_activation(x: Tensor) -> Tensor:
    gate, up = halves(x)
    return gelu(gate) * up


def two_products(x: Tensor) -> Tensor:
    return silu(halves(x)[0]) * halves(x.abs())[1]


def with_a_bias(x: Tensor) -> Tensor:
    gate, up = halves(x, bias=BIAS)
    return silu(gate) * up


def overlapping(x: Tensor) -> Tensor:
    y = linear(x, WEIGHT)
    return silu(y[..., :1024]) * y[..., 512:1536]


def every_second(x: Tensor) -> Tensor:
    y = linear(x, WEIGHT)
    return silu(y[..., 0::2]) * y[..., 1::2]


def uneven(x: Tensor) -> Tensor:
    gate, up = halves(x, UNEVEN)
    return silu(gate) * up


def shifted_twice(x: Tensor) -> Tensor:
    gate, up = halves(x)
    return (gate.float() / torch.add(torch.exp(-gate.float()), 1, alpha=2)).bfloat16() * up


def cut_to_whole_numbers(x: Tensor) -> Tensor:
    gate, up = halves(x)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(torch.int8) * up


def left_in_float32(x: Tensor) -> Tensor:
    gate, up = halves(x)
    return silu(gate.float()) * up


@pytest.mark.parametrize(
    "function",
    [
        read_elsewhere, other_halves, other_activation, two_products, with_a_bias, overlapping, every_second, uneven,
        shifted_twice, left_in_float32, cut_to_whole_numbers,
    ],
)  # fmt: skip
def test_whatever_is_something_else_stays(function: Callable[[Tensor], Tensor]) -> None:
    found = count_targets(function, rows(4), skinny_gemm=True, fused_epilogues=True)
    assert found[GATED] == 0 and found[STREAMED] > 0

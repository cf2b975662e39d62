"""SwiGLU is fused into the product that computes its two halves; anything else is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from tests.programs.passes.compiled_targets import count_targets

LINEAR, LINEAR_SILU_MUL = torch.ops.tcdeploy.linear.default, torch.ops.tcdeploy.linear_silu_mul.default
torch.manual_seed(6)
WEIGHT, BIAS = torch.randn(2048, 1024).bfloat16() / 32, torch.randn(2048).bfloat16()
UNEVEN = torch.randn(1040, 1024).bfloat16() / 32  # halves of 520, not a multiple of 16


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
def test_swiglu_is_fused_into_the_product(function: Callable[[Tensor], Tensor]) -> None:
    for shape in ((1,), (4,), (1, 1), (1, 4), (1, 16)):
        codegen = function is gated and shape in ((1, 1), (1, 16))  # once with each kernel
        counts = count_targets(function, rows(*shape), codegen=codegen, skinny_gemm=True, fused_epilogues=True)
        assert (counts[LINEAR_SILU_MUL], counts[LINEAR]) == (1, 0)
        assert counts[torch.ops.aten.exp.default] == 0
    counts = count_targets(function, rows(4), codegen=False, skinny_gemm=True)
    assert counts[LINEAR_SILU_MUL] == 0, "fused_epilogues is off"


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


def truncated_to_int8(x: Tensor) -> Tensor:
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
        shifted_twice, left_in_float32, truncated_to_int8,
    ],
)  # fmt: skip
def test_other_expressions_are_not_fused(function: Callable[[Tensor], Tensor]) -> None:
    counts = count_targets(function, rows(4), codegen=False, skinny_gemm=True, fused_epilogues=True)
    assert counts[LINEAR_SILU_MUL] == 0 and counts[LINEAR] > 0

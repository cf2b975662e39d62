"""RMSNorm is fused into the single-row products that read it; anything else is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.programs.passes.compiled_targets import count_targets

MEAN, RSQRT = torch.ops.aten.mean.dim, torch.ops.aten.rsqrt.default
LINEAR, LINEAR_SILU_MUL = torch.ops.tcdeploy.linear.default, torch.ops.tcdeploy.linear_silu_mul.default
RMS_NORM_LINEAR = torch.ops.tcdeploy.rms_norm_linear.default
K = N = 1024
torch.manual_seed(8)
WEIGHTS = [torch.randn(N, K).bfloat16() / 32 for _ in range(2)]
HALVES = torch.randn(2 * N, K).bfloat16() / 32
BIAS = torch.randn(N).bfloat16()
STRIDED = torch.randn(2 * K).bfloat16()
ACTIVATION = torch.randn(1, 1, K).bfloat16()  # three-dimensional, as a layer's hidden states
TWENTIES = torch.full((K,), 20.0)
LLAMA, GEMMA = LlamaRMSNorm(K, eps=1e-3).bfloat16(), GemmaRMSNorm(K, eps=1e-3).bfloat16()
for norm in (LLAMA, GEMMA):
    norm.weight = torch.nn.Parameter(torch.randn(K).bfloat16(), requires_grad=False)


def product(x: Tensor, weight: Tensor = WEIGHTS[0]) -> Tensor:
    return linear(x, weight)


def row(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(9)
    return torch.randn(1, 1, K, dtype=dtype) / 30  # small enough for eps to matter


def single(x: Tensor) -> Tensor:
    return product(LLAMA(x))


def biased(x: Tensor) -> Tensor:
    return linear(LLAMA(x), WEIGHTS[0], BIAS)


def several(x: Tensor) -> Tensor:
    normed = LLAMA(x)
    return product(normed, WEIGHTS[0]) + torch.sigmoid(product(normed, WEIGHTS[1]))


def of_a_sum_that_is_read_again(x: Tensor) -> Tensor:
    total = x + torch.sigmoid(x)
    return product(LLAMA(total)) + total


def of_torch(x: Tensor) -> Tensor:
    return product(torch.nn.functional.rms_norm(x, (K,), LLAMA.weight, 1e-3))


def with_an_integer_eps(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1) * LLAMA.weight)


def gated(x: Tensor) -> Tensor:
    both = product(LLAMA(x), HALVES)
    return silu(both[..., :N]) * both[..., N:]


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (single, 1), (biased, 1), (several, 2), (of_a_sum_that_is_read_again, 1), (gated, 1), (of_torch, 1),
        (with_an_integer_eps, 1),
    ],
)  # fmt: skip
def test_the_norm_is_fused_into_its_products(function: Callable[[Tensor], Tensor], products: int) -> None:
    codegen = function in (single, of_a_sum_that_is_read_again, gated)
    counts = count_targets(function, row(), codegen=codegen, skinny_gemm=True, fused_epilogues=True)
    assert (counts[MEAN], counts[RSQRT], counts[LINEAR], counts[LINEAR_SILU_MUL], counts[RMS_NORM_LINEAR]) == (
        0,
        0,
        0,
        0,
        products,
    )
    counts = count_targets(function, row(), codegen=False, skinny_gemm=True)
    assert (counts[MEAN], counts[LINEAR], counts[RMS_NORM_LINEAR]) == (1, products, 0), "fused_epilogues is off"


def test_with_more_rows_the_norm_is_not_fused() -> None:
    rows = row().expand(1, 2, K).contiguous()
    counts = count_targets(single, rows, codegen=False, skinny_gemm=True, fused_epilogues=True)
    assert (counts[MEAN], counts[LINEAR], counts[RMS_NORM_LINEAR]) == (1, 1, 0)


def read_by_another_op(x: Tensor) -> Tensor:
    normed = LLAMA(x)
    return product(normed) + normed.sum()


def layer_norm(x: Tensor) -> Tensor:
    return product(torch.nn.functional.layer_norm(x, (K,)))


def of_heads(x: Tensor) -> Tensor:
    heads = x.reshape(1, 4, K // 4)
    return product((heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-3)).view(1, 1, K))


def of_another_row(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(torch.sigmoid(x).pow(2).mean(-1, keepdim=True) + 1e-3))


def of_fourth_powers(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-3))


def added_to_itself(x: Tensor) -> Tensor:
    normed = LLAMA(x)
    return product(normed) + normed


def of_a_computed_weight(x: Tensor) -> Tensor:
    return product(GEMMA(x))  # 1 + weight


def scaled_by_an_activation(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * torch.sigmoid(x))


def with_an_activation_as_eps(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ACTIVATION[..., :1].abs()) * LLAMA.weight)


def with_eps_twice(x: Tensor) -> Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    return product(x * torch.rsqrt(torch.add(mean, 1e-3, alpha=2)) * LLAMA.weight)


def of_every_second(x: Tensor) -> Tensor:
    return product(LLAMA(torch.cat([x, x], dim=-1)[..., ::2]))


def with_a_strided_weight(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * STRIDED[::2])


def with_two_weights(x: Tensor) -> Tensor:
    return product(LLAMA(x) * LLAMA.weight)


def in_float32(x: Tensor) -> Tensor:
    wide = x.float() * 2
    return product((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)).bfloat16() * LLAMA.weight)


def over_all_dims(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(x.pow(2).mean(dim=None, keepdim=True) + 1e-3))


def truncated_to_int8(x: Tensor) -> Tensor:
    wide = x.float()  # precise enough to truncate to the same integers
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3) * TWENTIES
    return product(normed.to(torch.int8).to(x.dtype))


def twice(x: Tensor) -> Tensor:
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    return product(x * inverse * inverse)


@pytest.mark.parametrize(
    "function",
    [
        read_by_another_op, layer_norm, of_heads, of_another_row, of_fourth_powers, twice, over_all_dims,
        truncated_to_int8, added_to_itself, of_a_computed_weight, with_two_weights, in_float32,
        scaled_by_an_activation, with_an_activation_as_eps, with_eps_twice, of_every_second, with_a_strided_weight,
    ],
)  # fmt: skip
def test_other_expressions_are_not_fused(function: Callable[[Tensor], Tensor]) -> None:
    before, after = (
        count_targets(function, row(), codegen=False, skinny_gemm=True, fused_epilogues=fused_epilogues)
        for fused_epilogues in (False, True)
    )
    assert before == after and before[LINEAR] == 1

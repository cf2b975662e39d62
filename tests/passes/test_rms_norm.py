"""A product of one row normalises its input itself: no mean is left, and what the norm says is still what comes out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.passes.compiled_targets import count_targets

MEAN, RSQRT = torch.ops.aten.mean.dim, torch.ops.aten.rsqrt.default
PLAIN, GATED = torch.ops.tcdeploy.linear.default, torch.ops.tcdeploy.linear_silu_mul.default
NORMED = torch.ops.tcdeploy.rms_norm_linear.default
K = N = 1024
torch.manual_seed(8)
WEIGHTS = [torch.randn(N, K).bfloat16() / 32 for _ in range(2)]
HALVES = torch.randn(2 * N, K).bfloat16() / 32
BIAS = torch.randn(N).bfloat16()
STRIDED = torch.randn(2 * K).bfloat16()
FLOWING = torch.randn(1, 1, K).bfloat16()  # as a layer's other inputs
TWENTIES = torch.full((K,), 20.0)
LLAMA, GEMMA = LlamaRMSNorm(K, eps=1e-3).bfloat16(), GemmaRMSNorm(K, eps=1e-3).bfloat16()
for norm in (LLAMA, GEMMA):
    norm.weight = torch.nn.Parameter(torch.randn(K).bfloat16(), requires_grad=False)


def product(x: Tensor, weight: Tensor = WEIGHTS[0]) -> Tensor:
    return linear(x, weight)


def row(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(9)
    return torch.randn(1, 1, K, dtype=dtype) / 30  # small enough for eps to count


def one(x: Tensor) -> Tensor:
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


def with_a_whole_eps(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1) * LLAMA.weight)


def gated(x: Tensor) -> Tensor:
    both = product(LLAMA(x), HALVES)
    return silu(both[..., :N]) * both[..., N:]


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (one, 1), (biased, 1), (several, 2), (of_a_sum_that_is_read_again, 1), (gated, 1), (of_torch, 1),
        (with_a_whole_eps, 1),
    ],
)  # fmt: skip
def test_the_product_normalises_and_no_mean_is_left(function: Callable[[Tensor], Tensor], products: int) -> None:
    found = count_targets(function, row(), skinny_gemm=True, fused_epilogues=True)
    assert (found[MEAN], found[RSQRT], found[PLAIN], found[GATED], found[NORMED]) == (0, 0, 0, 0, products)
    found = count_targets(function, row(), skinny_gemm=True)
    assert (found[MEAN], found[PLAIN], found[NORMED]) == (1, products, 0), "nobody asked"


def test_more_rows_are_normalised_before() -> None:
    found = count_targets(one, row().expand(1, 2, K).contiguous(), skinny_gemm=True, fused_epilogues=True)
    assert (found[MEAN], found[PLAIN], found[NORMED]) == (1, 1, 0)


def read_by_another(x: Tensor) -> Tensor:
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


def of_a_weight_made_here(x: Tensor) -> Tensor:
    return product(GEMMA(x))  # 1 + weight


def scaled_by_what_flows(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * FLOWING)


def with_an_eps_that_flows(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + FLOWING[..., :1].abs()) * LLAMA.weight)


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


def cut_to_whole_numbers(x: Tensor) -> Tensor:
    wide = x.float()  # exact enough for the cut to be the same
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3) * TWENTIES
    return product(normed.to(torch.int8).to(x.dtype))


def twice(x: Tensor) -> Tensor:
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    return product(x * inverse * inverse)


@pytest.mark.parametrize(
    "function",
    [
        read_by_another, layer_norm, of_heads, of_another_row, of_fourth_powers, twice, over_all_dims,
        cut_to_whole_numbers, added_to_itself, of_a_weight_made_here, with_two_weights, in_float32,
        scaled_by_what_flows, with_an_eps_that_flows, with_eps_twice, of_every_second, with_a_strided_weight,
    ],
)  # fmt: skip
def test_whatever_is_no_such_norm_stays(function: Callable[[Tensor], Tensor]) -> None:
    before, after = (
        count_targets(function, row(), skinny_gemm=True, fused_epilogues=fused_epilogues)
        for fused_epilogues in (False, True)
    )
    assert before == after and before[PLAIN] == 1

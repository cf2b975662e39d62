"""A product of one row normalises its input itself: no mean is left, and what the norm says is still what comes out.

A CPU never writes a product in its parts, so these functions do, as Inductor does on a GPU under coordinate descent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.compiler.rewriting import rewritten

MEAN, SUM, RSQRT = torch.ops.aten.mean.dim, torch.ops.aten.sum.dim_IntList, torch.ops.aten.rsqrt.default
K, N = 256, 96
torch.manual_seed(8)
WEIGHTS = [torch.randn(N, K).bfloat16() / 16 for _ in range(2)]
TWENTIES = torch.full((K,), 20.0)
LLAMA, GEMMA = LlamaRMSNorm(K, eps=1e-3).bfloat16(), GemmaRMSNorm(K, eps=1e-3).bfloat16()
for norm in (LLAMA, GEMMA):
    norm.weight = torch.nn.Parameter(torch.randn(K).bfloat16(), requires_grad=False)


def product(x: Tensor, weight: Tensor = WEIGHTS[0]) -> Tensor:
    parts = x.view(1, K).float().unsqueeze(2) * weight.t().float().unsqueeze(0)
    return parts.sum(dim=1).to(x.dtype).view(1, 1, -1)


def row(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(9)
    return torch.randn(1, 1, K, dtype=dtype) / 30  # small enough for eps to count


def one(norm: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: product(norm(x))


def several(x: Tensor) -> Tensor:
    normed = LLAMA(x)
    return product(normed, WEIGHTS[0]) + product(normed, WEIGHTS[1])


def of_a_sum_that_is_read_again(x: Tensor) -> Tensor:
    total = x + torch.sigmoid(x)
    return product(LLAMA(total)) + total[..., :N]


@pytest.mark.parametrize(
    ("function", "products"), [(one(LLAMA), 1), (one(GEMMA), 1), (several, 2), (of_a_sum_that_is_read_again, 1)]
)
def test_the_mean_becomes_a_sum_beside_the_product(function: Callable[[Tensor], Tensor], products: int) -> None:
    found = rewritten(function, row(), fuses=True)
    assert (found[MEAN], found[SUM], found[RSQRT]) == (0, 2 * products, products)
    assert rewritten(function, row())[MEAN] == 1, "nobody asked"


def test_a_norm_in_float32_folds_too() -> None:
    weight = torch.randn(K)

    def function(x: Tensor) -> Tensor:
        return product((x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)).bfloat16() * weight.bfloat16())

    assert rewritten(function, row(torch.float32), fuses=True)[MEAN] == 0


def read_by_another(x: Tensor) -> Tensor:
    normed = LLAMA(x)
    return product(normed) + normed.sum()


def layer_norm(x: Tensor) -> Tensor:
    return product(torch.nn.functional.layer_norm(x, (K,)))


def of_heads(x: Tensor) -> Tensor:
    heads = x.view(1, 4, K // 4)
    return product((heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-3)).view(1, 1, K))


def of_another_row(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(torch.sigmoid(x).pow(2).mean(-1, keepdim=True) + 1e-3))


def of_fourth_powers(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-3))


def over_all_dims(x: Tensor) -> Tensor:
    return product(x * torch.rsqrt(x.pow(2).mean(dim=None, keepdim=True) + 1e-3))


def cut_to_whole_numbers(x: Tensor) -> Tensor:
    wide = x.float()  # exact enough for the cut to be the same
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3) * TWENTIES
    return product(normed.to(torch.int8).to(x.dtype))


def summed(x: Tensor, dim: int, **options: Any) -> Tensor:
    square = torch.eye(K)[None] + 1
    return (LLAMA(x).view(1, K).float().unsqueeze(dim) * square).sum(1, **options)


def of_other_rows(x: Tensor) -> Tensor:
    return summed(x, 1)


def of_one_row_more(x: Tensor) -> Tensor:
    return summed(x, 0)


def keeping_its_dim(x: Tensor) -> Tensor:
    return summed(x, 2, keepdim=True)


def in_float64(x: Tensor) -> Tensor:
    return summed(x, 2, dtype=torch.float64)


def in_bfloat16(x: Tensor) -> Tensor:
    return (LLAMA(x).float().view(1, K).bfloat16().unsqueeze(2) * WEIGHTS[0].t().unsqueeze(0)).sum(1)


def twice(x: Tensor) -> Tensor:
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    return product(x * inverse * inverse)


@pytest.mark.parametrize(
    "function",
    [
        read_by_another, layer_norm, of_heads, of_another_row, of_fourth_powers, twice, over_all_dims,
        cut_to_whole_numbers, of_other_rows, of_one_row_more, keeping_its_dim, in_float64, in_bfloat16,
    ],
)  # fmt: skip
def test_whatever_is_no_such_norm_stays(function: Callable[[Tensor], Tensor]) -> None:
    before, after = (rewritten(function, row(torch.bfloat16), fuses=fuses) for fuses in (False, True))
    assert before == after

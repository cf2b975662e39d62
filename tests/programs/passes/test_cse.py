"""Packed projections compile to one product; products of different inputs stay."""

from __future__ import annotations

import re

import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.utils import run_and_get_code

from tcdeploy.models.convert.packed_linears import pack_linears
from tcdeploy.programs.passes.post_grad import PostGradPass
from tests.conftest import reset_programs


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 64, bias), nn.Linear(64, 16, bias), nn.Linear(64, 16, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q.sum(-1) + torch.tanh(k * v).sum(-1)


def count_products(module: nn.Module, with_pass: bool) -> tuple[int, torch.Tensor]:
    """The number of matrix products in the code that Inductor generates, and the output."""
    reset_programs()
    torch.manual_seed(2)
    x = torch.randn(8, 64)
    post_grad_pass = PostGradPass(skinny_gemm=False) if with_pass else None
    with torch.no_grad(), inductor_config.patch(post_grad_custom_pre_pass=post_grad_pass):
        out, code = run_and_get_code(torch.compile(module, fullgraph=True, dynamic=False), x)
    return len(re.findall(r"extern_kernels\.(?:add)?mm\(|mkldnn\._linear", "\n".join(code))), out


def test_three_packed_projections_of_one_input_are_one_product() -> None:
    for bias in (False, True):
        module = Attention(bias).eval().requires_grad_(False)
        unpacked, expected = count_products(module, with_pass=False)
        pack_linears(module, (("q", "k", "v"),))
        packed, _ = count_products(module, with_pass=False)
        merged, out = count_products(module, with_pass=True)
        assert (unpacked, packed, merged) == (3, 3, 1)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_products_of_different_inputs_are_not_merged() -> None:
    class AppliedTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.relu(self.linear(x)))

    module = nn.Sequential(nn.Linear(64, 32, bias=False), AppliedTwice()).eval().requires_grad_(False)
    assert count_products(module, with_pass=True)[0] == 3

"""Few-row products with large weights become `tcdeploy::linear`; others stay with cuBLAS."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from tcdeploy.programs.passes.post_grad import PostGradPass
from tests.programs.passes.compiled_targets import compile_and_run


class Projection(nn.Module):
    def __init__(self, rows: int, bias: bool = False) -> None:
        super().__init__()
        self.down = nn.Linear(1024, 1024, bias).bfloat16()
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(x)) + 1


class ComputedWeight(Projection):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.down.weight * 2)


def count_linear_ops(module: Projection, dtype: torch.dtype = torch.bfloat16) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The number of `tcdeploy::linear` calls in the generated code, the compiled output and the eager one."""
    torch.manual_seed(3)
    module = module.to(dtype).eval().requires_grad_(False)
    x = torch.randn(module.rows, 1024, dtype=dtype)
    with torch.no_grad():
        out, code = run_and_get_code(compile_and_run, module, x, post_grad_pass=PostGradPass(skinny_gemm=True))
        return len(re.findall(r"torch\.ops\.tcdeploy\.linear\.default\(", "\n".join(code))), out, module(x)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_few_row_product_is_replaced_and_agrees(rows: int, bias: bool) -> None:
    count, compiled, eager = count_linear_ops(Projection(rows, bias))
    assert count == 1
    torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)


def test_a_weight_that_the_step_computes_is_not_given_to_the_gemv() -> None:
    """The GEMV reads its weight before the previous kernel has ended; the skinny GEMM waits first."""
    assert [count_linear_ops(ComputedWeight(rows))[0] for rows in (1, 4)] == [0, 1]


def test_shapes_and_dtypes_without_a_config_stay_with_cublas() -> None:
    assert count_linear_ops(Projection(65))[0] == 0
    assert count_linear_ops(Projection(4), torch.float32)[0] == 0

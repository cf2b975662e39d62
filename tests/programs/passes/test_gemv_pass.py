"""The input row of a decomposed one-row product is stored only if it is longer than the output and computed here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tcdeploy.programs.passes.post_grad import PostGradPass
from tests.programs.passes.compiled_targets import compile_and_run


class DecomposedGemv(nn.Module):
    """silu, then a one-row product [1, k] @ [k, n] written as a multiply and a sum."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k).bfloat16() / k**0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = torch.nn.functional.silu(x).view(1, -1)
        terms = row.float().unsqueeze(2) * self.weight.t().float().unsqueeze(0)
        return terms.sum(dim=1).bfloat16() + 1


def count_stored_rows(module: nn.Module, x: torch.Tensor, codegen: bool = False) -> int:
    """The number of `as_strided` views that the pass inserts. The compiled output must match eager mode."""
    stored: list[torch.fx.Node] = []

    class RecordingPass(PostGradPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            stored.extend(node for node in graph.nodes if node.target is torch.ops.aten.as_strided.default)

    out = compile_and_run(module, x, post_grad_pass=RecordingPass(skinny_gemm=False), codegen=codegen)
    torch.testing.assert_close(out, module(x), rtol=2e-2, atol=2e-2)
    return len(stored)


def test_only_a_row_longer_than_the_output_is_stored() -> None:
    assert count_stored_rows(DecomposedGemv(256, 32).eval(), torch.randn(1, 1, 256).bfloat16(), codegen=True) == 1
    assert count_stored_rows(DecomposedGemv(32, 256).eval(), torch.randn(1, 1, 32).bfloat16()) == 0


@pytest.mark.parametrize("options", [{"keepdim": True}, {"dtype": torch.float64}, {"dim": 2}])
def test_other_sums_of_such_terms_store_nothing(options: dict[str, Any]) -> None:
    class OtherSum(DecomposedGemv):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            row = torch.nn.functional.silu(x).view(1, -1)
            terms = row.float().unsqueeze(2) * self.weight.t().float().unsqueeze(0)
            return terms.sum(**{"dim": 1, **options}).bfloat16() + 1

    assert count_stored_rows(OtherSum(256, 32).eval(), torch.randn(1, 1, 256).bfloat16()) == 0


def test_a_row_that_is_an_input_or_a_slice_is_left_alone() -> None:
    """An `as_strided` view of a view would start at the wrong offset."""

    class SlicedRow(DecomposedGemv):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            row = x.view(1, -1)[:, 256:]
            return (row.float().unsqueeze(2) * self.weight.t().float().unsqueeze(0)).sum(dim=1).bfloat16() + 1

    assert count_stored_rows(SlicedRow(256, 32).eval(), torch.randn(1, 1, 512).bfloat16()) == 0
    assert count_stored_rows(SlicedRow(256, 32).eval(), torch.randn(2, 1, 512).bfloat16()[1:]) == 0


def test_unrelated_sums_of_products_are_left_alone() -> None:
    class Dots(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x.cos()).sum(1) + (x.unsqueeze(2) * x.unsqueeze(1)).sum(1).sum(1)

    assert count_stored_rows(Dots().eval(), torch.randn(6, 8)) == 0

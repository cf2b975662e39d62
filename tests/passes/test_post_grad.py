"""Siblings multiply once: the products of a compiled layer are counted in the code that Inductor wrote."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch._inductor.utils
from torch import nn
from torch._inductor.utils import run_and_get_code

from tcdeploy.models.packed_linears import pack_linears
from tcdeploy.passes.post_grad import PostGradPass
from tests.conftest import reset_programs


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 64, bias), nn.Linear(64, 16, bias), nn.Linear(64, 16, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q.sum(-1) + torch.tanh(k * v).sum(-1)


def products(module: nn.Module, merge: bool) -> tuple[int, torch.Tensor]:
    reset_programs()
    torch.manual_seed(2)
    x = torch.randn(8, 64)
    rewrite = PostGradPass(skinny_gemm=False) if merge else None
    with torch.no_grad(), inductor_config.patch(post_grad_custom_pre_pass=rewrite):
        out, code = run_and_get_code(torch.compile(module, fullgraph=True, dynamic=False), x)
    return len(re.findall(r"extern_kernels\.(?:add)?mm\(|mkldnn\._linear", "\n".join(code))), out


def test_three_projections_of_one_input_are_one_product() -> None:
    for bias in (False, True):
        module = Attention(bias).eval().requires_grad_(False)
        plain, wanted = products(module, merge=False)
        pack_linears(module, (("q", "k", "v"),))
        unmerged, _ = products(module, merge=False)
        merged, found = products(module, merge=True)
        assert (plain, unmerged, merged) == (3, 3, 1)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_products_of_different_inputs_stay() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(torch.relu(self.a(x)))

    count, _ = products(nn.Sequential(nn.Linear(64, 32, bias=False), Two()).eval().requires_grad_(False), merge=True)
    assert count == 3


class Projection(nn.Module):
    def __init__(self, rows: int, bias: bool = False) -> None:
        super().__init__()
        self.down = nn.Linear(1024, 1024, bias).bfloat16()
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(x)) + 1


def streamed_calls(module: Projection, dtype: torch.dtype = torch.bfloat16) -> tuple[int, torch.Tensor, torch.Tensor]:
    reset_programs()
    torch.manual_seed(3)
    module = module.to(dtype).eval().requires_grad_(False)
    x = torch.randn(module.rows, 1024, dtype=dtype)
    with torch.no_grad(), inductor_config.patch(post_grad_custom_pre_pass=PostGradPass(skinny_gemm=True)):
        out, code = run_and_get_code(torch.compile(module, fullgraph=True, dynamic=False), x)
        return len(re.findall(r"torch\.ops\.tcdeploy\.linear\.default\(", "\n".join(code))), out, module(x)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_few_rows_is_streamed_and_means_the_same(rows: int, bias: bool) -> None:
    calls, found, wanted = streamed_calls(Projection(rows, bias))
    assert calls == 1
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


class Doubled(Projection):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.down.weight * 2)


def test_a_weight_that_is_made_in_the_step_is_not_read_early() -> None:
    assert [streamed_calls(Doubled(rows))[0] for rows in (1, 4)] == [0, 1]


def test_products_that_the_rule_refuses_stay_with_cublas() -> None:
    assert streamed_calls(Projection(65))[0] == 0
    assert streamed_calls(Projection(4), torch.float32)[0] == 0


class Rows(nn.Module):
    """Three slices of one product, written as Inductor writes a product of one row on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 32).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def product() -> torch.Tensor:
            parts = x.view(1, 32).float().unsqueeze(2) * self.weight.t().float().unsqueeze(0)
            return parts.sum(dim=1).bfloat16().view(1, 1, 48)

        return tuple(product()[..., start : start + 16].view(1, 2, 8).transpose(0, 1) + 1 for start in (0, 16, 32))


def test_a_product_that_stands_there_in_its_parts_is_merged_and_cut_in_place() -> None:
    sums, cuts = [], []

    class Counting(PostGradPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            targets = [node.target for node in graph.nodes]
            sums.append(targets.count(torch.ops.aten.sum.dim_IntList))
            cuts.append(targets.count(torch.ops.aten.as_strided.default))

    reset_programs()
    module, x = Rows().eval(), torch.randn(1, 1, 32).bfloat16()
    with torch.no_grad(), torch._inductor.utils.fresh_cache():
        with inductor_config.patch(post_grad_custom_pre_pass=Counting(skinny_gemm=False)):
            found = torch.compile(module, fullgraph=True, dynamic=False)(x)
        assert (sums, cuts) == ([1], [3])
        for mine, wanted in zip(found, module(x), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-2, atol=1e-2)


class LongRow(nn.Module):
    """A product of one row written in its parts, behind an activation; the row is longer or shorter than the output."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k).bfloat16() / k**0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = torch.nn.functional.silu(x).view(1, -1)
        parts = row.float().unsqueeze(2) * self.weight.t().float().unsqueeze(0)
        return parts.sum(dim=1).bfloat16() + 1


def stored_rows(module: nn.Module, x: torch.Tensor) -> int:
    """How many strided views the pass puts in; the module's answer must stay what it was."""
    stored: list[torch.fx.Node] = []

    class Listing(PostGradPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            stored.extend(node for node in graph.nodes if node.target is torch.ops.aten.as_strided.default)

    reset_programs()
    with torch.no_grad(), torch._inductor.utils.fresh_cache():
        with inductor_config.patch(post_grad_custom_pre_pass=Listing(skinny_gemm=False)):
            found = torch.compile(module, fullgraph=True, dynamic=False)(x)
        torch.testing.assert_close(found, module(x), rtol=2e-2, atol=2e-2)
    return len(stored)


def test_only_a_row_that_is_longer_than_the_output_is_stored_before_its_product() -> None:
    assert stored_rows(LongRow(256, 32).eval(), torch.randn(1, 1, 256).bfloat16()) == 1
    assert stored_rows(LongRow(32, 256).eval(), torch.randn(1, 1, 32).bfloat16()) == 0


@pytest.mark.parametrize("options", [{"keepdim": True}, {"dtype": torch.float64}, {"dim": 2}])
def test_another_sum_of_such_parts_stores_nothing(options: dict[str, Any]) -> None:
    class Other(LongRow):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            row = torch.nn.functional.silu(x).view(1, -1)
            parts = row.float().unsqueeze(2) * self.weight.t().float().unsqueeze(0)
            return parts.sum(**{"dim": 1, **options}).bfloat16() + 1

    assert stored_rows(Other(256, 32).eval(), torch.randn(1, 1, 256).bfloat16()) == 0


def test_a_row_that_is_an_input_or_a_part_of_something_is_left_alone() -> None:
    """A strided view of a view would begin at the wrong place."""

    class Part(LongRow):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            row = x.view(1, -1)[:, 256:]
            return (row.float().unsqueeze(2) * self.weight.t().float().unsqueeze(0)).sum(dim=1).bfloat16() + 1

    assert stored_rows(Part(256, 32).eval(), torch.randn(1, 1, 512).bfloat16()) == 0
    assert stored_rows(Part(256, 32).eval(), torch.randn(2, 1, 512).bfloat16()[1:]) == 0


def test_other_sums_of_products_compile_as_ever() -> None:
    class Dots(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x.cos()).sum(1) + (x.unsqueeze(2) * x.unsqueeze(1)).sum(1).sum(1)

    assert stored_rows(Dots().eval(), torch.randn(6, 8)) == 0

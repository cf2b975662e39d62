"""The passes work together: a decomposed one-row product is merged, and its slices become views."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._inductor.config as inductor_config
import torch._inductor.utils
from torch import nn

from tcdeploy.planning.plan import make_plan
from tcdeploy.planning.variants import DEFAULT
from tcdeploy.programs.jit import inductor_options
from tcdeploy.programs.passes import post_grad
from tcdeploy.programs.passes.post_grad import PostGradPass, op_source_digests
from tcdeploy.torch_compat.inductor.custom_graph_pass import OPTION
from tests.conftest import reset_programs
from tests.machines import H100, LAPTOP, LLAMA_8B, make_recipe


class SlicedGemv(nn.Module):
    """Three slices of one product, each computed as Inductor writes a one-row product on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 32).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def product() -> torch.Tensor:
            terms = x.view(1, 32).float().unsqueeze(2) * self.weight.t().float().unsqueeze(0)
            return terms.sum(dim=1).bfloat16().view(1, 1, 48)

        return tuple(product()[..., start : start + 16].view(1, 2, 8).transpose(0, 1) + 1 for start in (0, 16, 32))


def test_a_decomposed_product_is_merged_and_its_slices_are_views() -> None:
    sums, views = [], []

    class CountingPass(PostGradPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            targets = [node.target for node in graph.nodes]
            sums.append(targets.count(torch.ops.aten.sum.dim_IntList))
            views.append(targets.count(torch.ops.aten.as_strided.default))

    reset_programs()
    module, x = SlicedGemv().eval(), torch.randn(1, 1, 32).bfloat16()
    with torch.no_grad(), torch._inductor.utils.fresh_cache():
        with inductor_config.patch(post_grad_custom_pre_pass=CountingPass(skinny_gemm=False)):
            compiled = torch.compile(module, fullgraph=True, dynamic=False)(x)
        assert (sums, views) == ([1], [3])
        for actual, expected in zip(compiled, module(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_the_environment_is_part_of_the_key_of_each_program() -> None:
    """torch takes a program with an equal key, whatever instruction set it was compiled for."""
    recipe = make_recipe(context=4096)
    machines = [LAPTOP, replace(LAPTOP, cpu="DEFAULT"), replace(LAPTOP, torch_settings="other"), H100]
    passes = []
    for machine in (*machines, replace(LAPTOP, driver="1")):
        plan = make_plan(recipe, machine, LLAMA_8B)
        passes.append(inductor_options(DEFAULT, plan)[OPTION])
    assert len({graph_pass.uuid() for graph_pass in passes}) == len(machines)
    assert passes[-1] is passes[0], "programs do not depend on the driver, and torch compares a pass by identity"


def test_the_sources_of_our_ops_are_part_of_the_key_of_each_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own key does not contain the Python body of an op."""
    digests = op_source_digests()
    assert {
        "kernels/attention/ops.py", "kernels/attention/reference.py", "kernels/linear/tile_configs.py",
        "programs/passes/rms_norm.py",
    } <= digests.keys()  # fmt: skip
    before = PostGradPass().uuid()
    for name in digests:
        monkeypatch.setattr(post_grad, "op_source_digests", lambda name=name: {**digests, name: "0" * 64})
        assert PostGradPass().uuid() != before
    monkeypatch.undo()
    assert PostGradPass().uuid() == before

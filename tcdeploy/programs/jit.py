"""Makes programs with torch.compile, whose compiled code Inductor keeps in the cache folder.

`torch.compile(fullgraph=True, dynamic=False)` of one function that takes the module as an argument: torch keeps one
program per bucket and variant for all layers of a kind, and a graph break is an error instead of a slow path.
`compile_with_roles` is a backend that calls Inductor, with the roles of the graph's inputs for our passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from tcdeploy.planning.plan import Plan
from tcdeploy.planning.variants import Variant
from tcdeploy.programs.passes.post_grad import PostGradPass
from tcdeploy.programs.programs import Program, ProgramKey, roles_of_call, run_region
from tcdeploy.programs.roles import compiling, log_no_roles
from tcdeploy.torch_compat.dynamo import compile_backend
from tcdeploy.torch_compat.inductor.custom_graph_pass import pass_options

post_grad_pass = functools.cache(PostGradPass)  # torch compares options by value, and a pass by identity
MAX_KINDS_PER_VARIANT = 12  # region kinds of one bucket and variant; torch's default recompile limit is 8 in total


class JitLoader:
    """Loads programs by torch.compile. Two keys with equal Inductor options share compiled code where guards allow."""

    def __init__(self, plan: Plan, num_regions: int) -> None:
        self._plan = plan
        _raise_recompile_limits(sum(len(plan.variants(bucket)) for bucket in plan.buckets), num_regions)

    def load(self, key: ProgramKey) -> Program:
        options = inductor_options(key.variant, self._plan)
        backend = compile_with_roles if compile_backend.supported() else "inductor"
        return torch.compile(run_region, fullgraph=True, dynamic=False, backend=backend, options=options)


def compile_with_roles(
    graph_module: GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None = None
) -> Any:
    """Inductor, with the roles of the inputs for our passes.

    A function of the module, because Dynamo shares code only between equal backends.
    """
    if compile_backend.has_subgraphs(graph_module):
        log_no_roles("it has branches or loops")
        return compile_backend.compile_graph(graph_module, example_inputs, options)
    with compiling(roles_of_call(example_inputs), example_inputs):
        return compile_backend.compile_graph(graph_module, example_inputs, options)


def inductor_options(variant: Variant, plan: Plan) -> dict[str, Any]:
    """The Inductor options of a variant, with our pass. All of them enter torch's cache key."""
    flags = (variant.skinny_gemm, variant.inplace_residual, variant.fused_epilogues)
    graph_pass = post_grad_pass(*flags, plan.environment_key)
    inductor_graphs = {"triton.cudagraphs": True} if plan.graphs == "region" else {}
    return {**pass_options(graph_pass), **inductor_graphs, **dict(variant.inductor_config)}


def _raise_recompile_limits(num_variants: int, num_regions: int) -> None:
    """All programs belong to one function, so torch's limits must allow for every bucket, variant and region.

    Regions of one kind share a program unless a Python constant, such as a scale of the layer, differs between them.
    """
    # num_regions + 1: the last region also has a last-token-rows program
    limit = max(MAX_KINDS_PER_VARIANT, num_regions + 1) * (num_variants + 1)
    config = torch.compiler.config
    config.recompile_limit = max(limit, config.recompile_limit)
    config.accumulated_recompile_limit = max(limit * num_regions, config.accumulated_recompile_limit)

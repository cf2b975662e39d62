"""Makes programs with torch.compile, in front of the persistent Inductor cache.

`torch.compile(fullgraph=True, dynamic=False)` of one function that takes the module as an argument: torch keeps one
program per bucket and variant for all layers of a kind, and a graph break is an error instead of a slow path.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tcdeploy.compiler.programs import Program, ProgramKey, run_region
from tcdeploy.passes.post_grad import PostGradPass
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.variants import Variant
from tcdeploy.torch_compat.compile_stack import import_compile_stack
from tcdeploy.torch_compat.custom_graph_pass import pass_options

import_compile_stack()  # 3 s of imports that would otherwise count as compiling the first bucket

post_grad_pass = functools.cache(PostGradPass)  # torch compares options by value, and a pass by identity
PROGRAMS_PER_BUCKET_LIMIT = 12  # region kinds that a bucket and variant may have; torch allows 8 programs in all


class JitLoader:
    """Loads programs by torch.compile. Two keys with equal Inductor options share compiled code where guards allow."""

    def __init__(self, plan: Plan, regions: int) -> None:
        self._graphs = plan.graphs
        _raise_recompile_limits(sum(len(plan.variants(bucket)) for bucket in plan.buckets), regions)

    def load(self, key: ProgramKey) -> Program:
        options = inductor_options(key.variant, self._graphs)
        return torch.compile(run_region, fullgraph=True, dynamic=False, options=options)


def inductor_options(variant: Variant, graphs: str) -> dict[str, Any]:
    """The Inductor options of a variant, with our pass. All of them enter torch's cache key."""
    graph_pass = post_grad_pass(variant.skinny_gemm, variant.inplace_residual, variant.fused_epilogues)
    own_graphs = {"triton.cudagraphs": True} if graphs == "region" else {}
    return {**pass_options(graph_pass), **own_graphs, **dict(variant.inductor_config)}


def _raise_recompile_limits(variants: int, regions: int) -> None:
    """All programs belong to one function, so torch's limits must allow for every bucket, variant and region kind."""
    limit = PROGRAMS_PER_BUCKET_LIMIT * (variants + 1)
    config = torch.compiler.config
    config.recompile_limit = max(limit, config.recompile_limit)
    config.accumulated_recompile_limit = max(limit * regions, config.accumulated_recompile_limit)

"""The post-grad FX pass of every compiled program, which runs the passes of this package.

    sizes.py, cse.py, fp8_inputs.py, last_token_rows.py, router.py, gemv.py    always
    rotary.py                                                       with fused_epilogues
    skinny_gemm.py, residual_add.py                                 with skinny_gemm, if Triton is installed
    silu_mul.py, rms_norm.py, experts.py                            with skinny_gemm and fused_epilogues
    residual_add.py (in place)                                      with inplace_residual

The `uuid` makes programs that went through the pass cacheable, and is part of their key. It adds factors that torch's
own key lacks: the sources of the passes and of the ops, the roles of the inputs, and the environment, such as the
instruction set: C++ code that was generated for AVX-512 writes past the end of its buffers if it is compiled for AVX2.
torch's `cache_key_tag` is not used for them: it is also part of the key of autotuning results, and Inductor's compile
workers do not see it, so every start would tune again.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from torch.fx import Graph

from tcdeploy.planning.keys import combined_digest, source_digests
from tcdeploy.programs.passes.cse import eliminate_common_subexpressions
from tcdeploy.programs.passes.experts import fuse_expert_sum, fuse_expert_swiglu, prefetch_experts
from tcdeploy.programs.passes.fp8_inputs import quantise_inputs
from tcdeploy.programs.passes.gemv import materialize_mlp_input, sink_slices
from tcdeploy.programs.passes.last_token_rows import hoist_row_selection
from tcdeploy.programs.passes.nodes import assign_roles
from tcdeploy.programs.passes.residual_add import fuse_inplace_residual_add, fuse_residual_add
from tcdeploy.programs.passes.rms_norm import fuse_rms_norm
from tcdeploy.programs.passes.rotary import fuse_rope_into_attention
from tcdeploy.programs.passes.router import replace_top_k
from tcdeploy.programs.passes.silu_mul import fuse_swiglu
from tcdeploy.programs.passes.sizes import read_sizes_from_inputs
from tcdeploy.programs.passes.skinny_gemm import replace_scheme_linears, replace_with_skinny_gemm
from tcdeploy.programs.roles import compiled_roles_key
from tcdeploy.torch_compat.inductor.custom_graph_pass import CustomGraphPass

HASHED_FOLDERS = ("kernels/attention", "kernels/experts", "kernels/linear", "kernels/state", "programs/passes")
HASHED_FILES = (
    "kernels/custom_op.py", "kernels/l2_prefetch.py", "torch_compat/inductor/graph_cache_keys.py",
    "torch_compat/dynamo/eager_input_vals.py", "torch_compat/torch_flash.py", "torch_compat/inductor/pdl.py",
    "torch_compat/triton/gluon.py", "torch_compat/triton/kernel.py", "programs/roles.py",
)  # fmt: skip


class PostGradPass(CustomGraphPass):
    """Run the passes that the flags of a program's Variant enable. `environment_key`: of the plan, part of the uuid."""

    def __init__(
        self, skinny_gemm: bool = False, inplace_residual: bool = False, fused_epilogues: bool = False,
        environment_key: str = "",
    ) -> None:  # fmt: skip
        self.skinny_gemm, self.inplace_residual, self.fused_epilogues = skinny_gemm, inplace_residual, fused_epilogues
        self.environment_key = environment_key

    def __call__(self, graph: Graph) -> None:
        assign_roles(graph)
        read_sizes_from_inputs(graph)
        eliminate_common_subexpressions(graph)
        quantise_inputs(graph)
        hoist_row_selection(graph)
        replace_top_k(graph)
        sink_slices(graph)
        if self.fused_epilogues:
            fuse_rope_into_attention(graph)
        materialize_mlp_input(graph)
        if self.skinny_gemm and importlib.util.find_spec("triton"):
            replace_with_skinny_gemm(graph)
            replace_scheme_linears(graph)
            if self.fused_epilogues:
                fuse_expert_swiglu(graph)
                prefetch_experts(graph)
                fuse_expert_sum(graph)
            fuse_residual_add(graph)
            if self.fused_epilogues:
                fuse_swiglu(graph)
                fuse_rms_norm(graph)
        if self.inplace_residual:
            fuse_inplace_residual_add(graph)

    def uuid(self) -> bytes:
        flags = f"{self.skinny_gemm} {self.inplace_residual} {self.fused_epilogues} {compiled_roles_key()}"
        return f"{combined_digest(op_source_digests())} {self.environment_key} {flags}".encode()


@functools.cache
def op_source_digests() -> dict[str, str]:
    """The digest of each source file that decides what a program with our ops computes, by path in the package."""
    package = Path(__file__).parents[2]
    files = [path for folder in HASHED_FOLDERS for path in (package / folder).glob("*.py")]
    return source_digests(package, [*files, *(package / path for path in HASHED_FILES)])

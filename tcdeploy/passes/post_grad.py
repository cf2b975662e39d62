"""A pass over Inductor's graphs: matrix products and what stands beside them, and the last layer's choice of rows.

- Merging: sibling projections trace as identical products (see models/packed_linears.py), and torch 2.11 to 2.13 keeps them
  all; one is left.
- Streaming: a product of few rows with a large weight goes to `tcdeploy::linear`, where its rule says that this is
  faster than cuBLAS (candidates named "streamed"), and ends in the addition of the residual.
- Adding in place: cuBLAS adds a product to the residual, where nothing else reads that (candidates named "adds").
- Fusing (candidates named "fused"): a streamed product ends in the gate that reads it (gates.py) and, of one row,
  normalises its input itself (norms.py); decode attention turns its queries and keys itself (rotary.py).
- Choosing early: see last_token_rows.py.
- Products of one row that Inductor writes itself: see one_row.py.

The pass has a uuid, so programs that went through it are still cached: a hash of its sources, and of those of our ops,
whose Python bodies are in no other key of torch's. They stand here and not in torch's `cache_key_tag`, because that is
part of the key under which torch keeps what it tuned as well, and the processes in which it compiles kernels do not see
it: what one had tuned, another looked for under another name, and every start tuned again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

import tcdeploy.linear.ops  # noqa: F401 - registers tcdeploy::linear
from tcdeploy.passes.gemv import materialize_mlp_input, sink_slices
from tcdeploy.passes.last_token_rows import hoist_row_selection
from tcdeploy.passes.nodes import CONVERT_ELEMENT_TYPE, SUM, VIEWS, LinearMatch, insert_call, is_weight, match_linear
from tcdeploy.passes.residual_add import fuse_inplace_residual_add, fuse_residual_add
from tcdeploy.passes.rms_norm import fuse_rms_norm
from tcdeploy.passes.rotary import fuse_rope_into_attention
from tcdeploy.passes.silu_mul import fuse_swiglu
from tcdeploy.torch_compat.custom_graph_pass import CustomGraphPass

aten = torch.ops.aten
# A product of one row may stand there as what it is made of (Inductor does that under coordinate descent).
DECOMPOSED_MM_OPS = {aten.mul.Tensor, SUM, CONVERT_ELEMENT_TYPE}
CSE_OPS = {aten.mm.default, aten.addmm.default, *VIEWS, *DECOMPOSED_MM_OPS}

HASHED_FOLDERS = ("attention", "linear", "passes")
HASHED_COMPAT_FILES = ("graph_cache_keys", "eager_input_vals", "torch_flash", "pdl")


class PostGradPass(CustomGraphPass):
    """All of the above; `skinny_gemm`, `inplace_residual` and `fused_epilogues` ask for what is named so."""

    def __init__(
        self, skinny_gemm: bool = False, inplace_residual: bool = False, fused_epilogues: bool = False
    ) -> None:
        self.skinny_gemm, self.inplace_residual, self.fused_epilogues = skinny_gemm, inplace_residual, fused_epilogues

    def __call__(self, graph: Graph) -> None:
        _eliminate_common_subexpressions(graph)
        hoist_row_selection(graph)
        sink_slices(graph)
        if self.fused_epilogues:
            fuse_rope_into_attention(graph)
        materialize_mlp_input(graph)
        if self.skinny_gemm and importlib.util.find_spec("triton"):
            replace_with_skinny_gemm(graph)
            fuse_residual_add(graph)
            if self.fused_epilogues:
                fuse_swiglu(graph)
                fuse_rms_norm(graph)
        if self.inplace_residual:
            fuse_inplace_residual_add(graph)

    def uuid(self) -> bytes:
        flags = f"{self.skinny_gemm} {self.inplace_residual} {self.fused_epilogues}"
        return f"{sources_digest()} {flags}".encode()


@functools.cache
def sources_digest() -> str:
    """Of `sources`, as hex."""
    return hashlib.sha256(b"".join(Path(name).read_bytes() for name in sources())).hexdigest()


@functools.cache
def sources() -> tuple[str, ...]:
    """The files that decide what a program with our ops in it does, and its key, beside those that torch hashes."""
    package = Path(__file__).parent.parent
    files = [path for folder in HASHED_FOLDERS for path in sorted((package / folder).glob("*.py"))]
    compat = [package / "torch_compat" / f"{name}.py" for name in HASHED_COMPAT_FILES]
    return tuple(map(str, [*files, *compat]))


def _eliminate_common_subexpressions(graph: Graph) -> None:
    seen: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in CSE_OPS:
            continue
        found = seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def replace_with_skinny_gemm(graph: Graph) -> None:
    for node in list(graph.nodes):
        product = match_linear(node)
        configs = _skinny_gemm_configs(product) if product is not None else ()
        if product is None or not configs:
            continue
        with graph.inserting_before(node):
            streamed = insert_call(graph, torch.ops.tcdeploy.linear.default, *product, configs[0])
        node.replace_all_uses_with(streamed)
        graph.erase_node(node)


def _skinny_gemm_configs(product: LinearMatch) -> tuple[int, ...]:
    from tcdeploy.linear import gemv, skinny_gemm

    x, weight = product.x.meta["val"], product.weight.meta["val"]
    if not _supports_skinny_gemm(x, weight):
        return ()
    if x.shape[0] != 1:
        return skinny_gemm.ranked_configs(x.shape[0], *weight.shape)
    return gemv.ranked_configs(*weight.shape) if is_weight(product.weight, 2) else ()  # it reads the weight early


def _supports_skinny_gemm(x: Tensor, weight: Tensor) -> bool:
    half = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype
    return half and isinstance(x.shape[0], int) and weight.is_contiguous() and x.stride(1) == 1

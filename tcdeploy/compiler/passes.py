"""A pass over Inductor's graphs: matrix products and what stands beside them, and the last layer's choice of rows.

- Merging: sibling projections trace as identical products (see models/siblings.py), and torch 2.11 to 2.13 keeps them
  all; one is left.
- Streaming: a product of few rows with a large weight goes to `tcdeploy::linear`, where its rule says that this is
  faster than cuBLAS (candidates named "streamed"), and ends in the addition of the residual.
- Adding in place: cuBLAS adds a product to the residual, where nothing else reads that (candidates named "adds").
- Fusing (candidates named "fused"): a product of one row normalises its input itself (norms.py), a streamed one ends in
  the gate that reads it (gates.py), and decode attention turns its queries and keys itself (rotary.py).
- Choosing early: see early_rows.py.
- Storing a long row. A product of one row may reach the pass in its parts, multiply and sum, because Inductor writes
  it itself under coordinate descent. It is then a reduction like any other, and Inductor moves what made its input
  into it: for the long row before a flat weight (silu of gate times up, before the down projection) each program of
  the product would make the whole row again, which cost 3.5 of 42.7 us (H100, 8B shape).

Rejected, in one run, ms per step at batch 1 (5.40 without, 5.33 with the long row stored): storing the input of every
product (5.66); gate and up as two products that Inductor sums in one kernel and ends in their silu (5.49).

The pass has a uuid, so programs that went through it are still cached: a hash of its sources. Those of the ops that
it puts in are in the cache's key by programs.py.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

import tcdeploy.linear.ops  # noqa: F401 - registers tcdeploy::linear
from tcdeploy.compiler import additions, early_rows, gates, nodes, norms, rotary
from tcdeploy.compiler.additions import add_in_place, add_residuals
from tcdeploy.compiler.early_rows import choose_early
from tcdeploy.compiler.gates import end_in_gates
from tcdeploy.compiler.nodes import ALIASES, CONVERT, SUM, VIEWS, behind_reshapes, call, product_of, row_of_parts
from tcdeploy.compiler.norms import fold_norms
from tcdeploy.compiler.rotary import turn_in_attention

aten = torch.ops.aten
# A product of one row may stand there as what it is made of (Inductor does that under coordinate descent).
PARTS = {aten.mul.Tensor, SUM, CONVERT}
PURE = {aten.mm.default, aten.addmm.default, *VIEWS, *PARTS}

# All that decides what the pass does, but for the ops.
MODULES = (additions, early_rows, gates, nodes, norms, rotary)
SOURCES = (__file__, *(module.__file__ for module in MODULES))


class RewriteProducts(CustomGraphPass):
    """All of the above; `streams`, `adds` and `fuses` ask for what is named so."""

    def __init__(self, streams: bool = False, adds: bool = False, fuses: bool = False) -> None:
        self.streams, self.adds, self.fuses = streams, adds, fuses

    def __call__(self, graph: Graph) -> None:
        _merge_identical(graph)
        choose_early(graph)
        _cut_in_place(graph)
        if self.fuses:
            turn_in_attention(graph)
            fold_norms(graph)
        _store_long_rows(graph)
        if self.streams and importlib.util.find_spec("triton"):
            _stream(graph)
            add_residuals(graph)
            if self.fuses:
                end_in_gates(graph)
        if self.adds:
            add_in_place(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files(SOURCES, f"{self.streams} {self.adds} {self.fuses}")


def _merge_identical(graph: Graph) -> None:
    first: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in PURE:
            continue
        found = first.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _cut_in_place(graph: Graph) -> None:
    """Let the slices of a product that is written in its parts be views of one tensor in its own dtype.

    Else Inductor keeps the float32 sum, and each slice is converted by whoever reads it: a kernel of its own where
    that is attention. A strided view makes it keep the converted product.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.slice.Tensor:
            continue
        product = behind_reshapes(node.args[0])
        if product.target is not CONVERT or product.args[0].target is not SUM:
            continue
        cut = node.meta["val"]
        with graph.inserting_before(node):
            view = call(
                graph, aten.as_strided.default, product, list(cut.shape), list(cut.stride()), cut.storage_offset()
            )
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def _store_long_rows(graph: Graph) -> None:
    """Have the input of a product that is written in its parts stored, where it is longer than the output.

    A strided view is what makes Inductor store it.
    """
    for node in list(graph.nodes):
        row = row_of_parts(node)
        if row is None or row.meta["val"].shape[1] <= node.meta["val"].shape[1] or not _is_made_here(row.args[0]):
            continue
        narrow: Any = row.args[0]
        value = narrow.meta["val"]
        with graph.inserting_before(row):
            stored = call(graph, aten.as_strided.default, narrow, list(value.shape), list(value.stride()), 0)
        row.replace_input_with(narrow, stored)


def _is_made_here(node: Any) -> bool:
    """Whether the tensor is computed by this graph and begins where its memory does: an input is stored already."""
    value, maker = node.meta["val"], behind_reshapes(node)
    is_plain = value.is_contiguous() and value.storage_offset() == 0
    return is_plain and maker.op == "call_function" and maker.target not in ALIASES


def _stream(graph: Graph) -> None:
    from tcdeploy.linear.kernels import candidates

    for node in list(graph.nodes):
        product = product_of(node)
        if product is None:
            continue
        x, weight = product.x.meta["val"], product.weight.meta["val"]
        configs = candidates(x.shape[0], *weight.shape) if _is_streamable(x, weight) else ()
        if not configs:
            continue
        with graph.inserting_before(node):
            streamed = call(graph, torch.ops.tcdeploy.linear.default, *product, configs[0])
        node.replace_all_uses_with(streamed)
        graph.erase_node(node)


def _is_streamable(x: Tensor, weight: Tensor) -> bool:
    half = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype
    return half and isinstance(x.shape[0], int) and weight.is_contiguous() and x.stride(1) == 1

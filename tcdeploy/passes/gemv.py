"""Products of one row that Inductor writes itself, as it does under coordinate descent: multiply, and sum.

They are reductions like any other, and fuse with what stands around them; what that spoils is mended here. (Those of
candidates named "streamed" are our own kernel's, linear/gemv.py.)

- Slices of such a product are cut out of what is stored.
- Inductor moves what made a product's input into the product. For the long row before a flat weight (silu of gate times
  up, before the down projection) each program would make the whole row again, which cost 3.5 of 42.7 us (H100, 8B
  shape): that row is stored.

Rejected, in one run, ms per step at batch 1 (5.40 without, 5.33 with the long row stored): storing the input of every
product (5.66); gate and up as two products that Inductor sums in one kernel and ends in their silu (5.49).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from tcdeploy.passes.nodes import ALIASES, CONVERT_ELEMENT_TYPE, SUM, insert_call, strip_reshapes, target_of

aten = torch.ops.aten


def _decomposed_gemv_input(sum_node: Any) -> Node | None:
    """The float32 row [1, k] of a product that is written in its parts, sum over k of [1, k, 1] * [1, k, n]."""
    times: Any = sum_node.args[0] if target_of(sum_node) is SUM and list(sum_node.args[1:]) == [[1]] else None
    if target_of(times) is not aten.mul.Tensor or sum_node.kwargs:
        return None
    unsqueezed, shape = times.args[0], times.meta["val"].shape
    if len(shape) != 3 or shape[0] != 1 or target_of(unsqueezed) is not aten.unsqueeze.default:
        return None
    row: Any = unsqueezed.args[0] if unsqueezed.args[1] == 2 else None
    if target_of(row) is not CONVERT_ELEMENT_TYPE or row.meta["val"].shape != shape[:2]:
        return None
    return row if row.meta["val"].dtype == sum_node.meta["val"].dtype == torch.float32 else None


def sink_slices(graph: Graph) -> None:
    """Let the slices of a product that is written in its parts be views of one tensor in its own dtype.

    Else Inductor keeps the float32 sum, and each slice is converted by whoever reads it: a kernel of its own where
    that is attention. A strided view makes it keep the converted product.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.slice.Tensor:
            continue
        product = strip_reshapes(node.args[0])
        if target_of(product) is not CONVERT_ELEMENT_TYPE or target_of(product.args[0]) is not SUM:
            continue
        slice_value = node.meta["val"]
        with graph.inserting_before(node):
            view = insert_call(
                graph,
                aten.as_strided.default,
                product,
                list(slice_value.shape),
                list(slice_value.stride()),
                slice_value.storage_offset(),
            )
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def materialize_mlp_input(graph: Graph) -> None:
    """Have the input of a product that is written in its parts stored, where it is longer than the output.

    A strided view is what makes Inductor store it.
    """
    for node in list(graph.nodes):
        row = _decomposed_gemv_input(node)
        if (
            row is None
            or row.meta["val"].shape[1] <= node.meta["val"].shape[1]
            or not _is_computed_in_graph(row.args[0])
        ):
            continue
        narrow: Any = row.args[0]
        value = narrow.meta["val"]
        with graph.inserting_before(row):
            stored = insert_call(graph, aten.as_strided.default, narrow, list(value.shape), list(value.stride()), 0)
        row.replace_input_with(narrow, stored)


def _is_computed_in_graph(node: Any) -> bool:
    """Whether the tensor is computed by this graph and begins where its memory does: an input is stored already."""
    value, maker = node.meta["val"], strip_reshapes(node)
    is_plain = value.is_contiguous() and value.storage_offset() == 0
    return is_plain and maker.op == "call_function" and maker.target not in ALIASES

"""FX passes for one-row products that Inductor lowers as a multiply and a sum, as it does under coordinate descent.

Inductor fuses such reductions with their neighbours like any other. Two effects of that are undone here.

- Slices of the product read the float32 sum and convert it again; `sink_slices` makes them views of the stored result.
- The producer of the input row is recomputed in every program. For the MLP's down projection that is silu(gate) * up,
  and costs 3.5 of 42.7 us (H100, Llama 3.1 8B); `materialize_mlp_input` stores that row.

Rejected: storing the input of every product (5.66 ms per step instead of 5.33). More in docs/performance-log.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from tcdeploy.programs.passes.nodes import (
    ALIASES,
    CONVERT_ELEMENT_TYPE,
    SUM,
    count_symbolic,
    insert_call,
    strip_reshapes,
    target_of,
)

aten = torch.ops.aten


def _decomposed_gemv_input(sum_node: Any) -> Node | None:
    """The float32 input row [1, k] if `sum_node` sums [1, k, 1] * [1, k, n] over k, else None."""
    product: Any = sum_node.args[0] if target_of(sum_node) is SUM and list(sum_node.args[1:]) == [[1]] else None
    if target_of(product) is not aten.mul.Tensor or sum_node.kwargs:
        return None
    unsqueezed, shape = product.args[0], product.meta["val"].shape
    if len(shape) != 3 or count_symbolic(shape) or shape[0] != 1:
        return None
    if target_of(unsqueezed) is not aten.unsqueeze.default:
        return None
    row: Any = unsqueezed.args[0] if unsqueezed.args[1] == 2 else None
    if target_of(row) is not CONVERT_ELEMENT_TYPE or row.meta["val"].shape != shape[:2]:
        return None
    return row if row.meta["val"].dtype == sum_node.meta["val"].dtype == torch.float32 else None


def sink_slices(graph: Graph) -> None:
    """Make slices of a decomposed product views of one tensor in the output dtype.

    An `as_strided` view makes Inductor store the converted product, which saves a kernel before attention.
    """
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        product = strip_reshapes(node.args[0])
        if target_of(product) is not CONVERT_ELEMENT_TYPE or target_of(product.args[0]) is not SUM:
            continue
        value = node.meta["val"]
        shape, strides, offset = list(value.shape), list(value.stride()), value.storage_offset()
        if count_symbolic([*shape, *strides, offset]):
            continue  # not a product of one row
        with graph.inserting_before(node):
            view = insert_call(graph, aten.as_strided.default, product, shape, strides, offset)
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def materialize_mlp_input(graph: Graph) -> None:
    """Store the input row of a decomposed product if it is longer than the output row and computed in this graph."""
    for node in list(graph.nodes):
        row = _decomposed_gemv_input(node)
        if row is None or row.meta["val"].shape[1] <= node.meta["val"].shape[1]:
            continue
        if not _is_computed_in_graph(row.args[0]):
            continue
        source: Any = row.args[0]  # the row before its conversion to float32
        value = source.meta["val"]
        with graph.inserting_before(row):
            # An `as_strided` view makes Inductor store it.
            stored = insert_call(graph, aten.as_strided.default, source, list(value.shape), list(value.stride()), 0)
        row.replace_input_with(source, stored)


def _is_computed_in_graph(node: Any) -> bool:
    """Whether this graph computes the whole of the tensor's storage. Inputs of the graph are stored already."""
    value, producer = node.meta["val"], strip_reshapes(node)
    is_whole_storage = value.is_contiguous() and value.storage_offset() == 0
    return is_whole_storage and producer.op == "call_function" and producer.target not in ALIASES

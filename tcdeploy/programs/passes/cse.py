"""FX pass: common subexpression elimination for matrix products and the views around them.

Packed projections trace as identical products (models/convert/packed_linears.py), and torch 2.11 to 2.13 keep them all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers tcdeploy::scheme_linear
from tcdeploy.programs.passes.nodes import CONVERT_ELEMENT_TYPE, SUM, VIEWS

aten = torch.ops.aten
# Under coordinate descent Inductor decomposes a one-row product into these.
DECOMPOSED_MM_OPS = {aten.mul.Tensor, SUM, CONVERT_ELEMENT_TYPE}
CSE_OPS = {
    aten.mm.default, aten.addmm.default, torch.ops.tcdeploy.scheme_linear.default, *VIEWS, *DECOMPOSED_MM_OPS,
}  # fmt: skip


def eliminate_common_subexpressions(graph: Graph) -> None:
    """Replace each node of CSE_OPS by the first node with the same target and arguments."""
    first_nodes: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in CSE_OPS:
            continue
        first = first_nodes.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)

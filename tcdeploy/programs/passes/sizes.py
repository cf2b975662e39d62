"""FX pass: read symbolic sizes from the inputs of the graph.

torch.export's graphs read the number of tokens from intermediate tensors, by `aten.sym_size`. Such a node is a user of
its tensor, and the other passes replace a tensor only if they know all its users: it prevented moving the selection of
rows up into the last layer (last_token_rows.py). Graphs of torch.compile have their sizes as inputs.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from tcdeploy.programs.passes.nodes import erase_if_unused

SYM_SIZE = torch.ops.aten.sym_size.int


def read_sizes_from_inputs(graph: Graph) -> None:
    """Replace each `sym_size` of an intermediate tensor by the equal size of an input, if there is one."""
    inputs = _sizes_of_inputs(graph)
    for node in graph.find_nodes(op="call_function", target=SYM_SIZE):
        source = inputs.get(str(node.meta.get("val")))
        if source is None or node.args == source:
            continue
        with graph.inserting_before(node):
            size = graph.call_function(SYM_SIZE, source)
        size.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(size)
        erase_if_unused(graph, node)


def _sizes_of_inputs(graph: Graph) -> dict[str, tuple[Node, int]]:
    """The first input and dimension that has a symbolic size, by the size's expression."""
    sizes: dict[str, tuple[Node, int]] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if not isinstance(size, int):
                sizes.setdefault(str(size), (node, dim))
    return sizes

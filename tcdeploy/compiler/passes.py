"""A pass over Inductor's graphs: products that are computed twice are computed once.

Sibling projections trace as identical matrix products (see models/siblings.py), and torch 2.11 to 2.13 keeps them all.
The pass has a uuid, so programs that went through it are still cached.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

aten = torch.ops.aten
PURE = {aten.mm.default, aten.addmm.default, aten.permute.default, aten.view.default, aten.reshape.default}


class MergeIdenticalProducts(CustomGraphPass):
    """Replace a repeated product, and the views that lead to it, by the first one."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        first: dict[tuple[Any, ...], torch.fx.Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in PURE:
                continue
            found = first.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if found is not node:
                node.replace_all_uses_with(found)
                graph.erase_node(node)

    def uuid(self) -> str:
        return "tcdeploy-merge-identical-products-1"

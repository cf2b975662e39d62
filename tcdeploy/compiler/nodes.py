"""New nodes for Inductor's graphs, which asks each for the tensor that it would give."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg


def call(graph: Graph, target: Any, *args: Any) -> Node:
    """`target(*args)` at the graph's insertion point; at least one argument is a node of a tensor."""
    node = graph.call_function(target, args)
    values = map_arg(args, lambda arg: arg.meta["val"])
    with next(value for value in values if isinstance(value, torch.Tensor)).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = target(*values)
    return node

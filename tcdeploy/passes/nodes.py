"""What the passes over Inductor's graphs share: new nodes, and what a node is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten = torch.ops.aten
RESHAPES = {aten.view.default, aten.reshape.default}
VIEWS = {aten.permute.default, aten.unsqueeze.default, *RESHAPES}
CONVERT_ELEMENT_TYPE = torch.ops.prims.convert_element_type.default
SUM = aten.sum.dim_IntList
FLOAT_DTYPES = {torch.bfloat16, torch.float16, torch.float32}
ALIASES = {*VIEWS, aten.slice.Tensor, aten.as_strided.default, aten.expand.default, aten.select.int}


def insert_call(graph: Graph, target: Any, *args: Any) -> Node:
    """`target(*args)` at the graph's insertion point; at least one argument is a node of a tensor.

    Inductor asks each node for the tensor that it would give.
    """
    node = graph.call_function(target, args)
    values = map_arg(args, lambda arg: arg.meta["val"])
    with next(value for value in values if isinstance(value, torch.Tensor)).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = target(*values)
    return node


def is_float_cast(node: Any) -> bool:
    """Whether `node` is its argument in another floating type: the same number, more or less exactly."""
    return target_of(node) is CONVERT_ELEMENT_TYPE and node.meta["val"].dtype in FLOAT_DTYPES


def target_of(node: Any) -> Any:
    return node.target if isinstance(node, Node) and node.op == "call_function" else None


def strip_reshapes(node: Any) -> Any:
    while node.op == "call_function" and node.target in RESHAPES:
        node = node.args[0]
    return node


def erase_if_unused(graph: Graph, node: Node) -> None:
    """Erase `node` if nobody reads it, and what was made for it alone; all of it is pure."""
    made = {node}
    for one in reversed(list(graph.nodes)):
        if one in made and not one.users and one.op == "call_function":
            made.update(one.all_input_nodes)
            graph.erase_node(one)


def strip_aliases(node: Any) -> Any:
    while target_of(node) in ALIASES:
        node = node.args[0]
    return node


def is_weight(node: Any, ndim: int) -> bool:
    """Whether the tensor is, or views, an input of the graph of so many dimensions: what no kernel of a step writes.

    Of one and two these are the parameters: what flows between layers has three ([1, tokens, hidden]), a cache more.
    """
    given = strip_aliases(node)
    return given.op == "placeholder" and given.meta["val"].ndim == ndim


class LinearMatch(NamedTuple):
    """x [rows, k] @ weight [n, k].T + bias [n], as nodes."""

    x: Node
    weight: Node
    bias: Node | None


def match_linear(node: Node) -> LinearMatch | None:
    """What `node` multiplies, where it is a linear layer's product."""
    if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return None
    bias, x, transposed = (None, *node.args) if node.target == aten.mm.default else node.args
    if not isinstance(transposed, Node) or transposed.target != aten.permute.default or transposed.args[1] != [1, 0]:
        return None
    return LinearMatch(x, transposed.args[0], bias)  # type: ignore[arg-type]

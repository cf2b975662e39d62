"""Helpers shared by the FX passes: inserting nodes, looking through views and casts, matching linear layers.

In a program for a range of lengths, the sizes in `meta["val"]` may be SymInts. Passes compare them by `is_same_size`,
because `==` may add a guard after tracing. SymInts must not be arguments of nodes: torch warns that no node computes
them. `insert_reshape` passes -1 instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tcdeploy.programs.roles import ROLE, Role, roles_of

aten = torch.ops.aten
RESHAPES = {aten.view.default, aten.reshape.default}
VIEWS = {aten.permute.default, aten.unsqueeze.default, *RESHAPES}
CONVERT_ELEMENT_TYPE = torch.ops.prims.convert_element_type.default
SUM = aten.sum.dim_IntList
FLOAT_DTYPES = {torch.bfloat16, torch.float16, torch.float32}
ALIASES = {*VIEWS, aten.slice.Tensor, aten.as_strided.default, aten.expand.default, aten.select.int}


def insert_call(graph: Graph, target: Any, *args: Any) -> Node:
    """Insert `target(*args)` at the graph's insertion point. At least one argument must be a tensor's node.

    Sets `meta["val"]`, the fake result, which Inductor needs of each node.
    """
    node = graph.call_function(target, args)
    values = map_arg(args, lambda arg: arg.meta["val"])
    with next(value for value in values if isinstance(value, torch.Tensor)).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = target(*values)
    return node


def insert_reshape(graph: Graph, node: Node, shape: Sequence[Any]) -> Node:
    """Insert a reshape of `node` to `shape`, which may hold one symbolic size: it is passed as -1."""
    return insert_call(graph, aten.reshape.default, node, without_symbols(shape))


def without_symbols(shape: Sequence[Any]) -> list[int]:
    """`shape` as the argument of a reshape, with -1 in place of its symbolic size, of which there is at most one."""
    assert count_symbolic(shape) <= 1, shape
    return [size if isinstance(size, int) else -1 for size in shape]


def count_symbolic(sizes: Sequence[Any]) -> int:
    """How many of the sizes or strides are SymInts."""
    return sum(not isinstance(size, int) for size in sizes)


def is_same_size(first: Any, second: Any) -> bool:
    """Whether two sizes are the same integer or the same symbolic expression."""
    return str(first) == str(second)


def is_one(size: Any) -> bool:
    """Whether a size is the integer 1. The symbols of token and row counts start at 2."""
    return isinstance(size, int) and size == 1


def is_float_cast(node: Any) -> bool:
    """Whether `node` converts its argument to a floating dtype, so that only its rounding changes."""
    return target_of(node) is CONVERT_ELEMENT_TYPE and node.meta["val"].dtype in FLOAT_DTYPES


def target_of(node: Any) -> Any:
    """The op that `node` calls; None for placeholders, outputs and constants."""
    return node.target if isinstance(node, Node) and node.op == "call_function" else None


def strip_reshapes(node: Any) -> Any:
    """The node under any reshapes of it."""
    while target_of(node) in RESHAPES:
        node = node.args[0]
    return node


def erase_if_unused(graph: Graph, node: Node) -> None:
    """Erase `node` if it has no users, then its inputs if they lost their last user. All of them must be pure."""
    candidates = {node}
    for candidate in reversed(list(graph.nodes)):
        if candidate in candidates and not candidate.users and candidate.op == "call_function":
            candidates.update(candidate.all_input_nodes)
            graph.erase_node(candidate)


def strip_aliases(node: Any) -> Any:
    """The node whose memory `node` views."""
    while target_of(node) in ALIASES:
        node = node.args[0]
    return node


def assign_roles(graph: Graph) -> None:
    """Write down the role of each input of a program's graph, for `is_weight` and `is_rows`."""
    placeholders = graph.find_nodes(op="placeholder")
    roles = roles_of([node.meta.get("val") for node in placeholders])
    for node, role in zip(placeholders, roles, strict=False):
        node.meta[ROLE] = role


def is_weight(node: Any) -> bool:
    """Whether `node` is, or views, a weight, which may be read early (PDL).

    Excludes a buffer that this graph writes. A post-grad graph writes an input by `copy_` at its end.
    """
    source = strip_aliases(node)
    is_written = any(target_of(user) is aten.copy_.default and user.args[0] is source for user in source.users)
    return source.meta.get(ROLE) is Role.WEIGHT and not is_written


def is_rows(node: Any) -> bool:
    """Whether `node` is the input that holds the indices of the tokens to return."""
    return isinstance(node, Node) and node.meta.get(ROLE) is Role.ROWS


class LinearMatch(NamedTuple):
    """x [rows, k] @ weight [n, k].T + bias [n], as nodes."""

    x: Node
    weight: Node
    bias: Node | None


def match_linear(node: Node) -> LinearMatch | None:
    """The operands of `node` if it computes a linear layer, else None."""
    if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return None
    bias, x, transposed = (None, *node.args) if node.target == aten.mm.default else node.args
    if not isinstance(transposed, Node) or transposed.target != aten.permute.default or transposed.args[1] != [1, 0]:
        return None
    return LinearMatch(x, transposed.args[0], bias)  # type: ignore[arg-type]

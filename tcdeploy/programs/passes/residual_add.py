"""FX passes: fuse the residual addition into the product before it, which saves a kernel and a trip through memory.

The ops of ADDENDS take the residual as an argument. cuBLAS can accumulate any other product into the residual in place
if nothing reads the residual later, as at the end of a layer: residual += down(x).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

import tcdeploy.kernels.experts.ops  # noqa: F401 - registers the ops, as the next line does
import tcdeploy.kernels.linear.ops  # noqa: F401
from tcdeploy.programs.passes.nodes import (
    ALIASES,
    RESHAPES,
    count_symbolic,
    erase_if_unused,
    insert_call,
    insert_reshape,
    match_linear,
    strip_reshapes,
    target_of,
)

aten, tcdeploy_ops = torch.ops.aten, torch.ops.tcdeploy
ADDENDS = {  # the position of the addend in the arguments of each op
    tcdeploy_ops.linear.default: 2, tcdeploy_ops.fused_scheme_linear.default: 2,
    tcdeploy_ops.expert_linear_sum.default: 5,
}  # fmt: skip


def fuse_residual_add(graph: Graph) -> None:
    """Pass the other operand of an addition to an op of ADDENDS that has no addend and that only the addition reads."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        products = [arg for arg in node.args if _takes_addend(node, arg)]
        others = [arg for arg in node.args if arg not in products]
        if node.kwargs or len(products) != 1 or not isinstance(others[0], Node):
            continue
        linear_node, shape = strip_reshapes(products[0]), node.meta["val"].shape
        values = [operand.meta["val"] for operand in (node, products[0], others[0])]
        if not _same_dtype_and_shape(*values) or not values[2].is_contiguous():
            continue
        with graph.inserting_before(node):
            rows = insert_reshape(graph, others[0], linear_node.meta["val"].shape)
            addend = ADDENDS[linear_node.target]
            args = (*linear_node.args[:addend], rows, *linear_node.args[addend + 1 :])
            added = insert_call(graph, linear_node.target, *args)
            shaped = insert_reshape(graph, added, shape)
        node.replace_all_uses_with(shaped)
        graph.erase_node(node)
        erase_if_unused(graph, products[0])


def fuse_inplace_residual_add(graph: Graph) -> None:
    """Accumulate a product into the sum (a new tensor, no input) that it is added to, if nothing reads it later."""
    positions = {node: position for position, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.add.Tensor or node.kwargs:
            continue
        for accumulator, reshaped in (node.args, node.args[::-1]):
            product = match_linear(strip_reshapes(reshaped)) if has_single_consumer(node, reshaped) else None
            if product is None or product.bias is not None or not _is_last_consumer(node, accumulator, positions):
                continue
            product_shape = strip_reshapes(reshaped).meta["val"].shape
            has_same_shape = _same_dtype_and_shape(node.meta["val"], reshaped.meta["val"], accumulator.meta["val"])
            if not has_same_shape or count_symbolic(product_shape) > 1:
                continue
            with graph.inserting_before(node):
                rows = insert_reshape(graph, accumulator, product_shape)
                insert_call(graph, tcdeploy_ops.linear_add_.default, rows, product.x, product.weight)
            node.replace_all_uses_with(accumulator)
            graph.erase_node(node)
            erase_if_unused(graph, reshaped)
            break


def has_single_consumer(consumer: Node, arg: Any) -> bool:
    """Whether `consumer` is the only reader of `arg` and of the nodes that it reshapes."""
    while isinstance(arg, Node) and list(arg.users) == [consumer]:
        if target_of(arg) not in RESHAPES:
            return True
        consumer, arg = arg, arg.args[0]
    return False


def _is_last_consumer(consumer: Node, accumulator: Any, positions: dict[Node, int]) -> bool:
    """Whether `accumulator` is a sum that nothing reads after `consumer`, not even through a view."""
    if target_of(accumulator) is not aten.add.Tensor:
        return False
    readers = [user for user in accumulator.users if user is not consumer]
    for user in readers:
        if user not in positions or positions[user] > positions[consumer]:
            return False
        if target_of(user) in ALIASES:
            readers += user.users
    return True


def _same_dtype_and_shape(*values: Tensor) -> bool:
    """Symbolic sizes are compared as expressions: they cannot be hashed, and `==` could add a guard."""
    return len({(value.dtype, *map(str, value.shape)) for value in values}) == 1


def _takes_addend(consumer: Node, arg: Any) -> bool:
    """Whether `arg` is an op of ADDENDS without an addend, whose only reader is `consumer`."""
    source: Any = strip_reshapes(arg) if has_single_consumer(consumer, arg) else None
    return target_of(source) in ADDENDS and source.args[ADDENDS[source.target]] is None

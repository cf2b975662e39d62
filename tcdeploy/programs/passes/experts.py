"""FX passes: fuse the operations around the products of experts into them, for the few pairs that the GEMV multiplies.

- `fuse_expert_swiglu`: silu(gate) * up becomes the epilogue of the first product, which saves a kernel per layer.
- `prefetch_experts`: the kernel that chooses the experts prefetches a part of their weights.
- `fuse_expert_sum`: the weighted sum over the experts of a token, and the residual, become the epilogue of the second
  product, which saves another.

More pairs stay with `tcdeploy::expert_linear`, whose programs multiply pairs of different tokens. Other activations,
such as that of gpt-oss, are not fused.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

import tcdeploy.kernels.experts.ops  # noqa: F401 - registers the ops
from tcdeploy.kernels.experts.matmul import is_fusable, is_summable
from tcdeploy.programs.passes.nodes import (
    SUM,
    count_symbolic,
    erase_if_unused,
    insert_call,
    insert_reshape,
    is_float_cast,
    is_weight,
    strip_reshapes,
    target_of,
)
from tcdeploy.programs.passes.residual_add import has_single_consumer
from tcdeploy.programs.passes.silu_mul import is_only_used_by, silu_input

aten, tcdeploy_ops = torch.ops.aten, torch.ops.tcdeploy
EXPERT_LINEAR = tcdeploy_ops.expert_linear.default
FIRST_PRODUCTS = {EXPERT_LINEAR, tcdeploy_ops.gated_expert_linear.default}


def fuse_expert_swiglu(graph: Graph) -> None:
    """Replace silu(gate) * up of the halves of an `expert_linear` that nothing else reads."""
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if node.kwargs:
            continue
        for silu, up in (node.args, node.args[::-1]):
            product = _match_halves(silu_input(silu), up)
            if product is not None and _is_epilogue(node, product):
                x, expert_ids, _, *rest = product.args
                with graph.inserting_before(node):
                    gated = insert_call(graph, tcdeploy_ops.gated_expert_linear.default, x, expert_ids, *rest)
                node.replace_all_uses_with(gated)
                erase_if_unused(graph, node)
                break


def prefetch_experts(graph: Graph) -> None:
    """Let `top_k` prefetch the weights of the product with the experts that it chooses, if it is gated.

    The first programs of that product read the rows of both halves that `top_k` has prefetched.
    """
    for node in graph.find_nodes(op="call_function", target=tcdeploy_ops.gated_expert_linear.default):
        ids: Any = node.args[1]
        weight: Any = node.args[2][0]  # type: ignore[index]
        top_k: Any = ids.args[0] if target_of(ids) is operator.getitem else None
        if target_of(top_k) is not tcdeploy_ops.top_k.default or len(top_k.args) != 4:
            continue
        value = weight.meta["val"]
        if weight.op == "placeholder" and is_weight(weight) and value.is_contiguous():
            top_k.args = (*top_k.args, weight)


def _match_halves(gate: Any, up: Any) -> Node | None:
    """The `expert_linear` whose two halves these are, if the GEMV computes it, else None."""
    if target_of(gate) is not operator.getitem or target_of(up) is not operator.getitem:
        return None
    split = gate.args[0]
    if target_of(split) is not aten.split.Tensor or (gate.args, up.args) != ((split, 0), (split, 1)):
        return None
    product, size, *dim = split.args
    if target_of(product) is not EXPERT_LINEAR:
        return None
    is_half = dim in ([1], [-1]) and size * 2 == product.meta["val"].shape[1]
    return product if is_half and _is_fusable(product) else None


def _is_epilogue(node: Node, product: Node) -> bool:
    return node.meta["val"].dtype == product.meta["val"].dtype and is_only_used_by(product, node)


def _is_fusable(product: Node) -> bool:
    x, expert_ids, _, tensors, _, scheme = product.args
    ids = expert_ids.meta["val"]  # type: ignore[union-attr]
    if count_symbolic(ids.shape):
        return False
    values = [tensor.meta["val"] for tensor in tensors]  # type: ignore[union-attr]
    return is_fusable(str(scheme), ids.numel(), x.meta["val"].dtype, values)  # type: ignore[union-attr]


def fuse_expert_sum(graph: Graph) -> None:
    """Replace (product * factors).view(tokens, top_k, n).sum(1), where the product is an `expert_linear`.

    A later pass, `fuse_residual_add`, makes the residual an argument of the new op.
    """
    for node in graph.find_nodes(op="call_function", target=SUM):
        match = _match_weighted(node)
        rounded = None if match is None else _rounded(node, match.product.meta["val"].dtype)
        if match is None or rounded is None:
            continue
        x, expert_ids, _, tensors, bias, scheme = match.product.args
        with graph.inserting_before(node):
            factors = insert_reshape(graph, match.factors, expert_ids.meta["val"].shape)  # type: ignore[union-attr]
            args = (x, expert_ids, factors, tensors, bias, None, scheme)
            total = insert_call(graph, tcdeploy_ops.expert_linear_sum.default, *args)
        rounded.replace_all_uses_with(total)
        erase_if_unused(graph, rounded)


class WeightedSum(NamedTuple):
    product: Node  # an `expert_linear`
    factors: Node  # [pairs, 1], what it is multiplied by


def _match_weighted(node: Node) -> WeightedSum | None:
    """The operands of a sum over dimension 1 of [tokens, top_k, n] for which `expert_linear_sum` has a kernel."""
    if len(node.args) != 2 or node.args[1] != [1] or node.kwargs:
        return None
    weighted = strip_reshapes(node.args[0])
    if target_of(weighted) is not aten.mul.Tensor or weighted.kwargs or not has_single_consumer(node, node.args[0]):
        return None
    for product, factors in (weighted.args, weighted.args[::-1]):
        if target_of(product) is EXPERT_LINEAR and list(product.users) == [weighted] and isinstance(factors, Node):
            is_match = _is_summable(product, factors, node.args[0].meta["val"].shape)  # type: ignore[union-attr]
            return WeightedSum(product, factors) if is_match else None
    return None


def _is_summable(product: Node, factors: Node, summed_shape: Any) -> bool:
    x, expert_ids, _, tensors, _, scheme = product.args
    x_value, ids, factor, value = (node.meta["val"] for node in (x, expert_ids, factors, product))  # type: ignore[union-attr]
    if any(count_symbolic(part.shape) for part in (x_value, ids, factor)):
        return False
    pairs, weights = ids.numel(), [tensor.meta["val"] for tensor in tensors]  # type: ignore[union-attr]
    return (
        list(summed_shape) == [*ids.shape, value.shape[1]] and list(factor.shape) == [pairs, 1]
        and len(x_value) == pairs and is_summable(str(scheme), pairs, x_value.dtype, weights)
        and all(map(is_weight, tensors)) and ids.is_contiguous()  # type: ignore[arg-type]
        and _depends_on_product(x, expert_ids)
    )  # fmt: skip


def _depends_on_product(x: Any, expert_ids: Any) -> bool:
    """Whether x is computed from a product with these ids: the sum then does not follow the kernel that writes them."""
    seen, nodes = set(), [x]
    while nodes:
        node = nodes.pop()
        if target_of(node) in FIRST_PRODUCTS and node.args[1] is expert_ids:
            return True
        if node not in seen:
            seen.add(node)
            nodes += node.all_input_nodes
    return False


def _rounded(node: Node, dtype: torch.dtype) -> Node | None:
    """`node`, or the cast that alone reads it, whichever has this dtype."""
    if node.meta["val"].dtype == dtype:
        return node
    users = list(node.users)
    is_cast = len(users) == 1 and is_float_cast(users[0]) and users[0].meta["val"].dtype == dtype
    return users[0] if is_cast else None

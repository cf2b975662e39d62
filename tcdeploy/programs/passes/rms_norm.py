"""FX pass: fuse RMSNorm into the GEMVs that read its output, at batch 1.

RMSNorm multiplies a row x by weights g and by the scalar 1 / sqrt(mean(x^2) + eps). The scalar can be applied to the
product instead, and the GEMV (kernels/linear/gemv.py; scheme_matmul.py for quantised weights) sums the squares of x
beside the product, while it waits for its weights. The first product of dense experts does the same. This removes two
kernels per Llama layer, each a reduction of one row that leaves most of the GPU idle.

Rounding differs from eager mode: x * g stays in float32. Rejected: the same rewrite for the products that Inductor
lowers itself under coordinate descent (5.62 ms per step instead of 5.42; docs/performance-log.md).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

import tcdeploy.kernels.experts.ops  # noqa: F401 - registers the ops, as the next line does
import tcdeploy.kernels.linear.ops  # noqa: F401
from tcdeploy.kernels.linear.scheme_matmul import is_norm_fusable
from tcdeploy.programs.passes.nodes import (
    CONVERT_ELEMENT_TYPE,
    RESHAPES,
    erase_if_unused,
    insert_call,
    is_float_cast,
    is_weight,
    target_of,
)

aten, tcdeploy_ops = torch.ops.aten, torch.ops.tcdeploy
MUL = aten.mul.Tensor
EPS_ADD_OPS = {aten.add.Tensor, aten.add.Scalar}  # of modelling code, and of torch.nn.functional.rms_norm
SCHEME_LINEAR = tcdeploy_ops.fused_scheme_linear.default
EXPERT_LINEAR = tcdeploy_ops.gated_expert_linear.default
FUSABLE_LINEARS = {
    tcdeploy_ops.linear.default, tcdeploy_ops.linear_silu_mul.default, SCHEME_LINEAR, EXPERT_LINEAR,
}  # fmt: skip


class RMSNormMatch(NamedTuple):
    """The nodes of x * rsqrt * weight, where rsqrt = 1 / sqrt(mean(x^2) + eps)."""

    x: Node
    rsqrt: Node
    eps: float
    weight: Node


def fuse_rms_norm(graph: Graph) -> None:
    """Fuse each RMSNorm whose only readers are nodes of FUSABLE_LINEARS with one row."""
    matches = {}
    for node in graph.nodes:
        if target_of(node) in FUSABLE_LINEARS and node.args[0].meta["val"].shape[0] == 1 and _takes_norm(node):
            norm = _match_rms_norm(node.args[0])
            if norm is not None:
                matches[node] = norm
    # A list: _fuse changes the users that _feeds_only looks at.
    for node, norm in [(node, norm) for node, norm in matches.items() if _feeds_only(norm.rsqrt, matches.keys())]:
        _fuse(graph, node, norm)


def _takes_norm(node: Node) -> bool:
    """Whether the kernel of a product can normalise its input, and is not slower than norm and product apart."""
    if node.target is EXPERT_LINEAR:
        return node.args[4] == ""
    if node.target is SCHEME_LINEAR:
        return is_norm_fusable(str(node.args[-1]), [tensor.meta["val"] for tensor in node.args[1]])  # type: ignore[union-attr]
    return True


def _match_rms_norm(row: Node) -> RMSNormMatch | None:
    """The RMSNorm that computes `row` [1, size] from all elements of a contiguous tensor, else None."""
    norm = match_norm(row)
    if norm is None:
        return None
    value, size = norm.x.meta["val"], row.meta["val"].shape[1]
    return norm if value.shape[-1] == value.numel() == size and value.is_contiguous() else None


def match_norm(row: Node) -> RMSNormMatch | None:
    """The RMSNorm over the last dimension of some x that computes `row`, else None. x may have another shape."""
    rsqrts = [factor for factor in _factors(row, None) if target_of(factor) is aten.rsqrt.default]
    if len(rsqrts) != 1:
        return None
    [rsqrt] = rsqrts
    mean_plus_eps: Any = rsqrt.args[0]
    mean: Any = mean_plus_eps.args[0] if target_of(mean_plus_eps) in EPS_ADD_OPS and not mean_plus_eps.kwargs else None
    if target_of(mean) is not aten.mean.dim or mean.kwargs or not isinstance(mean_plus_eps.args[1], (float, int)):
        return None
    power: Any = mean.args[0]
    if target_of(power) is not aten.pow.Tensor_Scalar or power.args[1] != 2:
        return None
    if mean.args[1] not in ([-1], [power.meta["val"].ndim - 1]):
        return None
    x: Any = power.args[0].args[0] if target_of(power.args[0]) is CONVERT_ELEMENT_TYPE else power.args[0]
    rest = [factor for factor in _factors(row, x) if factor is not rsqrt]
    weights = [factor for factor in rest if factor is not x]
    if len(rest) != 2 or len(weights) != 1 or not is_weight(weights[0]):
        return None
    size, weight = row.meta["val"].shape[-1], weights[0].meta["val"]
    if x.meta["val"].shape[-1] != size or x.meta["val"].dtype != row.meta["val"].dtype:
        return None
    if weight.numel() != size or weight.shape[-1:] != (size,) or not weight.is_contiguous():
        return None
    return RMSNormMatch(x, rsqrt, float(mean_plus_eps.args[1]), weights[0])


def _factors(node: Any, stop: Node | None) -> list[Node]:
    """The factors of the product `node`, looking through float casts and reshapes. `stop` counts as one factor."""
    if node is not stop and (is_float_cast(node) or target_of(node) in RESHAPES):
        return _factors(node.args[0], stop)
    if node is not stop and target_of(node) is MUL and all(isinstance(arg, Node) for arg in node.args):
        return [factor for arg in node.args for factor in _factors(arg, stop)]
    return [node]


def _feeds_only(node: Node, products: Collection[Node]) -> bool:
    """Whether every path from `node`, through multiplications, casts and reshapes, leads to an input of `products`."""
    transparent = {MUL, CONVERT_ELEMENT_TYPE, *RESHAPES}
    for user in node.users:
        if user in products:
            if user.args[0] is not node:
                return False
        elif target_of(user) not in transparent or not _feeds_only(user, products):
            return False
    return True


def _fuse(graph: Graph, product: Node, norm: RMSNormMatch) -> None:
    size = product.args[0].meta["val"].shape[1]  # type: ignore[union-attr]
    with graph.inserting_before(product):
        x = insert_call(graph, aten.reshape.default, norm.x, [1, size])
        scales = insert_call(graph, aten.reshape.default, norm.weight, [size])
        fused = _insert_normed(graph, product, x, scales, norm.eps)
    product.replace_all_uses_with(fused)
    erase_if_unused(graph, product)


def _insert_normed(graph: Graph, product: Node, x: Node, scales: Node, eps: float) -> Node:
    """The product of a node of FUSABLE_LINEARS with the normalised row x."""
    if product.target is EXPERT_LINEAR:
        return insert_call(graph, EXPERT_LINEAR, x, *product.args[1:5], scales, eps)
    if product.target is SCHEME_LINEAR:
        _, tensors, addend, gated, *_, scheme = product.args
        return insert_call(graph, SCHEME_LINEAR, x, tensors, addend, gated, scales, eps, scheme)
    gated = product.target is tcdeploy_ops.linear_silu_mul.default
    _, weight, addend, config = (*product.args[:2], None, product.args[2]) if gated else product.args
    return insert_call(graph, tcdeploy_ops.rms_norm_linear.default, x, scales, eps, weight, addend, gated, config)

"""FX pass: fuse SwiGLU into the skinny GEMM or GEMV that computes gate and up.

Most decoders' MLPs compute silu(gate) * up, where gate and up are the two halves of one product
(models/convert/packed_linears.py). `tcdeploy::linear_silu_mul`, or `fused_scheme_linear` for quantised weights, applies
it in the epilogue, which saves a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers the ops
from tcdeploy.kernels.linear.tile_configs import N_MULTIPLE
from tcdeploy.programs.passes.nodes import erase_if_unused, insert_call, is_float_cast, strip_reshapes, target_of

aten, tcdeploy_ops = torch.ops.aten, torch.ops.tcdeploy
LINEARS = {tcdeploy_ops.linear.default, tcdeploy_ops.fused_scheme_linear.default}


def fuse_swiglu(graph: Graph) -> None:
    """Replace silu(y[..., :half]) * y[..., half:] if y is one of LINEARS with no other users."""
    for node in list(graph.nodes):
        if target_of(node) is not aten.mul.Tensor or node.kwargs:
            continue
        for silu, up in (node.args, node.args[::-1]):
            linear_node = _match_swiglu(node, silu, up)
            if linear_node is not None:
                with graph.inserting_before(node):
                    gated = _insert_gated(graph, linear_node)
                    shaped = insert_call(graph, aten.reshape.default, gated, list(node.meta["val"].shape))
                node.replace_all_uses_with(shaped)
                erase_if_unused(graph, node)
                break


def _insert_gated(graph: Graph, linear_node: Node) -> Node:
    """The product of a node of LINEARS with SwiGLU as its epilogue."""
    if linear_node.target is tcdeploy_ops.linear.default:
        x, weight, _, config = linear_node.args
        return insert_call(graph, tcdeploy_ops.linear_silu_mul.default, x, weight, config)
    x, tensors, _, _, *rest = linear_node.args
    return insert_call(graph, tcdeploy_ops.fused_scheme_linear.default, x, tensors, None, True, *rest)


def _match_swiglu(node: Node, silu: Any, up: Any) -> Node | None:
    """The node of LINEARS if `node` is its SwiGLU and the kernel can compute it, else None."""
    halves = [half_node for half_node in (silu_input(silu), up) if target_of(half_node) is aten.slice.Tensor]
    if len(halves) != 2:
        return None
    linear_node = strip_reshapes(halves[0].args[0])
    if target_of(linear_node) not in LINEARS or strip_reshapes(halves[1].args[0]) is not linear_node:
        return None
    value = linear_node.meta["val"]
    half = value.shape[1] // 2
    starts = [_half_start(half_node, half) for half_node in halves]
    is_supported = linear_node.args[2] is None and value.shape[1] % (2 * N_MULTIPLE) == 0
    has_gated_shape = node.meta["val"].dtype == value.dtype and node.meta["val"].numel() == value.numel() // 2
    if starts != [0, half] or not is_supported or not has_gated_shape or not is_only_used_by(linear_node, node):
        return None
    return linear_node


def silu_input(node: Any) -> Any:
    """x if `node` is x / (1 + exp(-x)), Inductor's float32 decomposition of silu, else None."""
    quotient = _strip_cast(node)
    if target_of(quotient) is not aten.div.Tensor:
        return None
    x, divisor = quotient.args
    is_one_plus = target_of(divisor) is aten.add.Tensor and divisor.args[1] == 1 and not divisor.kwargs
    exponential: Any = divisor.args[0] if is_one_plus else None
    negative: Any = exponential.args[0] if target_of(exponential) is aten.exp.default else None
    if target_of(negative) is not aten.neg.default or negative.args[0] is not x:
        return None
    return _strip_cast(x)


def _strip_cast(node: Any) -> Any:
    return node.args[0] if is_float_cast(node) else node


def _half_start(slice_node: Node, half: int) -> Any:
    """The start of a slice of `half` elements of the last dimension; None for any other slice."""
    value, (dim, start, *_) = slice_node.meta["val"], (*slice_node.args[1:], None, None)
    is_last = isinstance(dim, int) and dim % value.ndim == value.ndim - 1
    return start if is_last and value.shape[-1] == half and len(slice_node.args) < 5 else None


def is_only_used_by(linear_node: Node, node: Node) -> bool:
    """Whether every path from `linear_node` leads to `node`."""
    return all(user is node or (user.users and is_only_used_by(user, node)) for user in linear_node.users)

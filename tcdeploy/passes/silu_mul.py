"""Let a streamed product end in the gate that reads it: silu of its first half times the second, a kernel less.

That is the MLP of most decoders, whose gate and up projections are one product (models/packed_linears.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

import tcdeploy.linear.ops  # noqa: F401 - registers the ops
from tcdeploy.passes.nodes import erase_if_unused, insert_call, is_float_cast, strip_reshapes, target_of

aten, tcdeploy_ops = torch.ops.aten, torch.ops.tcdeploy


def fuse_swiglu(graph: Graph) -> None:
    """For each product of half `silu(first) * up` whose halves nothing else reads."""
    for node in list(graph.nodes):
        if target_of(node) is not aten.mul.Tensor or node.kwargs:
            continue
        for silu, up in (node.args, node.args[::-1]):
            linear_node = _match_swiglu(node, silu, up)
            if linear_node is not None:
                with graph.inserting_before(node):
                    x, weight, _, config = linear_node.args
                    gated = insert_call(graph, tcdeploy_ops.linear_silu_mul.default, x, weight, config)
                    shaped = insert_call(graph, aten.reshape.default, gated, list(node.meta["val"].shape))
                node.replace_all_uses_with(shaped)
                erase_if_unused(graph, node)
                break


def _match_swiglu(node: Node, silu: Any, up: Any) -> Node | None:
    """The streamed product that `node` is the gate of, where it can be the kernel's to end in it."""
    from tcdeploy.linear.skinny_gemm import N_MULTIPLE

    first = _silu_input(silu)
    halves = [one for one in (first, up) if target_of(one) is aten.slice.Tensor]
    if len(halves) != 2:
        return None
    linear_node = strip_reshapes(halves[0].args[0])
    if (
        target_of(linear_node) is not tcdeploy_ops.linear.default
        or strip_reshapes(halves[1].args[0]) is not linear_node
    ):
        return None
    value = linear_node.meta["val"]
    half = value.shape[1] // 2
    begins = [_half_start(one, half) for one in halves]
    is_plain = linear_node.args[2] is None and value.shape[1] % (2 * N_MULTIPLE) == 0
    is_alike = node.meta["val"].dtype == value.dtype and node.meta["val"].numel() == value.numel() // 2
    if begins != [0, half] or not is_plain or not is_alike or not _is_only_used_by(linear_node, node):
        return None
    return linear_node


def _silu_input(node: Any) -> Any:
    """x of x / (1 + exp(-x)), as Inductor writes silu in float32; None of anything else."""
    quotient = _strip_cast(node)
    if target_of(quotient) is not aten.div.Tensor:
        return None
    x, divisor = quotient.args
    is_shifted = target_of(divisor) is aten.add.Tensor and divisor.args[1] == 1 and not divisor.kwargs
    exponential: Any = divisor.args[0] if is_shifted else None
    negative: Any = exponential.args[0] if target_of(exponential) is aten.exp.default else None
    if target_of(negative) is not aten.neg.default or negative.args[0] is not x:
        return None
    return _strip_cast(x)


def _strip_cast(node: Any) -> Any:
    return node.args[0] if is_float_cast(node) else node


def _half_start(slice_node: Node, half: int) -> Any:
    """Where a slice of the last dimension begins that is `half` long; None for any other slice."""
    value, (dim, begin, *_) = slice_node.meta["val"], (*slice_node.args[1:], None, None)
    is_last = isinstance(dim, int) and dim % value.ndim == value.ndim - 1
    return begin if is_last and value.shape[-1] == half and len(slice_node.args) < 5 else None


def _is_only_used_by(linear_node: Node, node: Node) -> bool:
    """Whether all that is made of `linear_node` ends in `node`."""
    return all(user is node or (user.users and _is_only_used_by(user, node)) for user in linear_node.users)

"""FX pass: fuse RoPE into decode attention.

The decode kernel loads q and k anyway; rotating them there saves a launch that attention would wait for, which matters
at small batches. Matches rotate-half RoPE, as in Llama, of a linear layer's output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

import tcdeploy.kernels.attention.ops  # noqa: F401 - registers the op
from tcdeploy.programs.passes.nodes import erase_if_unused, insert_call, strip_aliases, target_of
from tcdeploy.torch_compat.dynamo import eager_input_vals

aten, tcdeploy_ops = torch.ops.aten, torch.ops.tcdeploy
AUTO_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2  # wraps ops that mutate arguments
MM_OPS = {aten.mm.default, aten.addmm.default}
LAYOUT_VIEWS = {aten.select.int, aten.permute.default}


class RotaryMatch(NamedTuple):
    """x * cos + rotate_half(x) * sin under `views`, outermost first; cos and sin are [1, tokens, head_dim]."""

    x: Node
    cos: Node
    sin: Node
    views: tuple[Node, ...]


def fuse_rope_into_attention(graph: Graph) -> None:
    """Pass cos, sin and the unrotated q and k to each `tcdeploy::decode_attention` whose q and k share cos and sin."""
    if not eager_input_vals.supported():
        return
    for node in graph.find_nodes(op="call_function", target=AUTO_FUNCTIONALIZED):
        if node.args[0] is not tcdeploy_ops.decode_attention.default:
            continue
        q, k = (_match_rotary(node.kwargs[name]) for name in ("q", "k"))
        if q is None or k is None or (q.cos, q.sin) != (k.cos, k.sin):
            continue
        rotated, shape = [node.kwargs["q"], node.kwargs["k"]], list(q.cos.meta["val"].shape[1:])
        if any(list(arg.meta["val"].shape[::2]) != shape for arg in rotated) or not _same_layout(q.cos, q.sin):
            continue
        with graph.inserting_before(node):
            cos, sin = (insert_call(graph, aten.reshape.default, factor, shape) for factor in (q.cos, q.sin))
            inputs = {"q": _apply_views(graph, q), "k": _apply_views(graph, k), "cos": cos, "sin": sin}
        eager_input_vals.replace_inputs(node, inputs)
        for arg in rotated:
            erase_if_unused(graph, arg)


def _same_layout(cos: Node, sin: Node) -> bool:
    values = [node.meta["val"] for node in (cos, sin)]
    return len({(value.shape, value.stride()) for value in values}) == 1 and values[0].stride(-1) == 1


def _apply_views(graph: Graph, match: RotaryMatch) -> Node:
    """The unrotated x under the same views as the rotated one."""
    node = match.x
    for view in reversed(match.views):
        node = insert_call(graph, view.target, node, *view.args[1:])
    return node


def _match_rotary(node: Any) -> RotaryMatch | None:
    """The rotation that computes `node`, else None."""
    views: list[Node] = []
    while target_of(node) in LAYOUT_VIEWS:
        views.append(node)
        node = node.args[0]
    if target_of(node) is not aten.add.Tensor or node.kwargs:
        return None
    cos_term, sin_term = node.args
    if target_of(cos_term) is not aten.mul.Tensor or target_of(sin_term) is not aten.mul.Tensor:
        return None
    x, cos = cos_term.args
    rotated, sin = sin_term.args
    factors = [_strip_unsqueeze(cos), _strip_unsqueeze(sin)]
    if None in factors or not _is_rotate_half(rotated, x) or target_of(strip_aliases(x)) not in MM_OPS:
        return None
    if node.meta["val"].shape != x.meta["val"].shape:
        return None
    return RotaryMatch(x, factors[0], factors[1], tuple(views))


def _strip_unsqueeze(node: Any) -> Any:
    """cos if `node` is cos[:, None] for cos [1, tokens, head_dim], else None."""
    if target_of(node) is not aten.unsqueeze.default or node.args[1] != 1:
        return None
    value = node.args[0].meta["val"]
    return node.args[0] if value.ndim == 3 and value.shape[0] == 1 else None


def _is_rotate_half(node: Any, x: Node) -> bool:
    """Whether `node` is cat(-x[..., half:], x[..., :half])."""
    if target_of(node) is not aten.cat.default or len(node.args[0]) != 2 or node.args[1] not in (-1, 3):
        return False
    negative, first = node.args[0]
    second = negative.args[0] if target_of(negative) is aten.neg.default else None
    return _half_start(first, x) == 0 and _half_start(second, x) == x.meta["val"].shape[-1] // 2


def _half_start(node: Any, x: Node) -> Any:
    """The start of `node` if it is a half of x's last dimension, else None."""
    if target_of(node) is not aten.slice.Tensor or node.args[0] is not x or node.args[1] != 3 or len(node.args) > 4:
        return None
    return node.args[2] if 2 * node.meta["val"].shape[-1] == x.meta["val"].shape[-1] else None

"""FX pass: fuse RoPE into decode attention, with the RMSNorms of heads before it.

The decode kernel loads q and k anyway; rotating them there saves a launch that attention would wait for, which matters
at small batches. Matches rotate-half RoPE of a linear layer's output, as in Llama, and at batch 1 also after an RMSNorm
of each head, as in Qwen3. Norms in larger batches have not been timed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

import tcdeploy.kernels.attention.ops  # noqa: F401 - registers the op
from tcdeploy.programs.passes.nodes import erase_if_unused, insert_call, is_one, strip_aliases, target_of
from tcdeploy.programs.passes.rms_norm import RMSNormMatch, match_norm
from tcdeploy.torch_compat.dynamo import eager_input_vals

aten, tcdeploy_ops = torch.ops.aten, torch.ops.tcdeploy
AUTO_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2  # wraps ops that mutate arguments
MM_OPS = {aten.mm.default, aten.addmm.default}
LAYOUT_VIEWS = {aten.select.int, aten.permute.default}


class RotaryMatch(NamedTuple):
    """x * cos + rotate_half(x) * sin under `views`, outermost first; cos and sin are [1, tokens, head_dim].

    With `norm`, x is the input of an RMSNorm of each head, and the last of the `views` apply to its output.
    """

    x: Node
    cos: Node
    sin: Node
    views: tuple[Node, ...]
    norm: RMSNormMatch | None


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
        if not _same_norms(q.norm, k.norm) or not (q.norm is None or is_one(shape[0])):
            continue
        if any(list(arg.meta["val"].shape[::2]) != shape for arg in rotated) or not _same_layout(q.cos, q.sin):
            continue
        with graph.inserting_before(node):
            cos, sin = (insert_call(graph, aten.reshape.default, factor, shape) for factor in (q.cos, q.sin))
            inputs: dict[str, Any] = {"q": _apply_views(graph, q), "k": _apply_views(graph, k), "cos": cos, "sin": sin}
            if q.norm is not None and k.norm is not None:
                for name, norm in (("q_norm", q.norm), ("k_norm", k.norm)):
                    inputs[name] = insert_call(graph, aten.reshape.default, norm.weight, [q.x.meta["val"].shape[-1]])
                inputs["norm_eps"] = q.norm.eps
        eager_input_vals.replace_inputs(node, inputs)
        for arg in rotated:
            erase_if_unused(graph, arg)


def _same_norms(q: RMSNormMatch | None, k: RMSNormMatch | None) -> bool:
    """Whether the kernel can apply both: there are two or none, and their eps are equal."""
    return q is k is None or (q is not None and k is not None and q.eps == k.eps)


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
    if None in factors or not _is_rotate_half(rotated, x) or node.meta["val"].shape != x.meta["val"].shape:
        return None
    norm = None
    if target_of(strip_aliases(x)) not in MM_OPS:
        while target_of(x) in LAYOUT_VIEWS:
            views.append(x)
            x = x.args[0]
        norm = _match_head_norm(x)
        if norm is None:
            return None
        x = norm.x
    return RotaryMatch(x, factors[0], factors[1], tuple(views), norm)


def _match_head_norm(heads: Any) -> RMSNormMatch | None:
    """The RMSNorm over the last dimension that computes `heads` from a product, else None."""
    norm = match_norm(heads) if isinstance(heads, Node) else None
    if norm is None or norm.x.meta["val"].shape != heads.meta["val"].shape:
        return None
    return norm if target_of(strip_aliases(norm.x)) in MM_OPS else None


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

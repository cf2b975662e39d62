"""Let decode attention turn its queries and keys itself, where they come from a product and are turned by halves.

That is the rotary embedding of most decoders. The kernel loads a query anyway; turning it there spares a launch that
the attention of a small batch would wait for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

import tcdeploy.attention.ops  # noqa: F401 - registers the op
from tcdeploy.passes.nodes import strip_aliases, insert_call, erase_if_unused, target_of

aten, ours = torch.ops.aten, torch.ops.tcdeploy
FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2  # how a graph holds an op that writes
PRODUCTS = {aten.mm.default, aten.addmm.default}
VIEWS_OF_ONE = {aten.select.int, aten.permute.default}


class RotaryMatch(NamedTuple):
    """`x * cos + halves(x) * sin`, seen through `views`, outermost first; cos and sin [1, tokens, head_dim]."""

    x: Node
    cos: Node
    sin: Node
    views: tuple[Node, ...]


def fuse_rope_into_attention(graph: Graph) -> None:
    for node in list(graph.nodes):
        if target_of(node) is not FUNCTIONALIZED or node.args[0] is not ours.decode_attention.default:
            continue
        q, k = (_match_rotary(node.kwargs[name]) for name in ("q", "k"))
        if q is None or k is None or (q.cos, q.sin) != (k.cos, k.sin):
            continue
        before, shape = [node.kwargs["q"], node.kwargs["k"]], list(q.cos.meta["val"].shape[1:])
        if any(list(one.meta["val"].shape[::2]) != shape for one in before) or not _are_alike(q.cos, q.sin):
            continue
        with graph.inserting_before(node):
            cos, sin = (insert_call(graph, aten.reshape.default, factor, shape) for factor in (q.cos, q.sin))
            given = {"q": _seen(graph, q), "k": _seen(graph, k), "cos": cos, "sin": sin}
        _give(node, given)
        for one in before:
            erase_if_unused(graph, one)


def _give(node: Node, given: dict[str, Node]) -> None:
    """Inductor lays an opaque op's arguments out as those that were traced, so the new ones' values go there too."""
    node.kwargs = {**node.kwargs, **given}
    traced = node.meta.get("eager_input_vals")
    if traced is not None:
        values = {name: one.meta["val"] for name, one in given.items()}
        node.meta["eager_input_vals"] = (traced[0], {**traced[1], **values})


def _are_alike(cos: Node, sin: Node) -> bool:
    values = [node.meta["val"] for node in (cos, sin)]
    return len({(value.shape, value.stride()) for value in values}) == 1 and values[0].stride(-1) == 1


def _seen(graph: Graph, turned: RotaryMatch) -> Node:
    """What was turned, through the views that the result was seen through."""
    node = turned.x
    for view in reversed(turned.views):
        node = insert_call(graph, view.target, node, *view.args[1:])
    return node


def _match_rotary(node: Any) -> RotaryMatch | None:
    views: list[Node] = []
    while target_of(node) in VIEWS_OF_ONE:
        views.append(node)
        node = node.args[0]
    if target_of(node) is not aten.add.Tensor or node.kwargs:
        return None
    straight, across = node.args
    if target_of(straight) is not aten.mul.Tensor or target_of(across) is not aten.mul.Tensor:
        return None
    x, cos = straight.args
    halves, sin = across.args
    factors = [_strip_unsqueeze(cos), _strip_unsqueeze(sin)]
    if None in factors or not _is_halves_of(halves, x) or target_of(strip_aliases(x)) not in PRODUCTS:
        return None
    if node.meta["val"].shape != x.meta["val"].shape:
        return None
    return RotaryMatch(x, factors[0], factors[1], tuple(views))


def _strip_unsqueeze(node: Any) -> Any:
    """cos of cos[:, None], one batch of tokens."""
    if target_of(node) is not aten.unsqueeze.default or node.args[1] != 1:
        return None
    value = node.args[0].meta["val"]
    return node.args[0] if value.ndim == 3 and value.shape[0] == 1 else None


def _is_halves_of(node: Any, x: Node) -> bool:
    """Whether `node` is cat(-x[..., half:], x[..., :half])."""
    if target_of(node) is not aten.cat.default or len(node.args[0]) != 2 or node.args[1] not in (-1, 3):
        return False
    negative, first = node.args[0]
    second = negative.args[0] if target_of(negative) is aten.neg.default else None
    return _cut(first, x) == 0 and _cut(second, x) == x.meta["val"].shape[-1] // 2


def _cut(node: Any, x: Node) -> Any:
    """Where the half of x's last dimension begins that `node` is."""
    if target_of(node) is not aten.slice.Tensor or node.args[0] is not x or node.args[1] != 3 or len(node.args) > 4:
        return None
    return node.args[2] if 2 * node.meta["val"].shape[-1] == x.meta["val"].shape[-1] else None

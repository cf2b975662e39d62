"""FX pass: choose experts with `tcdeploy::top_k`, one kernel that replaces the two of torch.topk and those around it.

Routers of transformers 5.17 and 5.23, after Inductor's decompositions:

    qwen2_moe, qwen3_moe, olmoe, mixtral   topk(softmax(logits)); if normalised, divided by their sum; a cast
    gpt_oss                                softmax(topk(logits)); a cast
    deepseek_v3, glm4_moe                  topk of sums, of groups and of biased scores; gather, division, scaling

The softmax, the division and the cast become arguments of the op. In any other expression only torch.topk is replaced,
if the kernel takes the rows. Results that other nodes read stay in the graph.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

import tcdeploy.kernels.experts.ops  # noqa: F401 - registers tcdeploy::top_k
from tcdeploy.kernels.experts.routing import is_supported
from tcdeploy.planning.dtypes import dtype_name
from tcdeploy.programs.passes.nodes import (
    SUM,
    count_symbolic,
    erase_if_unused,
    insert_call,
    insert_reshape,
    is_float_cast,
    target_of,
)

aten, tcdeploy_ops = torch.ops.aten, torch.ops.tcdeploy
DEFAULTS = (-1, True, True)  # of aten.topk: dim, largest, sorted


class TopK(NamedTuple):
    """What a node `aten.topk` chooses from, and its results."""

    scores: Node
    k: int
    values: Node | None  # None: nothing reads them
    indices: Node | None


def replace_top_k(graph: Graph) -> None:
    """Replace each aten.topk along the last dimension that the kernel can compute."""
    for node in graph.find_nodes(op="call_function", target=aten.topk.default):
        match = _match_top_k(node)
        if match is not None:
            _replace(graph, node, match)


def _match_top_k(node: Node) -> TopK | None:
    arguments: list[Any] = [*node.args, *DEFAULTS[len(node.args) - 2 :]]
    scores, k, dim, largest, _ = arguments
    value = scores.meta["val"]
    columns = value.shape[-1] if value.ndim else None
    if dim not in (-1, value.ndim - 1) or not largest or node.kwargs or not isinstance(columns, int):
        return None
    if count_symbolic(value.shape) > 1 or not is_supported(columns, k, value.dtype):
        return None
    by_index: dict[int, Node] = {}
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] in by_index:
            return None
        by_index[user.args[1]] = user  # type: ignore[index]
    return TopK(scores, k, by_index.get(0), by_index.get(1))


def _replace(graph: Graph, node: Node, match: TopK) -> None:
    """Fuse those of softmax, division and cast that match. The values of the op replace the last of them."""
    scores, softmax, weights = match.scores, "none", match.values
    logits = _softmax_input(match.scores)
    if logits is not None and is_supported(match.scores.meta["val"].shape[-1], match.k, logits.meta["val"].dtype):
        scores, softmax = logits, "all"
        normalised = None if weights is None else _normalised(weights)
        if normalised is not None:
            softmax, weights = "selected", normalised
    elif weights is not None and (probabilities := _softmax_of(weights)) is not None:
        softmax, weights = "selected", probabilities
    if weights is not None and softmax != "none":
        weights = _only_cast(weights) or weights
    shape = list(match.scores.meta["val"].shape)
    dtype = match.scores.meta["val"].dtype if weights is None else weights.meta["val"].dtype
    with graph.inserting_before(node):
        rows = scores if len(shape) == 2 else insert_reshape(graph, scores, [-1, shape[-1]])
        top = insert_call(graph, tcdeploy_ops.top_k.default, rows, match.k, softmax, dtype_name(dtype))
        for i, result in enumerate((weights, match.indices)):
            if result is not None:
                new = _insert_item(graph, top, i)
                new = new if len(shape) == 2 else insert_reshape(graph, new, [*shape[:-1], match.k])
                result.replace_all_uses_with(new)
    for result in (weights, match.indices):
        if result is not None:
            erase_if_unused(graph, result)


def _insert_item(graph: Graph, node: Node, index: int) -> Node:
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


def _softmax_input(node: Any) -> Node | None:
    """x if `node` is the softmax of x over its last dimension in float32, as Inductor decomposes it, else None."""
    if target_of(node) is not aten.div.Tensor or node.kwargs:
        return None
    exponential, total = node.args
    if target_of(exponential) is not aten.exp.default or not _is_over_last_dim(total, SUM, exponential):
        return None
    difference = exponential.args[0]
    if target_of(difference) is not aten.sub.Tensor or difference.kwargs:
        return None
    x, largest = difference.args
    if not _is_over_last_dim(largest, aten.amax.default, x) or x.meta["val"].dtype != torch.float32:
        return None
    return x.args[0] if is_float_cast(x) else x


def _is_over_last_dim(node: Any, target: Any, source: Any) -> bool:
    """Whether `node` reduces `source` along its last dimension, which it keeps."""
    if target_of(node) is not target or node.args[0] is not source or node.kwargs or len(node.args) != 3:
        return False
    _, dims, keeps_dim = node.args
    return keeps_dim is True and list(dims or ()) in ([-1], [source.meta["val"].ndim - 1])


def _normalised(values: Node) -> Node | None:
    """values / values.sum(-1, keepdim=True) if nothing else reads the values, else None."""
    sums = [user for user in values.users if _is_over_last_dim(user, SUM, values)]
    quotients = [user for user in values.users if user not in sums]
    if len(sums) != 1 or len(quotients) != 1 or target_of(quotients[0]) is not aten.div.Tensor:
        return None
    is_quotient = quotients[0].args == (values, sums[0]) and not quotients[0].kwargs
    return quotients[0] if is_quotient and list(sums[0].users) == quotients else None


def _softmax_of(values: Node) -> Node | None:
    """The softmax of the values if nothing else reads them, else None."""
    x = _only_cast(values) or values
    maxima = [user for user in x.users if _is_over_last_dim(user, aten.amax.default, x)]
    differences = [user for user in x.users if user not in maxima]
    if len(maxima) != 1 or len(differences) != 1 or list(maxima[0].users) != differences:
        return None
    exponentials = list(differences[0].users)
    quotients = [user for node in exponentials for user in node.users if target_of(user) is aten.div.Tensor]
    if len(exponentials) != 1 or len(quotients) != 1 or _softmax_input(quotients[0]) is not values:
        return None
    return quotients[0] if len(exponentials[0].users) == 2 else None


def _only_cast(node: Node) -> Node | None:
    """The cast to a floating dtype that alone reads `node`, else None."""
    users = list(node.users)
    return users[0] if len(users) == 1 and is_float_cast(users[0]) else None

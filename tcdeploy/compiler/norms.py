"""Let a product of one row normalise its input itself: no kernel for the norm's mean.

An RMS norm scales a row x by weights g and by one number, 1 / sqrt(mean(x^2) + eps). That number can as well scale the
product's result. Under coordinate descent Inductor writes a product of one row as a reduction over k for each of n
outputs; the sum of squares, written as a reduction of the same shape, runs in the same loop over the same x. So each
program finds the mean again, while it reads its weights, and a kernel of one program, for which the whole GPU would
wait, is gone before each product that reads a norm: two of nine in a Llama layer. What that brings is not timed yet.

The row is rounded less often than in the eager model: x * g stays float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from tcdeploy.compiler.nodes import CONVERT, RESHAPES, SUM, call, erase_unread, target_of
from tcdeploy.compiler.one_row import row_of_parts

aten = torch.ops.aten
MUL = aten.mul.Tensor
ROUNDED = {torch.bfloat16, torch.float16, torch.float32}  # to which a row may be converted on the way


class Norm(NamedTuple):
    """`inverse` is 1 / sqrt(mean(x^2) + eps); the normalised row is x times `inverse` times all `weights`."""

    x: Node
    inverse: Node
    eps: float
    weights: tuple[Node, ...]


def fold_norms(graph: Graph) -> None:
    """For each norm that nothing reads but products of one row in their parts."""
    found: list[tuple[Node, Norm]] = []
    for node in graph.nodes:
        row = row_of_parts(node)
        norm = _norm_of(row) if row is not None else None
        if norm is not None:
            found.append((node, norm))
    products: set[Any] = {total.args[0] for total, _ in found}
    for total, norm in [one for one in found if _feeds_only(one[1].inverse, products)]:
        _fold(graph, total, norm)


def _norm_of(row: Node) -> Norm | None:
    """What `row` normalises; None where it is anything else."""
    inverses = [factor for factor in _factors(row, None) if target_of(factor) is aten.rsqrt.default]
    if len(inverses) != 1:
        return None
    [inverse] = inverses
    shifted: Any = inverse.args[0]
    mean: Any = shifted.args[0] if target_of(shifted) is aten.add.Tensor and not shifted.kwargs else None
    if target_of(mean) is not aten.mean.dim or mean.args[1] != [-1] or not isinstance(shifted.args[1], float):
        return None
    power: Any = mean.args[0]
    if target_of(power) is not aten.pow.Tensor_Scalar or power.args[1] != 2:
        return None
    x: Any = power.args[0].args[0] if target_of(power.args[0]) is CONVERT else power.args[0]
    rest = [factor for factor in _factors(row, x) if factor is not inverse]
    weights = tuple(factor for factor in rest if factor is not x)
    size = row.meta["val"].shape[1]
    is_whole = x.meta["val"].shape[-1] == size and all(one.meta["val"].numel() == size for one in rest)
    if len(rest) != len(weights) + 1 or not is_whole:
        return None
    return Norm(x, inverse, shifted.args[1], weights)


def _factors(node: Any, last: Node | None) -> list[Node]:
    """What is multiplied to give `node`, however rounded or reshaped on the way; `last` is not looked into."""
    is_rounded = target_of(node) is CONVERT and node.meta["val"].dtype in ROUNDED
    if node is not last and (is_rounded or target_of(node) in RESHAPES):
        return _factors(node.args[0], last)
    if node is not last and target_of(node) is MUL and all(isinstance(arg, Node) for arg in node.args):
        return [factor for arg in node.args for factor in _factors(arg, last)]
    return [node]


def _feeds_only(node: Node, products: set[Any]) -> bool:
    """Whether all that `node` goes into ends in one of `products`."""
    passes = {MUL, CONVERT, aten.unsqueeze.default, *RESHAPES}
    others = [user for user in node.users if user not in products]
    return all(target_of(user) in passes and _feeds_only(user, products) for user in others)


def _fold(graph: Graph, total: Node, norm: Norm) -> None:
    parts: Any = total.args[0]
    _, size, outputs = parts.meta["val"].shape

    def row(node: Node) -> Node:
        return call(graph, CONVERT, call(graph, aten.reshape.default, node, [1, size]), torch.float32)

    def summed(node: Node) -> Node:
        return call(graph, SUM, node, [1])

    with graph.inserting_before(total):
        x = row(norm.x)
        scaled = x
        for weight in norm.weights:
            scaled = call(graph, MUL, scaled, row(weight))
        product = summed(call(graph, MUL, call(graph, aten.unsqueeze.default, scaled, 2), parts.args[1]))
        square = call(graph, aten.unsqueeze.default, call(graph, MUL, x, x), 2)
        squares = summed(call(graph, aten.expand.default, square, [1, size, outputs]))
        mean = call(graph, MUL, squares, 1 / size)
        inverse = call(graph, aten.rsqrt.default, call(graph, aten.add.Tensor, mean, norm.eps))
        folded = call(graph, MUL, product, inverse)
    total.replace_all_uses_with(folded)
    erase_unread(graph, total)

"""A pass over Inductor's graphs that rewrites matrix products, and has the last layer choose its rows early.

- Merging: sibling projections trace as identical products (see models/siblings.py), and torch 2.11 to 2.13 keeps them
  all; one is left.
- Streaming: a product of few rows with a large weight goes to `tcdeploy::linear`, where its rule says that this is
  faster than cuBLAS (candidates named "streamed"), and ends in the addition of the residual.
- Choosing early: see early_rows.py.
- Storing a long row. A product of one row may reach the pass in its parts, multiply and sum, because Inductor writes
  it itself under coordinate descent. It is then a reduction like any other, and Inductor moves what made its input
  into it: for the long row before a flat weight (silu of gate times up, before the down projection) each program of
  the product would make the whole row again, which cost 3.5 of 42.7 us (H100, 8B shape).

Rejected, in one run, ms per step at batch 1 (5.40 without, 5.33 with the long row stored): storing the input of every
product (5.66); gate and up as two products that Inductor sums in one kernel and ends in their silu (5.49).

The pass has a uuid, so programs that went through it are still cached. The sources of the ops that it puts in are in
the cache's key by programs.py.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

import tcdeploy.linear.ops  # noqa: F401 - registers tcdeploy::linear
from tcdeploy.compiler.early_rows import choose_early
from tcdeploy.compiler.nodes import call

aten = torch.ops.aten
RESHAPES = {aten.view.default, aten.reshape.default}
VIEWS = {aten.permute.default, aten.unsqueeze.default, *RESHAPES}
# A product of one row may stand there as what it is made of (Inductor does that under coordinate descent).
CONVERT = torch.ops.prims.convert_element_type.default
SUM = aten.sum.dim_IntList
PARTS = {aten.mul.Tensor, SUM, CONVERT}
PURE = {aten.mm.default, aten.addmm.default, *VIEWS, *PARTS}


class RewriteProducts(CustomGraphPass):
    """Merge identical products, and the views that lead to them; then, if asked, stream those that have few rows."""

    def __init__(self, streams: bool) -> None:
        self.streams = streams

    def __call__(self, graph: Graph) -> None:
        _merge_identical(graph)
        choose_early(graph)
        _cut_in_place(graph)
        _store_long_rows(graph)
        if self.streams and importlib.util.find_spec("triton"):
            _stream(graph)
            _add_residuals(graph)

    def uuid(self) -> str:
        return f"tcdeploy-rewrite-products-6-{'streamed' if self.streams else 'merged'}"


def _merge_identical(graph: Graph) -> None:
    first: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in PURE:
            continue
        found = first.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _cut_in_place(graph: Graph) -> None:
    """Let the slices of a product that is written in its parts be views of one tensor in its own dtype.

    Else Inductor keeps the float32 sum, and each slice is converted by whoever reads it: a kernel of its own where
    that is attention. A strided view makes it keep the converted product.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.slice.Tensor:
            continue
        product = _behind_views(node.args[0])
        if product.target is not CONVERT or product.args[0].target is not SUM:
            continue
        cut = node.meta["val"]
        with graph.inserting_before(node):
            view = call(
                graph, aten.as_strided.default, product, list(cut.shape), list(cut.stride()), cut.storage_offset()
            )
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def _behind_views(node: Any) -> Any:
    while node.op == "call_function" and node.target in RESHAPES:
        node = node.args[0]
    return node


def _store_long_rows(graph: Graph) -> None:
    """Have the input of a product that is written in its parts stored, where it is longer than the output.

    A strided view is what makes Inductor store it.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not SUM or node.args[1] != [1]:
            continue
        times = node.args[0]  # [1, k, 1] * [1, k, n]
        if times.target is not aten.mul.Tensor or times.meta["val"].shape[1] <= times.meta["val"].shape[2]:
            continue
        unsqueezed = times.args[0]
        row = unsqueezed.args[0] if unsqueezed.target is aten.unsqueeze.default else None
        if row is None or row.op != "call_function" or row.target is not CONVERT:
            continue
        narrow = row.args[0]
        value = narrow.meta["val"]
        with graph.inserting_before(row):
            stored = call(graph, aten.as_strided.default, narrow, list(value.shape), list(value.stride()), 0)
        row.replace_input_with(narrow, stored)


class _Product(NamedTuple):
    """x [rows, k] @ weight [n, k].T + bias [n], as nodes."""

    x: Node
    weight: Node
    bias: Node | None


def _stream(graph: Graph) -> None:
    from tcdeploy.linear.kernels import candidates

    for node in list(graph.nodes):
        product = _product(node)
        if product is None:
            continue
        x, weight = product.x.meta["val"], product.weight.meta["val"]
        configs = candidates(x.shape[0], *weight.shape) if _is_streamable(x, weight) else ()
        if not configs:
            continue
        with graph.inserting_before(node):
            streamed = call(graph, torch.ops.tcdeploy.linear.default, *product, configs[0])
        node.replace_all_uses_with(streamed)
        graph.erase_node(node)


def _add_residuals(graph: Graph) -> None:
    """Let a streamed product without a bias end in the addition that is all that reads it."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.add.Tensor or node.kwargs:
            continue
        products = [arg for arg in node.args if _is_streamed_for(node, arg)]
        others = [arg for arg in node.args if arg not in products]
        if len(products) != 1 or not isinstance(others[0], Node):
            continue
        streamed, shape = _behind_views(products[0]), node.meta["val"].shape
        if others[0].meta["val"].shape != shape or others[0].meta["val"].dtype != node.meta["val"].dtype:
            continue
        x, weight, _, config = streamed.args
        with graph.inserting_before(node):
            rows = call(graph, aten.reshape.default, others[0], list(streamed.meta["val"].shape))
            added = call(graph, torch.ops.tcdeploy.linear.default, x, weight, rows, config)
            shaped = call(graph, aten.reshape.default, added, list(shape))
        node.replace_all_uses_with(shaped)
        graph.erase_node(node)
        _erase_unread(graph, products[0])


def _is_streamed_for(reader: Node, arg: Any) -> bool:
    """Whether `arg` is a streamed product without a bias, and nothing but `reader` reads it."""
    while isinstance(arg, Node) and arg.op == "call_function" and list(arg.users) == [reader]:
        if arg.target is torch.ops.tcdeploy.linear.default:
            return arg.args[2] is None
        if arg.target not in RESHAPES:
            return False
        reader, arg = arg, arg.args[0]
    return False


def _erase_unread(graph: Graph, node: Node) -> None:
    """A product that nobody reads, with the views behind which it stood."""
    while not node.users:
        before = node.args[0]
        graph.erase_node(node)
        if node.target not in RESHAPES:
            return
        node = before  # type: ignore[assignment]


def _product(node: Node) -> _Product | None:
    """What `node` multiplies, where it is a linear layer's product."""
    if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return None
    bias, x, transposed = (None, *node.args) if node.target == aten.mm.default else node.args
    if not isinstance(transposed, Node) or transposed.target != aten.permute.default or transposed.args[1] != [1, 0]:
        return None
    return _Product(x, transposed.args[0], bias)  # type: ignore[arg-type]


def _is_streamable(x: Tensor, weight: Tensor) -> bool:
    half = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype
    return half and isinstance(x.shape[0], int) and weight.is_contiguous() and x.stride(1) == 1

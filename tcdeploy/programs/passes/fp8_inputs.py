"""FX pass: quantise the inputs of products with FP8 weights, as nodes that Inductor fuses with those around them.

A call of `tcdeploy::scheme_linear` with `fp8_min_rows` becomes the operations of `fp8_linear`
(kernels/linear/fp8_inputs.py), of which only the product of codes is opaque. So the kernel of a norm or a gate writes
codes instead of 16-bit values, and the kernel that reads the product applies the scales. Products that share an input
share its codes.

A program for a range of lengths has a symbolic number of rows, and quantises at every length. It is a prefill program.
Prefill programs of a fixed length quantise too, since the plan gives them at least `fp8_min_rows` rows. So all prefill
steps compute the same values.

The pass runs before last_token_rows.py moves the selection of rows above products, because these then have few rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers tcdeploy::scheme_linear
from tcdeploy.kernels.linear.fp8_scheme import BLOCK, BLOCK_NAME, LARGEST, SMALLEST_SCALE
from tcdeploy.planning.dtypes import dtype_name
from tcdeploy.programs.passes.nodes import CONVERT_ELEMENT_TYPE, count_symbolic, insert_call, insert_reshape

aten, tcdeploy_ops = torch.ops.aten, torch.ops.tcdeploy


class _Codes(NamedTuple):
    """Nodes: codes [..., k]; scales [..., groups] float32."""

    codes: Node
    scales: Node


def quantise_inputs(graph: Graph) -> None:
    """Replace each call of `scheme_linear` that quantises its inputs."""
    codes_of: dict[tuple[Node, int], _Codes] = {}  # by inputs and columns of a group
    for node in graph.find_nodes(op="call_function", target=tcdeploy_ops.scheme_linear.default):
        if not _quantises_inputs(node):
            continue
        x, tensors, bias, scheme, _ = node.args
        group = BLOCK if scheme == BLOCK_NAME else x.meta["val"].shape[-1]
        with graph.inserting_before(node):
            if (x, group) not in codes_of:
                codes_of[x, group] = _insert_codes(graph, x, group)
            product = _insert_product(graph, codes_of[x, group], tensors, bias, scheme, x.meta["val"].dtype)
        node.replace_all_uses_with(product)
        graph.erase_node(node)


def fp8_min_rows(node: Node) -> int:
    """Rows from which a call of `tcdeploy::scheme_linear` quantises its inputs; 0: it never does."""
    min_rows: Any = node.args[4] if len(node.args) > 4 else node.kwargs.get("fp8_min_rows", 0)
    return min_rows


def _quantises_inputs(node: Node) -> bool:
    value: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    min_rows = fp8_min_rows(node)
    return min_rows > 0 and (count_symbolic(value.shape) > 0 or value.shape[:-1].numel() >= min_rows)


def _insert_codes(graph: Graph, x: Node, group: int) -> _Codes:
    shape = x.meta["val"].shape
    grouped_shape = [*shape[:-1], shape[-1] // group, group]
    groups = insert_reshape(graph, _insert_cast(graph, x, torch.float32), grouped_shape)
    largest = insert_call(graph, aten.amax.default, insert_call(graph, aten.abs.default, groups), [-1], True)
    largest = insert_call(graph, aten.clamp_min.default, largest, SMALLEST_SCALE)
    factor = insert_call(graph, aten.mul.Tensor, insert_call(graph, aten.reciprocal.default, largest), LARGEST)
    scaled = insert_call(graph, aten.mul.Tensor, groups, factor)
    scaled = insert_call(graph, aten.clamp_max.default, scaled, LARGEST)
    scaled = insert_call(graph, aten.clamp_min.default, scaled, -LARGEST)
    codes = _insert_cast(graph, insert_reshape(graph, scaled, shape), torch.float8_e4m3fn)
    scales = insert_call(graph, aten.mul.Tensor, insert_reshape(graph, largest, grouped_shape[:-1]), 1 / LARGEST)
    return _Codes(codes, scales)


def _insert_product(
    graph: Graph, inputs: _Codes, tensors: Any, bias: Any, scheme: Any, dtype: torch.dtype
) -> Node:  # fmt: skip
    """The product with the scales of both sides and the bias, in `dtype`."""
    applied_scales = inputs.scales if scheme == BLOCK_NAME else None
    arguments = (inputs.codes, applied_scales, tensors, dtype_name(dtype))
    product = insert_call(graph, tcdeploy_ops.fp8_product.default, *arguments)
    if scheme == BLOCK_NAME and bias is None:
        return product
    product = _insert_cast(graph, product, torch.float32)
    if scheme != BLOCK_NAME:
        product = insert_call(graph, aten.mul.Tensor, product, inputs.scales)
        product = insert_call(graph, aten.mul.Tensor, product, tensors[1])
    if bias is not None:
        product = insert_call(graph, aten.add.Tensor, product, bias)
    return _insert_cast(graph, product, dtype)


def _insert_cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    return node if node.meta["val"].dtype == dtype else insert_call(graph, CONVERT_ELEMENT_TYPE, node, dtype)

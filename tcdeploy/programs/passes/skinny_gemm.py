"""FX passes: replace few-row products by ops that other passes fuse with the operations around them.

- Products with large dense weights become `tcdeploy::linear`. The heuristics of kernels/linear/tile_configs.py decide
  for which shapes the Triton kernels are faster than cuBLAS.
- Products with quantised weights become `tcdeploy::fused_scheme_linear` if it has a kernel for them. It is the same
  kernel that `tcdeploy::scheme_linear` would call.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers tcdeploy::linear
from tcdeploy.kernels.linear.scheme_matmul import is_fusable
from tcdeploy.kernels.linear.tile_configs import gemv_configs, skinny_gemm_configs
from tcdeploy.programs.passes.nodes import (
    LinearMatch,
    count_symbolic,
    insert_call,
    insert_reshape,
    is_weight,
    match_linear,
)

tcdeploy_ops = torch.ops.tcdeploy


def replace_with_skinny_gemm(graph: Graph) -> None:
    """Replace each linear layer's product for which the heuristics return a config."""
    for node in list(graph.nodes):
        product = match_linear(node)
        configs = _skinny_gemm_configs(product) if product is not None else ()
        if product is None or not configs:
            continue
        with graph.inserting_before(node):
            linear_node = insert_call(graph, torch.ops.tcdeploy.linear.default, *product, configs[0])
        node.replace_all_uses_with(linear_node)
        graph.erase_node(node)


def _skinny_gemm_configs(product: LinearMatch) -> tuple[int, ...]:
    x, weight = product.x.meta["val"], product.weight.meta["val"]
    is_half_precision = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype
    if not (is_half_precision and isinstance(x.shape[0], int) and weight.is_contiguous() and x.stride(1) == 1):
        return ()
    if x.shape[0] != 1:
        return skinny_gemm_configs(x.shape[0], *weight.shape)
    # The GEMV reads `weight` before the previous kernel ends, so no kernel of the step may write it.
    return gemv_configs(*weight.shape) if is_weight(product.weight) else ()


def replace_scheme_linears(graph: Graph) -> None:
    """Replace each `tcdeploy::scheme_linear` that the kernels compute by `fused_scheme_linear` of a matrix of rows."""
    for node in graph.find_nodes(op="call_function", target=tcdeploy_ops.scheme_linear.default):
        if not _has_scheme_kernel(node):
            continue
        x, tensors, bias, scheme, *_ = node.args
        value = node.meta["val"]
        with graph.inserting_before(node):
            rows = insert_reshape(graph, x, [value.numel() // value.shape[-1], x.meta["val"].shape[-1]])
            product = insert_call(
                graph, tcdeploy_ops.fused_scheme_linear.default, rows, tensors, bias, False, None, 0.0, scheme
            )
            shaped = insert_reshape(graph, product, value.shape)
        node.replace_all_uses_with(shaped)
        graph.erase_node(node)


def _has_scheme_kernel(node: Node) -> bool:
    """The kernel reads the weight before the previous kernel ends, so no kernel of the step may write it."""
    x, tensors, _, scheme, *_ = node.args
    value = x.meta["val"]  # type: ignore[union-attr]
    if count_symbolic(value.shape) or not all(map(is_weight, tensors)):  # type: ignore[arg-type]
        return False
    rows = value.numel() // value.shape[-1]
    return is_fusable(str(scheme), rows, value.dtype, [tensor.meta["val"] for tensor in tensors])  # type: ignore[union-attr]

"""FX pass: replace few-row products with large weights by `tcdeploy::linear`.

The heuristics of kernels/linear/tile_configs.py decide for which shapes the Triton kernels are faster than cuBLAS.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

import tcdeploy.kernels.linear.ops  # noqa: F401 - registers tcdeploy::linear
from tcdeploy.kernels.linear.tile_configs import gemv_configs, skinny_gemm_configs
from tcdeploy.programs.passes.nodes import LinearMatch, insert_call, is_weight, match_linear


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

"""The product of experts in plain torch: the CPU path, the parity check's path, and the reference of the tests.

Each expert's weight is dequantised alone, in the dtype of the inputs, so no dense copy of all experts is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.planning.schemes import SCHEMES


def multiply_by_expert(
    x: Tensor, expert_ids: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, scheme: str
) -> Tensor:
    """`expert_linear` (ops.py), one expert at a time. The inputs may have a wider dtype than the weights and the bias.

    While a CUDA graph is captured, all pairs are multiplied by every expert, because the host cannot read the ids.
    """
    top_k = expert_ids.shape[1]
    ids = expert_ids.flatten()
    inputs = x if x.shape[0] == len(ids) else x.repeat_interleave(top_k, 0)
    experts = len(tensors[0])
    out = x.new_empty(len(ids), expert_shape(tensors, scheme)[0])
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        for expert in range(experts):
            product = _multiply(inputs, expert, tensors, bias, scheme)
            torch.where((ids == expert)[:, None], product, out, out=out)
        return out
    for expert in ids.unique().tolist():
        pairs = (ids == expert).nonzero().flatten()
        out[pairs] = _multiply(inputs[pairs], expert, tensors, bias, scheme)
    return out


def expert_shape(tensors: Sequence[Tensor], scheme: str) -> tuple[int, int]:
    """n and k of the weight of one expert."""
    shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
    if not scheme:
        ((n, k),) = shapes
        return n, k
    return SCHEMES[scheme].dense_shape(shapes)


def expert_weight(tensors: Sequence[Tensor], expert: int, scheme: str, dtype: torch.dtype) -> Tensor:
    """The dense weight [n, k] of one expert."""
    parts = [tensor[expert] for tensor in tensors]
    return SCHEMES[scheme].dequantise(parts, dtype) if scheme else parts[0].to(dtype)


def _multiply(x: Tensor, expert: int, tensors: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    weight = expert_weight(tensors, expert, scheme, x.dtype)
    return functional.linear(x, weight, None if bias is None else bias[expert].to(x.dtype))

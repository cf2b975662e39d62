"""The product of experts in plain torch: the CPU path, the parity check's path, and the reference of the tests.

Weights are dequantised to the dtype of the inputs, a few experts at a time. All experts of a layer at once would take
too much memory, and one at a time would launch about a dozen short kernels for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.planning.schemes import SCHEMES

DEQUANTISED_ELEMENTS = 1 << 25  # at most at a time: 128 MiB in float32, and a few times as much for intermediate values


def multiply_by_expert(
    x: Tensor, expert_ids: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, scheme: str
) -> Tensor:
    """`expert_linear` (ops.py), one expert at a time. The inputs may have a wider dtype than the weights and the bias.

    While a CUDA graph is captured, all pairs are multiplied by every expert, because the host cannot read the ids.
    """
    ids = expert_ids.flatten()
    pairs_per_row = len(ids) // x.shape[0]  # top_k, or 1 if x has a row for each pair
    out = x.new_empty(len(ids), expert_shape(tensors, scheme)[0])
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        inputs = x.repeat_interleave(pairs_per_row, 0)
        for expert, weight in _dense_weights(tensors, range(len(tensors[0])), scheme, x.dtype):
            torch.where((ids == expert)[:, None], _multiply(inputs, weight, expert, bias), out, out=out)
        return out
    order = ids.argsort(stable=True)
    counts = ids.bincount(minlength=len(tensors[0])).tolist()
    ends = list(itertools.accumulate(counts))
    inputs, products = x[order // pairs_per_row], torch.empty_like(out)
    chosen = [expert for expert, count in enumerate(counts) if count]
    for expert, weight in _dense_weights(tensors, chosen, scheme, x.dtype):
        pairs = slice(ends[expert] - counts[expert], ends[expert])
        products[pairs] = _multiply(inputs[pairs], weight, expert, bias)
    out[order] = products
    return out


def expert_shape(tensors: Sequence[Tensor], scheme: str) -> tuple[int, int]:
    """n and k of the weight of one expert."""
    shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
    if not scheme:
        ((n, k),) = shapes
        return n, k
    return SCHEMES[scheme].dense_shape(shapes)


def _dense_weights(
    tensors: Sequence[Tensor], experts: Sequence[int], scheme: str, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Each expert with its dense weight [n, k]."""
    if not scheme:
        yield from ((expert, tensors[0][expert].to(dtype)) for expert in experts)
        return
    (n, k), row_block = expert_shape(tensors, scheme), SCHEMES[scheme].row_block
    can_join_rows = row_block > 0 and n % row_block == 0
    step = max(DEQUANTISED_ELEMENTS // (n * k), 1) if can_join_rows else 1
    for first in range(0, len(experts), step):
        chunk = experts[first : first + step]
        is_consecutive = chunk[-1] - chunk[0] == len(chunk) - 1
        index = slice(chunk[0], chunk[-1] + 1) if is_consecutive else torch.tensor(chunk, device=tensors[0].device)
        parts = [tensor[index].flatten(0, 1) for tensor in tensors]
        yield from zip(chunk, SCHEMES[scheme].dequantise(parts, dtype).view(-1, n, k), strict=True)


def _multiply(x: Tensor, weight: Tensor, expert: int, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, None if bias is None else bias[expert].to(x.dtype))

"""The product of experts in plain torch: the CPU path, the parity check's path, and the reference of the tests.

Weights are dequantised to the dtype of the inputs and multiplied, a few experts at a time. All experts of a layer at
once would take too much memory, and one at a time would launch many short kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.planning.schemes import SCHEMES

DEQUANTISED_ELEMENTS = 1 << 25  # at most at a time: 128 MiB in float32, and a few times as much for intermediate values
MAX_PADDING = 4  # rows of padded groups over rows of inputs; with one frequent expert, padding would fill the memory


def multiply_by_expert(
    x: Tensor, expert_ids: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, scheme: str
) -> Tensor:
    """`expert_linear` (ops.py). The inputs may have a wider dtype than the weights and the bias.

    While a CUDA graph is captured, all pairs are multiplied by every expert, because the host cannot read the ids.
    """
    ids = expert_ids.flatten()
    pairs_per_row = len(ids) // x.shape[0]  # top_k, or 1 if x has a row for each pair
    out = x.new_empty(len(ids), expert_shape(tensors, scheme)[0])
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        inputs = x.repeat_interleave(pairs_per_row, 0)
        for experts, weights in _dense_weights(tensors, range(len(tensors[0])), scheme, x.dtype):
            for expert, weight in zip(experts, weights, strict=True):
                y = functional.linear(inputs, weight, None if bias is None else bias[expert].to(x.dtype))
                torch.where((ids == expert)[:, None], y, out, out=out)
        return out
    order = ids.argsort(stable=True)
    counts = ids.bincount(minlength=len(tensors[0])).tolist()
    chosen = [expert for expert, count in enumerate(counts) if count]
    inputs, products, end = x[order // pairs_per_row], torch.empty_like(out), 0
    for experts, weights in _dense_weights(tensors, chosen, scheme, x.dtype):
        sizes = [counts[expert] for expert in experts]
        start, end = end, end + sum(sizes)
        biases = None if bias is None else bias[torch.tensor(experts, device=x.device)].to(x.dtype)
        products[start:end] = _multiply_groups(inputs[start:end], sizes, weights, biases)
    out[order] = products
    return out


def _multiply_groups(inputs: Tensor, sizes: Sequence[int], weights: Tensor, biases: Tensor | None) -> Tensor:
    """Groups of consecutive rows of inputs [rows, k], each times its weight of [groups, n, k]: [rows, n]."""
    if inputs.is_cuda and len(sizes) * max(sizes) <= MAX_PADDING * len(inputs):
        return multiply_padded(inputs, sizes, weights, biases)
    parts = zip(inputs.split(list(sizes)), weights, biases if biases is not None else [None] * len(sizes), strict=True)
    return torch.cat([functional.linear(part, weight, bias) for part, weight, bias in parts])


def multiply_padded(inputs: Tensor, sizes: Sequence[int], weights: Tensor, biases: Tensor | None) -> Tensor:
    """`_multiply_groups` by one batched product, with all groups padded to the largest: fewer launches.

    On a CPU this is slower than one product per group.
    """
    lengths = torch.tensor(sizes, device=inputs.device)
    group = torch.arange(len(sizes), device=inputs.device).repeat_interleave(lengths, output_size=len(inputs))
    position = torch.arange(len(inputs), device=inputs.device) - (lengths.cumsum(0) - lengths)[group]
    padded = inputs.new_zeros(len(sizes), max(sizes), inputs.shape[1])
    padded[group, position] = inputs
    transposed = weights.transpose(1, 2)
    y = padded.bmm(transposed) if biases is None else torch.baddbmm(biases[:, None], padded, transposed)
    return y[group, position]


def expert_shape(tensors: Sequence[Tensor], scheme: str) -> tuple[int, int]:
    """n and k of the weight of one expert."""
    shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
    if not scheme:
        ((n, k),) = shapes
        return n, k
    return SCHEMES[scheme].dense_shape(shapes)


def _dense_weights(
    tensors: Sequence[Tensor], experts: Sequence[int], scheme: str, dtype: torch.dtype
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yields a few experts at a time: their indices, and their dense weights [experts, n, k]."""
    n, k = expert_shape(tensors, scheme)
    row_block = SCHEMES[scheme].row_block if scheme else 1
    can_join_rows = row_block > 0 and n % row_block == 0
    step = max(DEQUANTISED_ELEMENTS // (n * k), 1) if can_join_rows else 1
    for first in range(0, len(experts), step):
        chunk = experts[first : first + step]
        is_consecutive = chunk[-1] - chunk[0] == len(chunk) - 1
        index = slice(chunk[0], chunk[-1] + 1) if is_consecutive else torch.tensor(chunk, device=tensors[0].device)
        if not scheme:
            yield chunk, tensors[0][index].to(dtype)
            continue
        parts = [tensor[index].flatten(0, 1) for tensor in tensors]
        yield chunk, SCHEMES[scheme].dequantise(parts, dtype).view(-1, n, k)

"""Products of dense experts with many pairs, by torch's grouped GEMM.

The rows of x are sorted by expert in memory, and those of the product are put back. That costs two passes over them,
which are few bytes beside the work of many pairs. Our own GEMM has been timed for few pairs only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.kernels.experts.grouping import tables
from tcdeploy.kernels.experts.tiles import MAX_TIMED_ROWS, block_rows


def takes(pairs: int, tensors: list[Tensor], scheme: str) -> bool:
    """Whether pairs are so many that this is used: if blocks of our GEMM would be longer than those that were timed."""
    return not scheme and tensors[0].dtype == torch.bfloat16 and block_rows(pairs, len(tensors[0])) > MAX_TIMED_ROWS


def multiply_sorted(x: Tensor, expert_ids: Tensor, groups: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`expert_linear` (ops.py) for a dense weight [experts, n, k]. Does not synchronise with a GPU.

    Products are rounded to x's dtype before the bias is added.
    """
    pairs, experts = expert_ids.numel(), len(weight)
    order = tables(groups, pairs, experts).order.long()
    sorted_ids = expert_ids.flatten().index_select(0, order)
    stops = torch.searchsorted(sorted_ids, torch.arange(experts, device=x.device), right=True).int()
    rows = x.index_select(0, order // (pairs // len(x)))
    y = functional.grouped_mm(rows, weight.transpose(1, 2), offs=stops)
    if bias is not None:
        y += bias.index_select(0, sorted_ids)
    return torch.empty_like(y).index_copy_(0, order, y)

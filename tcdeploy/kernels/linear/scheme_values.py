"""Plain-torch arithmetic that the schemes of this folder share: scales of groups, and two codes in a byte.

Everything works on fake tensors and copies nothing from the host, so a product that dequantises its weight can be
captured in a CUDA graph. Tables of values are therefore computed, not looked up.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZE = 128  # columns that share a scale in random weights, if it divides the columns


def scale_groups(values: Tensor, scales: Tensor) -> Tensor:
    """values [n, k] * scales [n, groups], each scale for k / groups consecutive columns."""
    return (values.view(*scales.shape, -1) * scales[:, :, None]).view(values.shape)


def rounded_scale(scale: Tensor) -> Tensor:
    """The nearest bfloat16 values, in float32.

    Checkpoints store the scales of 8-bit weights in bfloat16. With rounded scales, a weight that is quantised here and
    saved has the same values in every reader. Codes are computed with the rounded scale, so no precision is lost.
    float16 would lose some, because scales are near its smallest normal number.
    """
    return scale.bfloat16().float()


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values and scales are multiplied for a weight of this dtype.

    float32 for weights of 16 bits, which are rounded once, at the end. A rounded scale would shift all elements of its
    row or block in one direction, and float16 loses digits of scales below its smallest normal number, 6e-5.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def groups_of(weight: Tensor, size: int = GROUP_SIZE) -> Tensor:
    """weight [n, k] in float32 as [n, groups, size]; one group if `size` does not divide k."""
    n, k = weight.shape
    return weight.float().view(n, -1, size if k % size == 0 else k)


def check_groups(columns: int, groups: int) -> None:
    """Raise ValueError unless the columns are whole groups of one size."""
    if groups < 1 or columns < 1 or columns % groups:
        raise ValueError(f"{columns} columns are not {groups} groups of one size")


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [n, k / 2] to uint8 [n, k] below 16. The low four bits of a byte are the column with the even index."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """The inverse of `unpack_nibbles`. The number of columns is even."""
    even, odd = codes.to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return even | odd << 4

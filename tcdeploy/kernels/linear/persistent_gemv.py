"""Launches a GEMV of int4 weights with persistent programs: each computes many tiles.

A program reads the input row once, normalises it if there is a norm, and keeps it in registers. It then multiplies
whole rows of the weight, which arrive through asynchronous copies. In the GEMV of scheme_matmul.py each program
converts and normalises the row again for eight rows of the weight, and its loads start only when it starts. Compiled
for Hopper, the product of 4,096 columns with norm and SwiGLU has 6.0 instead of 8.7 SASS instructions per byte of
codes, and 5 instead of 3 programs fit on an SM. It has not been timed, so no heuristic chooses it.

A thread holds the part of the input row that it multiplies. A block is a row of the weight, padded with zeros to a
power of two of bytes. Weights must have no zero points, and groups of a multiple of 128 columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.kernels.linear.scheme_operands import Operands
from tcdeploy.kernels.linear.scheme_tiles import PersistentGemvTile
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

GEMV = Kernel("tcdeploy.kernels.linear.persistent_gemv_kernel", "_persistent_gemv_kernel")
MIN_ROW_BYTES = 512
MAX_VALUES = 64  # of x per thread; more do not fit in the registers beside the other values


def is_supported(weight: Operands, tile: PersistentGemvTile) -> bool:
    """Whether the kernel can multiply one row by this weight with this tile."""
    row_bytes = weight.weight.shape[1]
    has_groups = weight.is_plain_int4 and weight.group_scale is not None
    values = next_power_of_2(row_bytes) * weight.per_byte // (32 * tile.num_warps)
    return has_groups and row_bytes >= MIN_ROW_BYTES and values <= MAX_VALUES


def persistent_gemv(
    out: Tensor, x: Tensor, weight: Operands, addend: Tensor | None, gated: bool, norm: Tensor | None, eps: float,
    tile: PersistentGemvTile,
) -> None:  # fmt: skip
    """out = x [1, k] @ w [n, k].T + addend; if `gated`, silu of the first half of the columns times the second half.

    With `norm` [k], x is replaced by x / sqrt(mean(x^2) + eps) * norm.
    """
    assert is_supported(weight, tile) and len(x) == 1
    n, row_bytes = weight.weight.shape
    use_pdl = supports_pdl(x.device)
    tiles = n // tile.block_n
    GEMV.launch(
        (programs(tiles, tile.programs_per_sm * multiprocessors(x.device)),),
        out, x, weight.weight, weight.group_scale, addend, norm, n, x.shape[1], weight.groups, tiles, eps,
        weight.group, row_bytes, next_power_of_2(row_bytes), tile.block_n, gated, tile.is_early,
        tile.num_stages, use_pdl,
        num_warps=tile.num_warps, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip


def programs(tiles: int, max_programs: int) -> int:
    """The smallest number of programs with the same maximum of tiles per program as `max_programs`."""
    return -(-tiles // -(-tiles // max_programs))


def multiprocessors(device: torch.device) -> int:
    """The number of SMs of a GPU; 1 in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

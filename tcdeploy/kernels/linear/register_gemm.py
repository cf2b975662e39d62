"""Launches the GEMM of interleaved int4 and FP8 weights for few rows of x, which keeps the values in registers.

The weight is the first operand, which the tensor cores of Hopper read from registers: a warp group multiplies 64 rows
of the weight by all rows of x. The codes arrive through asynchronous copies. A thread reads words of codes of one row,
and converts them in the registers from which the tensor cores read them. The tensor cores read x where its asynchronous
copy has written it, in the column order of the values. int4 codes are stored so that this is the order of x
(int4_scheme.py). FP8 codes keep the order of checkpoints, because cuBLAS also reads them. For these weights the kernel
loads the columns of x in another order. It keeps pairs of neighbouring columns together, so a copy has 4 bytes.

The columns of a step are in one group. The sums of a step are multiplied by the group's scale, so values are exact.
int4 weights with more than 64 rows of x (32 if the weight is wide, WIDE_N) have too many sums for the registers, so the
scales multiply the values, which are rounded to x's dtype. The tensor cores then add all steps to the same sums, as
they do for weights without groups. More than 128 rows are divided among programs, each of which converts the codes
again.

The columns of narrow weights, and of wide int4 ones with up to 16 rows of x, are split among programs, in parts that
differ by at most a step. A second kernel adds the sums of the parts in a fixed order. They are stored in float32, or in
x's dtype if the values were rounded to it (128 rows on an H200: a relative error of 2.6e-3 instead of 2.1e-3).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tcdeploy.kernels.linear.scheme_gemm import sum_parts
from tcdeploy.kernels.linear.scheme_operands import Operands
from tcdeploy.kernels.linear.scheme_tiles import REGISTER_BLOCK_K, RegisterGemmTile
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

GEMM = Kernel("tcdeploy.kernels.linear.register_gemm_kernel", "_register_gemm_kernel")
MAX_STAGES, MIN_SHARED_BYTES = 4, 128 << 10
MAX_BLOCK_M = 128  # rows of x per program


@functools.cache
def max_stages(device: torch.device) -> int:
    """Stages of the software pipeline, at most. With 128 rows of x, 3 take 112 KiB of shared memory, but Ada has 99."""
    if device.type != "cuda":
        return MAX_STAGES
    properties: Any = torch.cuda.get_device_properties(device)
    return MAX_STAGES if properties.shared_memory_per_block_optin >= MIN_SHARED_BYTES else 2


def fit_unroll(tile: RegisterGemmTile, k: int) -> int:
    """The number of steps between two barriers."""
    return math.gcd(tile.unroll, k // REGISTER_BLOCK_K)


def fit_parts(tile: RegisterGemmTile, rows: int, n: int, k: int) -> int:
    """The number of parts of the columns of a weight [n, k]."""
    parts = min(tile.splits, k // (REGISTER_BLOCK_K * fit_unroll(tile, k)))
    if tile.max_programs is None:
        return parts
    return max(min(parts, tile.max_programs // math.prod(count_tiles(tile, rows, n))), 1)


def count_tiles(tile: RegisterGemmTile, rows: int, n: int) -> tuple[int, int]:
    """The number of tiles of rows of x, and of rows of the weight."""
    return -(-rows // MAX_BLOCK_M), -(-n // tile.block_n)


def register_gemm(
    out: Tensor, x: Tensor, weight: Operands, addend: Tensor | None, gated: bool, tile: RegisterGemmTile
) -> None:
    """out = x [rows, k] @ w [n, k].T + addend; if `gated`, silu of the first half of the columns times the second."""
    assert weight.is_register_operand and (weight.is_interleaved or not tile.scales_values)
    (rows, k), n = x.shape, weight.weight.shape[0]
    assert rows * x.stride(0) < 1 << 31, "the kernel's offsets in x have 32 bits"
    words = weight.weight.view(torch.int32)
    options: dict[str, int] = {"launch_pdl": True} if supports_pdl(x.device) else {}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    block_m = min(max(16, next_power_of_2(rows)), MAX_BLOCK_M)
    unroll, splits = fit_unroll(tile, k), fit_parts(tile, rows, n, k)
    addend_stride = addend.stride(0) if addend is not None and addend.ndim == 2 else 0
    parts_dtype = x.dtype if tile.scales_values else torch.float32
    parts = x.new_empty(splits, rows, n, dtype=parts_dtype) if splits > 1 else None
    GEMM.launch(
        (*count_tiles(tile, rows, n), splits),
        out if parts is None else parts, x, words, weight.row_scale, weight.group_scale,
        addend if parts is None else None, rows, n, k, splits, words.shape[1], weight.groups,
        x.stride(0), addend_stride, weight.format, weight.group, weight.row_block, block_m, tile.block_n,
        REGISTER_BLOCK_K, gated, parts is not None, tile.scales_values, unroll, supports_pdl(x.device),
        num_warps=tile.num_warps, num_stages=min(tile.num_stages, max_stages(x.device)), **options,
    )  # fmt: skip
    if parts is not None:
        sum_parts(out, parts, addend, gated)

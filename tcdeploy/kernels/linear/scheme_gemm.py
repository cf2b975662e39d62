"""Launches the GEMM of quantised weights for up to 128 rows: of 4-bit weights from 33 rows on, of others from 65.

A program makes the values of a tile of the weight in registers and writes them to shared memory, where the tensor cores
read them. Values are multiplied by their scales in float32 and rounded to x's dtype once, so they equal those of a
dense copy. If scales multiplied the sums instead, as in the skinny GEMM, they would have to be loaded for each column
of the sums.

Narrow weights have too few tiles to fill the GPU. Their columns are split among programs, whose sums a second kernel
adds in a fixed order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tcdeploy.kernels.linear.scheme_operands import Operands
from tcdeploy.kernels.linear.scheme_tiles import SchemeGemmTile
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.kernel import Kernel

GEMM = Kernel("tcdeploy.kernels.linear.scheme_gemm_kernel", "_scheme_gemm_kernel")
SUM_PARTS = Kernel("tcdeploy.kernels.linear.scheme_gemm_kernel", "_sum_gemm_parts_kernel")
SUM_BLOCK, SUM_WARPS = 1024, 4


def gemm(out: Tensor, x: Tensor, weight: Operands, addend: Tensor | None, gated: bool, tile: SchemeGemmTile) -> None:
    """out = x [rows, k] @ w [n, k].T + addend; if `gated`, silu of the first half of the columns times the second."""
    (rows, k), (n, row_bytes) = x.shape, weight.weight.shape
    pdl = {"launch_pdl": True} if supports_pdl(x.device) else {}
    block_k = math.gcd(tile.block_k, k)
    splits = fit_splits(tile.splits, k // block_k)
    m_tiles, n_tiles = -(-rows // tile.block_m), -(-n // tile.block_n)
    addend_stride = addend.stride(0) if addend is not None and addend.ndim == 2 else 0
    parts = x.new_empty(splits, rows, n, dtype=torch.float32) if splits > 1 else None
    GEMM.launch(
        (m_tiles * n_tiles, splits),
        out if parts is None else parts, x, weight.weight, weight.row_scale, weight.group_scale, weight.zero,
        addend if parts is None else None, rows, m_tiles, n, k, k // splits, row_bytes, weight.groups, x.stride(0),
        addend_stride, weight.format, weight.group, weight.row_block, tile.block_m, tile.block_n, block_k,
        math.gcd(weight.group, block_k), gated, parts is not None, bool(pdl),
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl,
    )  # fmt: skip
    if parts is not None:
        sum_parts(out, parts, addend, gated)


def sum_parts(out: Tensor, parts: Tensor, addend: Tensor | None, gated: bool) -> None:
    """out = the sum of parts [splits, rows, n] + addend; if `gated`, silu of even columns times the odd ones."""
    splits, rows, n = parts.shape
    pdl = {"launch_pdl": True} if supports_pdl(out.device) else {}
    addend_stride = addend.stride(0) if addend is not None and addend.ndim == 2 else 0
    SUM_PARTS.launch(
        (rows, -(-n // SUM_BLOCK)),
        out, parts, addend, rows, n, addend_stride, splits, SUM_BLOCK, gated, bool(pdl), num_warps=SUM_WARPS, **pdl,
    )  # fmt: skip


def fit_splits(splits: int, steps: int) -> int:
    """The largest power of two that is at most `splits` and divides `steps`, so that parts are equal."""
    return math.gcd(splits, steps & -steps)

"""Launches the GEMM of interleaved int4 weights for many rows of x on Hopper.

As in the register GEMM, the weight is the first operand of the tensor cores, and is made of codes in the registers from
which they read it. Values are multiplied by their scales and rounded to x's dtype, so they equal those of a dense copy.
This kernel makes them while the tensor cores multiply. A tile of 128 rows of the weight has up to 256 rows of x, so
that few programs make the same values.

A number of tiles that is not a multiple of the number of programs that the GPU runs at once would leave programs
without work at the end. Then each program has an equal share of the columns of all tiles instead. The shares of a tile
are stored in x's dtype, and a second kernel adds them in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tcdeploy.kernels.linear.scheme_operands import Operands
from tcdeploy.kernels.linear.scheme_tiles import HopperGemmTile, count_hopper_tiles, fit_programs
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.gluon import supports_wgmma
from tcdeploy.torch_compat.triton.kernel import Kernel

GEMM = Kernel("tcdeploy.kernels.linear.hopper_gemm_kernel", "_hopper_gemm_kernel")
SUM_TILES = Kernel("tcdeploy.kernels.linear.hopper_gemm_kernel", "_sum_tiles_kernel")
NUM_WARPS, SUM_ROWS, SUM_WARPS = 8, 16, 4
COPY_ELEMENTS = 16  # of x, to a multiple of which Triton has to know that rows are aligned, for copies of 16 bytes
MULTIPROCESSORS = 132  # of an H100 or H200, assumed on a CPU


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)


def takes(weight: Operands, device: torch.device) -> bool:
    """Whether the kernel multiplies this weight on this device."""
    return weight.is_interleaved and supports_wgmma(device)


def hopper_gemm(
    out: Tensor, x: Tensor, weight: Operands, addend: Tensor | None, gated: bool, tile: HopperGemmTile
) -> None:
    """out = x [rows, k] @ w [n, k].T + addend; if `gated`, silu of the first half of the columns times the second."""
    assert weight.is_interleaved
    (rows, k), n = x.shape, len(weight.weight)
    if x.stride(0) % COPY_ELEMENTS or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    assert rows * x.stride(0) < 1 << 31, "the kernel's offsets in x have 32 bits"
    words, scales = weight.weight.view(torch.int32), weight.row_scale if weight.groups == 1 else weight.group_scale
    options: dict[str, int] = {"launch_pdl": True} if supports_pdl(x.device) else {}
    limit = {"maxnreg": tile.max_registers} if tile.max_registers is not None else {}
    tiles = count_hopper_tiles(tile, rows, n)
    programs = fit_programs(tile, rows, n, k, multiprocessors(x.device))
    parts = x.new_empty(2 * programs, tile.block_m, tile.block_n, dtype=x.dtype) if programs != tiles else None
    addend_stride = addend.stride(0) if addend is not None and addend.ndim == 2 else 0
    GEMM.launch(
        (programs,),
        out, parts, x, words, scales, addend, rows, n, k, programs, words.shape[1], weight.groups, x.stride(0),
        addend_stride, weight.group, tile.block_m, tile.block_n, tile.stages, gated, bool(options),
        num_warps=NUM_WARPS, **limit, **options,
    )  # fmt: skip
    if parts is not None:
        SUM_TILES.launch(
            (tiles, tile.block_m // SUM_ROWS),
            out, parts, addend, rows, n, k, programs, addend_stride, tile.block_m, tile.block_n, SUM_ROWS, gated,
            bool(options),
            num_warps=SUM_WARPS, **options,
        )  # fmt: skip

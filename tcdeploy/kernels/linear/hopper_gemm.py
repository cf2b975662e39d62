"""Launches the GEMM of interleaved int4 weights for many rows of x on Hopper.

As in the register GEMM, the weight is the first operand of the tensor cores, and its codes are converted in the
registers from which they read it. Values are multiplied by their scales and rounded to x's dtype, so they equal those
of a dense copy. This kernel converts codes while the tensor cores multiply. A tile has 128 rows of the weight and up to
256 rows of x, so that few programs convert the same codes.

If there are fewer tiles than the GPU runs programs at once, or a few more than a multiple of that number, the columns
are split among programs. Their sums are stored in x's dtype, and a second kernel adds them in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tcdeploy.kernels.linear.scheme_gemm import sum_parts
from tcdeploy.kernels.linear.scheme_operands import Operands
from tcdeploy.kernels.linear.scheme_tiles import HopperGemmTile, count_hopper_tiles, fit_hopper_splits
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.gluon import supports_wgmma
from tcdeploy.torch_compat.triton.kernel import Kernel

GEMM = Kernel("tcdeploy.kernels.linear.hopper_gemm_kernel", "_hopper_gemm_kernel")
NUM_WARPS = 8
COPY_ELEMENTS = 16  # Triton copies 16 bytes of x at a time if it knows that the row stride is a multiple of this
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
    splits = fit_hopper_splits(tile, rows, n, k, multiprocessors(x.device))
    parts = x.new_empty(splits, rows, n, dtype=x.dtype) if splits > 1 else None
    addend_stride = addend.stride(0) if addend is not None and addend.ndim == 2 else 0
    GEMM.launch(
        (*count_hopper_tiles(tile, rows, n), splits),
        out if parts is None else parts, x, words, scales, addend if parts is None else None, rows, n, k, splits,
        words.shape[1], weight.groups, x.stride(0), addend_stride, weight.group, tile.block_m, tile.block_n,
        tile.stages, gated, parts is not None, bool(options),
        num_warps=NUM_WARPS, **options,
    )  # fmt: skip
    if parts is not None:
        sum_parts(out, parts, addend, gated)

"""Launches the GEMM of int4 weights for 9 to 32 rows of x, which keeps dequantised values in registers.

The weight is the first operand, which the tensor cores of Hopper read from registers: a warp group multiplies 64 rows
of the weight by all rows of x. The codes arrive through asynchronous copies. A thread reads a word of 8 codes of one
row, and converts them in the registers from which the tensor cores read them. This changes the order of the columns, so
a program writes x to shared memory in the same order. Each step is in one group, and its sums are multiplied by the
group's scale, so values are exact.

FRAGMENT_GEMM_TILES need a weight whose codes are stored in another order (`fragment_order`). The converted values then
have the column order of x, so the tensor cores read x where its asynchronous copy has written it. If the scales also
multiply the values instead of the sums, the tensor cores add all steps to the same sums. The values of the next
instruction are then made while the current one runs.

Weights must have no zero points, and groups of a multiple of 128 columns. The columns of a weight with few rows are
split among programs, whose sums a second kernel adds in a fixed order.

Rejected: more rows of x. With 64 rows it is slower than scheme_gemm.py for three of the four products of a layer, and
with 128 for all (Llama 8B, H200). There are more sums to scale, and they leave no registers for a second program on an
SM. If scales multiply the values instead, one of the four products is faster than in scheme_gemm.py, by 5 to 10%.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tcdeploy.kernels.linear.scheme_gemm import fit_splits, sum_parts
from tcdeploy.kernels.linear.scheme_operands import Operands
from tcdeploy.kernels.linear.scheme_tiles import REGISTER_BLOCK_K, RegisterGemmTile
from tcdeploy.kernels.linear.scheme_values import pack_nibbles, unpack_nibbles
from tcdeploy.torch_compat.inductor.pdl import supports_pdl
from tcdeploy.torch_compat.triton.kernel import Kernel, next_power_of_2

GEMM = Kernel("tcdeploy.kernels.linear.register_gemm_kernel", "_register_gemm_kernel")


def fragment_order(weight: Tensor) -> Tensor:
    """A weight of int4 codes, uint8 [n, k / 2], with the codes of each 32 columns in the order of the tensor cores.

    These are four 32-bit words. For i and t from 0 to 3, word t has the code of column 8 i + 2 t from bit 4 i on, and
    that of column 8 i + 2 t + 1 from bit 4 i + 16 on.
    """
    codes = unpack_nibbles(weight).unflatten(1, (-1, 4, 4, 2))  # n, 32 columns, i, t, column % 2
    return pack_nibbles(codes.permute(0, 1, 3, 4, 2).flatten(1))


def register_gemm(
    out: Tensor, x: Tensor, weight: Operands, addend: Tensor | None, gated: bool, tile: RegisterGemmTile
) -> None:
    """out = x [rows, k] @ w [n, k].T + addend; if `gated`, silu of the first half of the columns times the second."""
    assert weight.is_plain_int4
    (rows, k), n = x.shape, weight.weight.shape[0]
    words = weight.weight.view(torch.int32)
    options: dict[str, int] = {"launch_pdl": True} if supports_pdl(x.device) else {}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    splits = fit_splits(tile.splits, k // REGISTER_BLOCK_K)
    addend_stride = addend.stride(0) if addend is not None and addend.ndim == 2 else 0
    parts = x.new_empty(splits, rows, n, dtype=torch.float32) if splits > 1 else None
    GEMM.launch(
        (-(-n // tile.block_n), splits),
        out if parts is None else parts, x, words, weight.row_scale, weight.group_scale,
        addend if parts is None else None, rows, n, k, k // splits, words.shape[1], weight.groups, x.stride(0),
        addend_stride, weight.group, max(16, next_power_of_2(rows)), tile.block_n, REGISTER_BLOCK_K, gated,
        parts is not None, tile.fragments, tile.scales_values,
        math.gcd(tile.unroll, k // splits // REGISTER_BLOCK_K), supports_pdl(x.device),
        num_warps=tile.num_warps, num_stages=tile.num_stages, **options,
    )  # fmt: skip
    if parts is not None:
        sum_parts(out, parts, addend, gated)

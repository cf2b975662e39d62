"""The Triton kernel that quantises inputs to FP8, which fp8_inputs.py launches and describes.

A program computes the scales and codes of one group of columns for a few rows. It reads the group once and keeps it in
registers between the two uses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.torch_compat.triton.source import ignore_comments


# `rows` and the stride of scales are not specialised; otherwise steps of 128 and of 129 tokens would compile twice.
@ignore_comments
@triton.jit(do_not_specialize=["rows", "padded_rows"])
def _fp8_inputs_kernel(
    codes, scales, x, rows, padded_rows, k, group, x_stride,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offset = tl.arange(0, BLOCK_COLUMNS)
    column = tl.program_id(1) * group + offset
    in_group = ((offset < group) & (column < k))[None, :]
    x_ptrs = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    values = tl.load(x_ptrs, mask=(row < rows)[:, None] & in_group, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), 1), SMALLEST)
    scaled = values * tl.div_rn(LARGEST, largest)[:, None]  # inf * 0 and NaN * anything are NaN
    scaled = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))  # keeps NaN
    is_stored = row < padded_rows
    code_ptrs = codes + row.to(tl.int64)[:, None] * k + column[None, :]
    tl.store(code_ptrs, scaled.to(codes.dtype.element_ty), mask=is_stored[:, None] & in_group)
    tl.store(scales + tl.program_id(1) * padded_rows + row, tl.div_rn(largest, LARGEST), mask=is_stored)

"""The Triton kernel of routers, which routing.py launches and describes."""

# ruff: noqa: SIM108, SIM300 - a constexpr is not the constant of a comparison, and branches of Triton read better
from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.kernels.l2_prefetch import prefetch_rows
from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def _top_k_kernel(
    values, indices, scores, weights, columns, row_stride, expert_size,
    TOP_K: tl.constexpr, SOFTMAX: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A program is one warp, and chooses the columns of one row.

    If `weights` are prefetched, a row has several programs. Each prefetches a share, and the first stores the result.
    COLUMNS and SLOTS: the columns and TOP_K, rounded up to powers of two.
    """
    LOWEST: tl.constexpr = -0x80000000
    FREE_BITS: tl.constexpr = 0 if scores.dtype.element_ty == tl.float32 else 0x1FFF
    row = tl.program_id(0).to(tl.int64)
    if weights is not None:
        LINE: tl.constexpr = 1024 // weights.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
        share = (tl.program_id(1) * 32 + tl.arange(0, 32)) * LINE
    column, slot = tl.arange(0, COLUMNS), tl.arange(0, SLOTS)
    in_row = column < columns
    if USE_PDL:  # no memory access before the wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(scores + row * row_stride + column, mask=in_row, other=0.0).to(tl.float32)

    # Integers in the order of the floats: 0.0 makes -0.0 equal to it, and NaN is the largest.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    keys = tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    if FREE_BITS:  # these bits are zero, and take the column: of equal scores, the lower column has the larger key
        keys = keys & ~FREE_BITS | FREE_BITS - column
    keys = tl.where(in_row, keys, LOWEST)
    top_keys, top_columns = tl.zeros([SLOTS], tl.int32), tl.zeros([SLOTS], tl.int32)
    for i in tl.static_range(TOP_K):
        largest = tl.max(keys, 0)
        top_keys = tl.where(slot == i, largest, top_keys)
        if FREE_BITS:
            first = FREE_BITS - (largest & FREE_BITS)
            keys = tl.where(keys == largest, LOWEST, keys)
        else:
            first = tl.min(tl.where(keys == largest, column, COLUMNS), 0)
            keys = tl.where(column == first, LOWEST, keys)
        top_columns = tl.where(slot == i, first, top_columns)
        if weights is not None:
            expert = weights + first.to(tl.int64) * expert_size + share
            prefetch_rows(expert, LINE)
            prefetch_rows(expert + expert_size // 2, LINE)
    if FREE_BITS:
        top_keys = tl.where(top_keys < 0, top_keys | FREE_BITS, top_keys & ~FREE_BITS)
    top = tl.where(top_keys < 0, top_keys ^ 0x7FFFFFFF, top_keys).to(tl.float32, bitcast=True)

    in_slots = slot < TOP_K
    if SOFTMAX != "none":
        highest = tl.sum(tl.where(slot == 0, top, 0.0), 0)
        top = tl.where(in_slots, tl.exp(top - highest), 0.0)
        if SOFTMAX == "all":
            total = tl.sum(tl.where(in_row, tl.exp(x - highest), 0.0), 0)
        else:
            total = tl.sum(top, 0)
        top = tl.div_rn(top, total)
    is_stored = in_slots & (tl.program_id(1) == 0)
    tl.store(values + row * TOP_K + slot, top.to(values.dtype.element_ty), mask=is_stored)
    tl.store(indices + row * TOP_K + slot, top_columns.to(tl.int64), mask=is_stored)

"""The Triton GEMVs of dense experts, for few pairs; matmul.py launches and describes them."""

# ruff: noqa: SIM108, SIM300 - a constexpr is not the constant of a comparison, and branches of Triton read better
from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def _sum_eights(weights, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of the products over groups of 8 columns, which a thread loads at once: [ROWS, COLUMNS // 8]."""
    products = weights.to(tl.float32) * inputs.to(tl.float32)
    return tl.sum(tl.reshape(products, (ROWS, COLUMNS // 8, 8)), 2)


@ignore_comments
@triton.jit
def _columns(n, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """(columns of the output, the rows of the weight that make them, width of the output) of a program.

    If GATED, the first half of the rows are gate rows, the second half their up rows, and the output is half as wide.
    """
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        column = tl.program_id(1) * HALF + tl.arange(0, HALF)
        tile_row = tl.arange(0, BLOCK_N)
        out_columns = n // 2
        w_column = tl.program_id(1) * HALF + tile_row % HALF + tile_row // HALF * out_columns
    else:
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        w_column, out_columns = column, n
    return column, w_column, out_columns


@ignore_comments
@triton.jit
def _apply_swiglu(y, GATED: tl.constexpr):
    """silu(gate) * up of the halves of y, if GATED."""
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, y.shape[0] // 2)), (1, 0)))
        y = gate * tl.sigmoid(gate) * up
    return y


@ignore_comments
@triton.jit(do_not_specialize=["slots"])
def _dense_expert_gemv_kernel(
    out, x, ids, weight, bias, norm, n, k, eps, slots, x_stride, expert_stride, w_stride,
    IS_TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    n_stride, k_stride = (1, w_stride) if IS_TRANSPOSED else (w_stride, 1)
    pair = tl.program_id(0)
    column, w_column, out_columns = _columns(n, BLOCK_N, GATED)
    k_offsets = tl.arange(0, BLOCK_K)
    in_rows = (w_column < n)[:, None]
    if USE_PDL:  # no memory access before the wait: the expert is not known
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(ids + pair)
    w_ptrs = weight + expert * expert_stride + w_column[:, None] * n_stride + k_offsets[None, :] * k_stride
    x_ptrs = x + (pair // slots).to(tl.int64) * x_stride + k_offsets
    if bias is not None:
        biases = tl.load(bias + expert * n + w_column, mask=w_column < n, other=0.0).to(tl.float32)
    if IS_TRANSPOSED:
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        mask = in_rows & (k_offsets < k - start)[None, :]
        weights = tl.load(w_ptrs + start * k_stride, mask=mask, other=0.0, eviction_policy="evict_first")
        inputs = tl.load(x_ptrs + start, mask=k_offsets < k - start, other=0.0).to(tl.float32)
        if norm is not None:
            squares += inputs * inputs
            inputs *= tl.load(norm + start + k_offsets, mask=k_offsets < k - start, other=0.0).to(tl.float32)
        if IS_TRANSPOSED:
            acc += weights.to(tl.float32) * inputs[None, :]
        else:
            acc += _sum_eights(weights, inputs[None, :], BLOCK_N, BLOCK_K)
    y = tl.sum(acc, 1)
    if norm is not None:
        y *= tl.rsqrt(tl.sum(squares, 0) / k + eps)
    if bias is not None:
        y += biases
    y = _apply_swiglu(y, GATED)
    tl.store(out + pair.to(tl.int64) * out_columns + column, y.to(out.dtype.element_ty), mask=column < out_columns)


@ignore_comments
@triton.jit
def _dense_expert_gemv_sum_kernel(
    out, x, ids, factors, weight, bias, addend, n, k, x_stride, expert_stride, w_stride, addend_stride,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies the rows of all pairs of a token. SLOTS: TOP_K, rounded up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    slot, k_offsets = tl.arange(0, SLOTS), tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_slots = slot < TOP_K
    pair = token * TOP_K + tl.minimum(slot, TOP_K - 1)
    expert = tl.load(ids + pair)
    w_rows = expert[:, None] * expert_stride + column[None, :] * w_stride
    w_ptrs = weight + w_rows[:, :, None] + k_offsets[None, None, :]
    is_pair = in_slots[:, None, None]
    weights = tl.load(w_ptrs, mask=is_pair, other=0.0, eviction_policy="evict_first")
    if USE_PDL:  # before the wait the kernel accesses weights and ids only: see `expert_linear_sum` in ops.py
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Loaded for each row of the weight: one load for all of them would go through shared memory.
    x_ptrs = x + (pair * x_stride)[:, None, None] + tl.zeros([1, BLOCK_N, 1], tl.int32) + k_offsets[None, None, :]
    scales = tl.load(factors + pair, mask=in_slots, other=0.0).to(tl.float32)
    if bias is not None:
        biases = tl.load(bias + expert[:, None] * n + column[None, :]).to(tl.float32)
    if addend is not None:
        addends = tl.load(addend + token * addend_stride + column).to(tl.float32)
    acc = _sum_eights(weights, tl.load(x_ptrs, mask=is_pair, other=0.0), SLOTS * BLOCK_N, BLOCK_K)
    for start in range(BLOCK_K, k, BLOCK_K):
        weights = tl.load(w_ptrs + start, mask=is_pair, other=0.0, eviction_policy="evict_first")
        inputs = tl.load(x_ptrs + start, mask=is_pair, other=0.0)
        acc += _sum_eights(weights, inputs, SLOTS * BLOCK_N, BLOCK_K)
    y = tl.reshape(tl.sum(acc, 1), (SLOTS, BLOCK_N))
    if bias is not None:
        y += biases
    total = tl.sum(tl.where(in_slots[:, None], y * scales[:, None], 0.0), 0)
    if addend is not None:
        total += addends
    tl.store(out + token * n + column, total.to(out.dtype.element_ty))

"""The Triton kernels of linear layers, which gemv.py and skinny_gemm.py launch and describe."""

from __future__ import annotations

import triton
import triton.language as tl

from tcdeploy.torch_compat.triton.source import ignore_comments


@ignore_comments
@triton.jit
def _load_columns(pointers, in_row, EVICTION: tl.constexpr):
    """Elements of rows, and 0 where `in_row` is false, after the end of a row. None: no element needs the mask."""
    if in_row is None:
        elements = tl.load(pointers, eviction_policy=EVICTION)
    else:
        elements = tl.load(pointers, mask=in_row, other=0.0, eviction_policy=EVICTION)
    return elements


@ignore_comments
@triton.jit
def _gemv_kernel(
    out, x, w, addend, norm, n, k, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr, GATED: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    if GATED:  # the first half of the tile's rows of w are gate rows, the second half their up rows
        HALF: tl.constexpr = BLOCK_N // 2
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        tile_row = tl.arange(0, BLOCK_N)
        w_row = tl.program_id(0) * HALF + tile_row % HALF + tile_row // HALF * (n // 2)
    else:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        w_row = column
    k_offsets = tl.arange(0, BLOCK_K)
    w_ptrs = w + w_row.to(tl.int64)[:, None] * k + k_offsets[None, :]
    weights = tl.load(w_ptrs, eviction_policy="evict_first")
    if norm is not None:
        scales = tl.load(norm + k_offsets)
    if USE_PDL:  # before the wait the kernel accesses weights only
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if addend is not None:
        addend_tile = tl.load(addend + column)

    inputs = tl.load(x + k_offsets).to(tl.float32)
    if norm is not None:
        squares = inputs * inputs
        inputs *= scales.to(tl.float32)
    acc = weights.to(tl.float32) * inputs[None, :]
    for start in tl.range(BLOCK_K, k, BLOCK_K, num_stages=STAGES):
        if MASKED:
            in_row = start + k_offsets < k
            w_in_row = in_row[None, :]
        else:
            in_row = None
            w_in_row = None
        weights = _load_columns(w_ptrs + start, w_in_row, "evict_first")
        inputs = _load_columns(x + start + k_offsets, in_row, "").to(tl.float32)
        if norm is not None:
            squares += inputs * inputs
            inputs *= _load_columns(norm + start + k_offsets, in_row, "").to(tl.float32)
        acc += weights.to(tl.float32) * inputs[None, :]

    y = tl.sum(acc, 1)
    if norm is not None:
        y *= tl.rsqrt(tl.sum(squares, 0) / k + eps)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF)), (1, 0)))
        y = gate * tl.sigmoid(gate) * up
    if addend is not None:
        y += addend_tile.to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty))


# `rows` is not specialised; otherwise a batch of 16 would recompile the kernel.
@ignore_comments
@triton.jit(do_not_specialize=["rows"])
def _skinny_gemm_kernel(
    out, x, w, addend, rows, n, k, x_stride, addend_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_SLICES: tl.constexpr, GATED: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    if GATED:  # the first half of the tile's rows of w are gate rows, the second half their up rows
        HALF: tl.constexpr = BLOCK_N // 2
        n //= 2
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        tile_row = tl.arange(0, BLOCK_N)
        w_row = tl.minimum(tl.program_id(0) * HALF + tile_row % HALF, n - 1) + tile_row // HALF * n
    else:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        w_row = tl.minimum(column, n - 1)  # past the end: reads the last row again, never stored
    w_rows = w + w_row.to(tl.int64) * k
    x_rows = x + row.to(tl.int64) * x_stride
    if K_SLICES == 1:
        k_offsets = tl.arange(0, BLOCK_K)[None, :]
        w_ptrs, x_ptrs = w_rows[:, None] + k_offsets, x_rows[:, None] + k_offsets
        x_mask = (row < rows)[:, None]
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        WIDTH: tl.constexpr = BLOCK_K // K_SLICES
        k_offsets = tl.arange(0, K_SLICES)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
        w_ptrs, x_ptrs = w_rows[None, :, None] + k_offsets, x_rows[None, :, None] + k_offsets
        x_mask = (row < rows)[None, :, None]
        acc = tl.zeros([K_SLICES, BLOCK_N, BLOCK_M], tl.float32)
    if USE_PDL:  # no memory access before the wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    out_mask = (row < rows)[:, None] & (column < n)[None, :]
    if addend is not None:  # a bias (row stride 0) or a residual; loaded before the loop, which hides its latency
        addend_tile = tl.load(
            addend + row.to(tl.int64)[:, None] * addend_stride + column[None, :], mask=out_mask, other=0.0
        )

    for start in range(0, k, BLOCK_K):
        weights = tl.load(w_ptrs + start)
        inputs = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        acc = tl.dot(weights, tl.trans(inputs) if K_SLICES == 1 else tl.trans(inputs, 0, 2, 1), acc)

    if K_SLICES > 1:
        acc = tl.sum(acc, 0)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BLOCK_M)), (1, 2, 0)))
        acc = gate * tl.sigmoid(gate) * up
    y = tl.trans(acc)
    if addend is not None:
        y += addend_tile.to(tl.float32)
    tl.store(out + row[:, None] * n + column[None, :], y.to(out.dtype.element_ty), mask=out_mask)
